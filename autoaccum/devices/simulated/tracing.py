"""A rehearsal on the simulated card: the very Accumulator that trains, and what it asks of the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.beside import find_beside
from autoaccum.accumulation.results import StepResult
from autoaccum.devices.rehearsal import Rehearsal
from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.impersonation import DEVICE
from autoaccum.devices.simulated.labelling import Labeller
from autoaccum.devices.simulated.labels import LabelledTrace
from autoaccum.devices.simulated.recorder import Witness
from autoaccum.devices.simulated.trace import Trace
from autoaccum.workload.spec import Workload


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal's model and optimizer, on the simulated card, and the names of the loss's terms."""

    model: nn.Module
    optimizer: Optimizer
    terms: tuple[str, ...]


def trace_rehearsal(
    workload: Workload, parts: Sequence[int], optimizer: str | None, mode: CardMode
) -> tuple[Trace, Rehearsed]:
    """Rehearse `parts` on the card of `mode`, which is entered.

    The batch holds the largest part only, on the host; the allocator never sees more. Garbage is collected between
    updates alone, so that every trace of the same step is the same.

    Args:
        workload: With the precision the plan asks for.
        parts: As in `Trial`.
        optimizer: Overrides the workload's by a name of `torch.optim`.
        mode: The simulation.

    Returns:
        The trace, and what was rehearsed.

    Raises:
        WorkloadError: No update was made.
    """
    rehearsal = _rehearsal(workload, parts, optimizer, mode.recorder.mark_update)
    trace, result = _trace(rehearsal, parts, mode)
    assert rehearsal.made is not None
    return trace, Rehearsed(*rehearsal.made, terms=tuple(result.terms))


def label_rehearsal(workload: Workload, parts: Sequence[int], optimizer: str | None, mode: CardMode) -> LabelledTrace:
    """The same trace, with what its blocks are for; it takes longer to make.

    Args:
        workload: As in `trace_rehearsal`.
        parts: Likewise.
        optimizer: Likewise.
        mode: Likewise.

    Raises:
        WorkloadError: As there.
    """

    def begin_update() -> None:
        mode.recorder.mark_update()
        labeller.mark_update()

    rehearsal = _rehearsal(workload, parts, optimizer, begin_update)
    loss = workload.objective.criterion
    beside = [loss.function] if loss is not None and isinstance(loss.function, nn.Module) else []
    beside += find_beside(workload).values()
    labeller = Labeller(mode.recorder, rehearsal, mode.kept, beside)
    with labeller.labelling():
        trace, _ = _trace(rehearsal, parts, mode, labeller.see)
    return labeller.label(trace)


def _rehearsal(
    workload: Workload, parts: Sequence[int], optimizer: str | None, begin_update: Callable[[], None]
) -> Rehearsal:
    def before_update() -> None:
        gc.collect()
        begin_update()

    return Rehearsal(workload, max(parts), optimizer, DEVICE, before_update=before_update)


def _trace(
    rehearsal: Rehearsal, parts: Sequence[int], mode: CardMode, witness: Witness | None = None
) -> tuple[Trace, StepResult]:
    mode.kept.clear()
    gc.collect()
    mode.numbering.restart()
    mode.recorder.begin(lambda: rehearsal.phase, witness)
    with collecting_by_hand():
        try:
            result = rehearsal.run(parts)
        finally:
            mode.phase = rehearsal.phase
            trace = mode.recorder.trace(parts)
    return trace, result


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Garbage is collected where somebody asks for it alone, so that blocks are freed at the same place each time.

    That the workload enables it, as after a stretch it times, changes nothing: at a threshold of 0 none is collected.
    """
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()
