"""The curve of memory over the micro-batch."""

from __future__ import annotations

from itertools import pairwise

from synthetic_traces import make_trace

from autoaccum.devices.simulated.explainer import curve_points
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.units import GIB, MIB


def peak_bytes(size: int) -> int:
    trace = make_trace((size, size), lambda samples: 3 * MIB + samples * 6 * MIB)
    return Replayer(find_card("rtx3090"), AllocatorSettings(), (2, 13)).peak_bytes(trace)


def test_the_curve_goes_on_to_where_it_crosses_the_budget() -> None:
    points = curve_points(peak_bytes, size=20, most=256, limit_bytes=2 * GIB)
    assert points[0].size == 2
    assert 20 in [point.size for point in points]
    assert all(point.size < later.size for point, later in pairwise(points))
    assert all(point.peak_bytes == peak_bytes(point.size) for point in points)
    assert points[-2].peak_bytes < 1.2 * 2 * GIB
    assert 2 * GIB < points[-1].peak_bytes < 1.3 * 2 * GIB
