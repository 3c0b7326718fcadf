"""Counters of a reading, with and without what happened around an evaluation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.recording import Reading, without_stretch


def read(retries: int | None, refusals: int | None = None) -> Reading:
    return Reading(peak_reserved_bytes=7, peak_allocated_bytes=5, retries=retries, refusals=refusals, available_bytes=3)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_what_is_counted_is_what_came_before_and_after(steps: list[int]) -> None:
    before, evaluation, behind, after = steps
    marks = [before, before + evaluation, before + evaluation + behind]
    end = read(sum(steps), 2 * sum(steps))
    assert without_stretch(end, [read(mark, 2 * mark) for mark in marks]) == read(before + after, 2 * (before + after))


@pytest.mark.parametrize("marks", [[], [read(1)]])
def test_an_evaluation_that_did_not_come_to_its_end_counts(marks: list[Reading]) -> None:
    assert without_stretch(read(4, 2), marks) == read(4, 2)


def test_what_no_allocator_counts_stays_unknown() -> None:
    assert without_stretch(read(None), [read(None)] * 3) == read(None)
