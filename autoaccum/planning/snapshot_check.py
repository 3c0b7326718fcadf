"""Check a snapshot that a card recorded: against the simulated allocator, and against the prediction of a workload."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.errors import UsageError
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import make_setup
from autoaccum.simulation.allocator.recording import (
    ReplayDifference,
    read_recording,
    replay_recording,
    why_not_replayed,
)

if TYPE_CHECKING:
    from autoaccum.devices.simulated.recorded_update import UpdateComparison


@dataclass(frozen=True, kw_only=True)
class SnapshotCheck:
    """The result of a check.

    Attributes:
        snapshot: The file.
        events: The number of its events.
        not_replayed: The reason why its events were not replayed, if they were not.
        replay_difference: The first event that the simulated allocator answers otherwise; None: addresses are equal.
        card: The simulated card.
        update: The last update beside its prediction.
    """

    snapshot: str
    events: int
    not_replayed: str | None
    replay_difference: ReplayDifference | None
    card: str
    update: UpdateComparison

    @property
    def agrees(self) -> bool:
        """Return whether the allocator and the prediction agree with the snapshot, as far as is certain."""
        return not self.replay_differs and self.update.agrees

    @property
    def replay_differs(self) -> bool:
        """Return whether the replay certainly differs."""
        return self.replay_difference is not None and self.replay_difference.certain


def check_snapshot(
    snapshot: str | os.PathLike[str],
    workload: str,
    request: PlanRequest,
    micro_batch: int,
    *,
    on_output: Callable[[str], None] | None = None,
) -> SnapshotCheck:
    """Replay a snapshot, and lay its last update beside that of a workload on a simulated card.

    Args:
        snapshot: The file.
        workload: A reference.
        request: The samples per update, and the options of the run; `options.gpu` is the card.
        micro_batch: The most samples that ran at once.
        on_output: Receives each line the workload prints; stderr otherwise.

    Raises:
        UsageError: The file is no complete snapshot, or its end is no such update; or `micro_batch` is too large.
        WorkloadError, NotMeasuredError: The workload cannot be simulated.
    """
    if micro_batch > request.target_batch:
        raise UsageError(
            f"a micro-batch of {micro_batch} is more than the {request.target_batch} samples of an update",
            hint="give those of the recorded run (--micro-batch, --target-batch)",
        )
    recording = read_recording(snapshot)
    not_replayed = why_not_replayed(recording)
    difference = None if not_replayed is not None else replay_recording(recording)
    setup = make_setup(workload, request, on_output=on_output, verb="explain")
    device = setup.device
    assert isinstance(device, SimulatedDevice)
    with device:
        request = request.with_multiple_of(device.inspect().multiple_of)
        update = device.compare(recording, request.schedule(micro_batch).micro_batches)
    return SnapshotCheck(
        snapshot=str(snapshot),
        events=len(recording.entries),
        not_replayed=not_replayed,
        replay_difference=difference,
        card=device.name,
        update=update,
    )
