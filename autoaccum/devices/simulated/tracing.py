"""A rehearsal on the simulated card: the very Accumulator that trains, and what it asks of the allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from autoaccum.devices.rehearsal import Rehearsal
from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.impersonation import DEVICE
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
    recorder = mode.recorder

    def before_update() -> None:
        gc.collect()
        recorder.mark_update()

    rehearsal = Rehearsal(workload, max(parts), optimizer, DEVICE, before_update=before_update)
    mode.kept.clear()
    gc.collect()
    recorder.begin(lambda: rehearsal.phase)
    with _collecting_by_hand():
        try:
            result = rehearsal.run(parts)
        finally:
            mode.phase = rehearsal.phase
            trace = recorder.trace(parts)
    assert rehearsal.made is not None
    return trace, Rehearsed(*rehearsal.made, terms=tuple(result.terms))


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
