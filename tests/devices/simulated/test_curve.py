"""Memory over the micro-batch: families of traces, and points of the curve."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_traces import linear, make_trace

from autoaccum.devices.simulated.allocator.replay import Replayer
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.explain.curves import curve_points
from autoaccum.devices.simulated.trace import Trace, Workspace
from autoaccum.devices.simulated.tracing.trace_scaling import NotAffineError, fit_affine_trace, grows_quadratically
from autoaccum.units import GIB, MIB

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
def test_what_follows_is_what_is_so(size: int, lines: list[tuple[int, int]]) -> None:
    blocks = [lambda size, base=base, slope=slope: base + slope * size for base, slope in lines]
    family = fit_affine_trace([trace(each, *blocks, scores) for each in (2, 5, 3)])
    assert family.at(size) == trace(size, *blocks, scores)
    assert family.sizes == (2, 3, 5)


@pytest.mark.parametrize("size", [2, 3, 9, 500])
def test_a_whole_step_follows(size: int) -> None:
    family = fit_affine_trace([make_trace((each, each), linear()) for each in (2, 5, 3)])
    assert family.at(size) == make_trace((size, size), linear())


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
def test_sizes_that_do_not_follow_are_named(blocks: tuple[Size, ...], message: str) -> None:
    with pytest.raises(NotAffineError, match=re.escape(message)):
        fit_affine_trace([trace(size, *blocks) for size in (2, 4, 8)])


def test_a_table_of_samples_by_samples_is_told_from_other_sizes() -> None:
    others = weight, row, lambda n: -(-n // 3) * 512, lambda n: n * n + n, lambda n: Workspace("rows", (n * n,))
    assert not grows_quadratically([trace(size, *others) for size in (2, 5, 3)])
    assert grows_quadratically([trace(size, *others, lambda n: 2 * n * n) for size in (2, 5, 3)])
    assert not grows_quadratically([trace(size, lambda n: n * n) for size in (2, 4)])


@pytest.mark.parametrize(("other", "index"), [((0, ~0, 1), 1), ((0, 1, ~1), 2)])
def test_other_events_are_named(other: tuple[int, ...], index: int) -> None:
    with pytest.raises(NotAffineError, match=f"event {index} of the step differs at 2 and 3 samples"):
        fit_affine_trace([trace(2, weight, row), trace(3, weight, row, events=other)])


def test_smaller_than_any_traced_is_not_told() -> None:
    family = fit_affine_trace([trace(size, row) for size in (2, 5, 3)])
    with pytest.raises(NotAffineError, match="1 samples are fewer than 2, the smallest size traced: trace this size"):
        family.at(1)


def test_nothing_takes_less_than_nothing() -> None:
    family = fit_affine_trace([trace(size, lambda n: 100 - 10 * n) for size in (2, 3)])
    with pytest.raises(NotAffineError, match="block 0 would take"):
        family.at(11)


def test_a_family_needs_two_sizes_of_equal_parts() -> None:
    with pytest.raises(ValueError, match="equal parts and two sizes"):
        fit_affine_trace([trace(2, weight), trace(2, weight)])
    with pytest.raises(ValueError, match="equal parts and two sizes"):
        fit_affine_trace([trace(2, weight), dataclasses.replace(trace(3, weight), parts=(3, 2))])


def replayer() -> Replayer:
    return Replayer(find_card("rtx3090"), AllocatorSettings(), (2, 13))


def follow(size: int) -> Trace | None:
    return make_trace((size, size), lambda n: 3 * MIB + n * 6 * MIB) if size >= 2 else None


def test_every_point_is_a_replay() -> None:
    known = replayer()
    points = curve_points(follow, known, size=20, most=256, limit_bytes=2 * GIB)
    assert [point.size for point in points][:1] == [2]
    assert 20 in [point.size for point in points]
    assert all(one.size < other.size for one, other in pairwise(points))
    for point in points:
        trace = follow(point.size)
        assert trace is not None
        assert point.peak_bytes == known.peak_bytes(trace)
        assert point.least_bytes == known.least_bytes(trace, point.peak_bytes) <= point.peak_bytes


def test_goes_on_to_where_the_budget_is_crossed() -> None:
    points = curve_points(follow, replayer(), size=20, most=256, limit_bytes=2 * GIB)
    assert points[-2].peak_bytes < 1.2 * 2 * GIB
    assert 2 * GIB < points[-1].peak_bytes < 1.3 * 2 * GIB


def test_memory_that_hardly_grows_is_not_followed_for_ever() -> None:
    flat = curve_points(
        lambda size: make_trace((size, size), lambda n: 90 * MIB + n),
        replayer(),
        size=8,
        most=10**6,
        limit_bytes=80 * GIB,
    )
    assert flat[-1].size < 10_000


def test_long_traces_have_no_least_budgets() -> None:
    def long(size: int) -> Trace:
        return make_trace((size, size), lambda n: n * MIB, layer_bytes=MIB)

    events = len(long(2).events)
    assert events < 10_000
    points = curve_points(long, replayer(), size=8, most=16, limit_bytes=GIB, events_for_least=12 * events - 1)
    assert {point.least_bytes for point in points} == {None}
