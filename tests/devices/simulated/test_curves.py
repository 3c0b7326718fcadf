"""The curve of memory over the micro-batch."""

from __future__ import annotations

from itertools import pairwise

from synthetic_traces import make_trace

from autoaccum.devices.simulated.explainer import curve_points
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from autoaccum.units import GIB, MIB


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


def test_the_curve_goes_on_to_where_it_crosses_the_budget() -> None:
    points = curve_points(follow, replayer(), size=20, most=256, limit_bytes=2 * GIB)
    assert points[-2].peak_bytes < 1.2 * 2 * GIB
    assert 2 * GIB < points[-1].peak_bytes < 1.3 * 2 * GIB
