"""An update over several ranks equals that of one process with the whole batch: real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
from on_ranks import on_ranks
from rank_updates import CASES, changed, check_updates, ddp

from autoaccum.accumulation.ranks.group import join_ranks

SIZES = (0, *range(1980, 2060), 100_000)


def messages() -> list[list[bytes]]:
    ranks = join_ranks()
    return [ranks.gather(bytes([ranks.rank + 1]) * size) for size in SIZES]


def test_messages_of_any_length_arrive() -> None:
    """As they do around the length that one collective takes."""
    for seen in on_ranks(2, messages):
        assert seen == [[b"\1" * size, b"\2" * size] for size in SIZES]


@pytest.mark.parametrize(
    ("shares", "clip", "wrap"),
    [([4, 3], None, changed), ([2, 5], 0.1, ddp), ([3, 0, 2, 2], 0.1, changed)],
    ids=["2 ranks", "2 ranks, ddp, clipped", "4 ranks, one without samples"],
)
def test_an_update_over_ranks_is_that_of_one_process(shares: list[int], clip: float | None, wrap: Any) -> None:
    check_updates(shares, [(case, wrap) for case in CASES], clip_norm=clip)
