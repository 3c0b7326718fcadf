"""Traces of one of several ranks, with labels, and what was held when."""

from __future__ import annotations

from pathlib import Path

from in_process_tracer import InProcessTracer

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.simulation_requests import LabelParts
from autoaccum.options import GradSync, Options, Parallel
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import LabelledTrace, Trace
from autoaccum.sources.source import FileSource

ONE_NUMBER = 8
"""The most bytes of a loss or a count, which the loop keeps."""
WORKLOADS = Path(__file__).parent / "workloads" / "sharded_net.py"


def label(
    workload: str,
    *,
    ranks: int,
    parts: tuple[int, ...],
    grad_sync: GradSync,
    parallel: Parallel | None = None,
    mesh: tuple[int, ...] | None = None,
) -> LabelledTrace:
    """Trace two updates of a workload of `WORKLOADS`, the second by `parts`."""
    options = Options(world_size=ranks, parallel=parallel, mesh=mesh)
    settings = TrialSettings(source=FileSource(f"{WORKLOADS}:{workload}"), rank_samples=sum(parts), options=options)
    tracer = InProcessTracer(settings, find_card("h100"))
    try:
        return tracer.call(LabelParts(parts=parts, grad_sync=grad_sync))
    finally:
        tracer.close()


def start_of(traced: LabelledTrace, phase: str) -> int:
    """Return the event at which a phase of the last update begins, which allocates something."""
    return next(at for at, name in traced.trace.phases if name == phase and at >= traced.trace.last_update)


def live(trace: Trace, event: int) -> dict[int, int]:
    """Return the blocks of tensors that are held before an event, and their bytes; not libraries' workspaces."""
    freed = {~other for other in trace.events[:event] if other < 0}
    held = {block: trace.sizes[block] for block in trace.events[:event] if block >= 0 and block not in freed}
    return {block: size for block, size in held.items() if isinstance(size, int)}
