"""Copied children are like started ones: they measure the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_classifier import layers_file

from autoaccum.devices.base import Trial, TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.options import Options
from autoaccum.sources.source import FileSource
from autoaccum.units import MIB, MemorySize


@pytest.mark.slow
def test_a_copy_measures_what_a_started_child_does(
    write_workload: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    options = Options(memory=MemorySize(bytes=96 * MIB))
    settings = TrialSettings(
        source=FileSource(write_workload(layers_file(256, 2048, 8))), rank_samples=16384, options=options
    )

    def trials() -> list[Trial]:
        with CpuDevice(settings) as device:
            return [device.trial((1024, 1024), fresh=True), device.trial((16384,))]

    (fits, refused), _ = trials(), request.getfixturevalue("warm_children")
    copied_fits, copied_refused = trials()
    assert (fits.outcome, refused.outcome) == (copied_fits.outcome, copied_refused.outcome) == ("ok", "oom")
    assert fits.peak_reserved_bytes == pytest.approx(copied_fits.peak_reserved_bytes, abs=MIB)
