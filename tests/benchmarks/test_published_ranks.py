"""One trace of a rank that is not here has torchtitan's published peak; `published_ranks.py` plans more of them."""

from __future__ import annotations

import pytest
from in_process_tracer import InProcessTracer
from published_ranks import CARD, PUBLISHED, WORKLOAD

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.options import Options
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource


@pytest.mark.slow
def test_a_published_peak_is_predicted_within_3_percent() -> None:
    """That of 8 ranks; what more hold less of follows from arithmetic, as test_rank_truth.py shows."""
    run, card = PUBLISHED[0], find_card(CARD)
    options = Options(world_size=run.ranks, parallel="fsdp2")
    settings = TrialSettings(source=FileSource(str(WORKLOAD)), rank_samples=run.samples, options=options)
    traces = TraceCache(lambda: InProcessTracer(settings, card), run.samples)
    with SimulatedDevice(card, traces, torch_version=read_torch_release()) as device:
        peak = device.trial((run.samples,)).peak_reserved_bytes
    assert peak is not None
    assert peak / 2**30 == pytest.approx(float(run.published_gib), rel=0.03)
