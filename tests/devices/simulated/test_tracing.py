"""Garbage is collected by hand while a step is rehearsed, whatever the workload says of it."""

from __future__ import annotations

import gc
import weakref

import pytest

from autoaccum.devices.simulated.jobs import collecting_by_hand


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("enabled", [True, False])
def test_who_enables_it_collects_nothing(enabled: bool) -> None:
    thresholds = gc.get_threshold()
    if not enabled:
        gc.disable()
    try:
        with collecting_by_hand():
            gc.enable()
            first = weakref.ref(Cycle())
            cycles = [Cycle() for _ in range(3 * max(thresholds[0], 1000))]
            assert first() is not None
            gc.collect()
            assert first() is None
        assert (gc.isenabled(), gc.get_threshold(), len(cycles) > 0) == (enabled, thresholds, True)
    finally:
        gc.enable()
