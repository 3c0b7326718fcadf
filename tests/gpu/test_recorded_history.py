"""Histories that PyTorch's own allocator recorded, without a card, are replayed to the last address.

`PYTHONPATH=.:tests/shared python tests/shared/real_allocator/record_history.py SITE_PACKAGES -o FILE`
writes them again, and compares many more; torch 2.11.0+cu130 and 2.15.0+cu132 give the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import short_histories
from short_histories import ShortHistory, replay

FILE = Path(short_histories.__file__).parent / "real_allocator" / "histories.json"
HISTORIES: list[ShortHistory] = json.loads(FILE.read_text())


@pytest.mark.parametrize("number", range(len(HISTORIES)))
def test_exact(number: int) -> None:
    row = replay(HISTORIES[number])
    assert row["requests"] > 200
    assert (row["exact"], row["difference"], row["difference_in_order"]) == (True, None, None)


def test_one_of_them_retried_and_was_refused() -> None:
    actions = {action for history in HISTORIES for action, _, _ in history["entries"]}
    assert actions >= {"oom", "segment_free", "segment_map", "segment_unmap"}


@pytest.mark.parametrize(
    ("action", "further", "larger", "what"),
    [("alloc", 512, 0, "address"), ("segment_alloc", 0, 2 << 20, "moved_bytes")],
)
def test_a_planted_difference_is_noticed(action: str, further: int, larger: int, what: str) -> None:
    entries = list(HISTORIES[0]["entries"])
    last = max(number for number, entry in enumerate(entries) if entry[0] == action)
    _, address, size = entries[last]
    entries[last] = (action, address + further, size + larger)
    assert replay({**HISTORIES[0], "entries": entries})["difference"]["what"] == what
