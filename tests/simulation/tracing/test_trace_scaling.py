"""Traces as affine functions of the micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_traces import linear, make_trace

from autoaccum.simulation.trace_records import Trace, Workspace
from autoaccum.simulation.tracing.trace_scaling import (
    NotAffineError,
    fit_affine_trace,
    grows_quadratically,
    tell_parts_apart,
)

Size = Callable[[int], int | Workspace]


def trace(size: int, *blocks: Size, parts: int = 2, events: tuple[int, ...] | None = None) -> Trace:
    return Trace(
        parts=(size,) * parts,
        events=tuple(range(len(blocks))) if events is None else events,
        sizes=tuple(block(size) for block in blocks),
        phases=((0, "model"),),
        last_update=0,
    )


def weight(size: int) -> int:
    return 4096


def row(size: int) -> int:
    return 100 + 64 * size


def scores(size: int) -> Workspace:
    return Workspace("scores", (7, size * 12, 3 * size - 1))


@given(st.integers(2, 10**6), st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), max_size=5))
def test_an_affine_trace_gives_the_trace_of_any_size(size: int, functions: list[tuple[int, int]]) -> None:
    blocks = [lambda size, base=base, slope=slope: base + slope * size for base, slope in functions]
    affine = fit_affine_trace([trace(each, *blocks, scores) for each in (2, 5, 3)])
    assert affine.at(size) == trace(size, *blocks, scores)
    assert affine.sizes == (2, 3, 5)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((weight, lambda n: 16 * n * n), "block 1 takes 64, 256, 1024 at 2, 4, 8 samples"),
        ((lambda n: -(-n // 3) * 512,), "block 0 takes 512, 1024, 1536 at 2, 4, 8 samples"),
        ((lambda n: 3 * n // 2,), "block 0 takes 3, 6, 12 at 2, 4, 8 samples"),
        ((lambda n: Workspace("rows", (5, n * n)),), "block 0 takes 4, 16, 64 at 2, 4, 8 samples"),
        ((lambda n: Workspace("one" if n < 8 else "other", (n,)),), "block 0 is of different kinds at 2 and 8 samples"),
        ((lambda n: n if n < 8 else Workspace("one", (n,)),), "block 0 is of different kinds at 2 and 8 samples"),
    ],
)
def test_blocks_that_are_not_affine_are_named(blocks: tuple[Size, ...], message: str) -> None:
    with pytest.raises(NotAffineError, match=re.escape(message)):
        fit_affine_trace([trace(size, *blocks) for size in (2, 4, 8)])


def test_a_matrix_of_samples_by_samples_is_told_from_other_sizes() -> None:
    others = weight, row, lambda n: -(-n // 3) * 512, lambda n: n * n + n, lambda n: Workspace("rows", (n * n,))
    assert not grows_quadratically([trace(size, *others) for size in (2, 5, 3)])
    assert grows_quadratically([trace(size, *others, lambda n: 2 * n * n) for size in (2, 5, 3)])
    assert not grows_quadratically([trace(size, lambda n: n * n) for size in (2, 4)])


@pytest.mark.parametrize(("other", "index"), [((0, ~0, 1), 1), ((0, 1, ~1), 2)])
def test_the_first_different_event_is_named(other: tuple[int, ...], index: int) -> None:
    with pytest.raises(NotAffineError, match=f"event {index} of the step differs at 2 and 3 samples"):
        fit_affine_trace([trace(2, weight, row), trace(3, weight, row, events=other)])


def test_frees_in_a_row_may_come_in_another_order() -> None:
    one = trace(2, weight, row, row, events=(0, 1, 2, ~0, ~1, ~2))
    other = trace(3, weight, row, row, events=(0, 1, 2, ~2, ~0, ~1))
    assert fit_affine_trace([one, other]).at(2) == one
    with pytest.raises(NotAffineError, match="event 3 of the step differs"):  # An update starts between them.
        fit_affine_trace([replace(made, last_update=4) for made in (one, other)])


def test_sizes_below_the_smallest_traced_are_refused() -> None:
    affine = fit_affine_trace([trace(size, row) for size in (2, 5, 3)])
    with pytest.raises(NotAffineError, match="1 samples are fewer than 2, the smallest size traced: trace this size"):
        affine.at(1)


@pytest.mark.parametrize("parts", [(6, 5), (90, 17), (3, 2), (7, 7)])
def test_a_trace_of_two_parts_tells_them_apart(parts: tuple[int, int]) -> None:
    affine = fit_affine_trace([make_trace((each, each), linear()) for each in (2, 5)])
    with pytest.raises(NotAffineError, match="were not told apart"):
        affine.at(*parts)
    told = tell_parts_apart(affine, make_trace((5, 3), linear()))
    assert told.at(*parts) == make_trace(parts, linear())
    assert told.at(9) == make_trace((9, 9), linear())


@pytest.mark.parametrize(
    "mixed", [make_trace((5, 3), lambda size: 8 * size * size), make_trace((5, 3), lambda size: 512 * -(-size // 2))]
)
def test_parts_that_are_not_affine_at_a_third_size_are_not_told_apart(mixed: Trace) -> None:
    with pytest.raises(NotAffineError):
        tell_parts_apart(fit_affine_trace([make_trace((each, each), linear()) for each in (2, 5)]), mixed)
