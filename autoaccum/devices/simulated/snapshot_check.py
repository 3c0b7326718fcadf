"""Check a snapshot that a card recorded: against the simulated allocator, and against the prediction of a workload."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.errors import UsageError
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
    snapshot: str | os.PathLike[str], device: SimulatedDevice, target_batch: int, micro_batch: int
) -> SnapshotCheck:
    """Replay a snapshot, and lay its last update beside that of the device's workload.

    Args:
        snapshot: The file.
        device: The card, with the workload and the options of the run.
        target_batch: Samples per update.
        micro_batch: The most samples that ran at once.

    Raises:
        UsageError: The file is no complete snapshot, or its end is no such update; or `micro_batch` is too large.
        WorkloadError, NotMeasuredError: The workload cannot be simulated.
    """
    if micro_batch > target_batch:
        raise UsageError(
            f"a micro-batch of {micro_batch} is more than the {target_batch} samples of an update",
            hint="give those of the recorded run (--micro-batch, --target-batch)",
        )
    recording = read_recording(snapshot)
    not_replayed = why_not_replayed(recording)
    difference = None if not_replayed is not None else replay_recording(recording)
    schedule = make_schedule(target_batch, micro_batch, multiple_of=device.inspect().multiple_of)
    return SnapshotCheck(
        snapshot=str(snapshot),
        events=len(recording.entries),
        not_replayed=not_replayed,
        replay_difference=difference,
        card=device.name,
        update=device.compare(recording, schedule.micro_batches),
    )
