"""What a process takes of a card outside PyTorch's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoaccum.devices.simulated.catalog import all_cards, find_card
from autoaccum.devices.simulated.context import REPORTED, context_bytes
from autoaccum.units import MIB


@pytest.mark.parametrize("title", REPORTED)
def test_the_rule_gives_what_was_reported(title: str) -> None:
    reported, source = REPORTED[title]
    card = find_card(title)
    seen, ruled = context_bytes(card), context_bytes(replace(card, title="one like it"))
    assert (seen.start_bytes, seen.measured, ruled.measured) == (reported, True, False)
    assert source in seen.source
    assert abs(ruled.start_bytes - reported) <= ruled.band_bytes - seen.band_bytes


@pytest.mark.parametrize(
    ("name", "mib"), [("t4", 80), ("v100-16gb", 320), ("a100-80gb", 432), ("h100", 528), ("rtx5090", 510)]
)
def test_two_kib_for_each_resident_thread(name: str, mib: int) -> None:
    outside = context_bytes(find_card(name))
    assert outside.start_bytes == mib * MIB
    assert outside.bytes == (mib + mib / 4) * MIB
    assert outside.band_bytes == (mib / 8 + min(64, mib / 2) + mib / 8) * MIB


def test_the_band_covers_modules_that_load_late() -> None:
    for card in all_cards():
        outside = context_bytes(card)
        assert outside.bytes - outside.band_bytes <= outside.start_bytes, card.name
        assert outside.band_bytes < outside.bytes < card.total_bytes
    assert context_bytes(find_card("h100-1g.10gb")).bytes < context_bytes(find_card("h100")).bytes
