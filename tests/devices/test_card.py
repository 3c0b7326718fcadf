from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoaccum.devices.card import CardMemory, check_index
from autoaccum.errors import UsageError
from autoaccum.units import GIB

NAMES = ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]


CARD = CardMemory(
    index=0,
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    free_bytes=15 * GIB,
    reserved_bytes=GIB,
    capability=(8, 6),
    multiprocessors=82,
)


def make_card(**change: Any) -> CardMemory:
    return dataclasses.replace(CARD, **change)


def test_what_is_available_is_what_is_held_and_what_is_free() -> None:
    assert make_card().available_bytes == 16 * GIB
    assert make_card().held_outside_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("names", "visible", "message"),
    [
        (
            NAMES,
            None,
            "there is no cuda:99: 2 cards are visible, cuda:0 (NVIDIA A100-SXM4-40GB), "
            "cuda:1 (NVIDIA A100-SXM4-40GB MIG 1g.5gb): take one of these",
        ),
        (
            NAMES[:1],
            "3",
            "there is no cuda:99: 1 card is visible with CUDA_VISIBLE_DEVICES=3, cuda:0 (NVIDIA A100-SXM4-40GB): "
            "take it",
        ),
        (
            [],
            "",
            "there is no cuda:99: no card is visible with CUDA_VISIBLE_DEVICES=: nvidia-smi should list it, and the "
            "driver be new enough for this build of PyTorch",
        ),
    ],
)
def test_an_index_beyond_says_what_is_there(names: list[str], visible: str | None, message: str) -> None:
    with pytest.raises(UsageError) as seen:
        check_index(99, names, visible)
    assert str(seen.value) == message
