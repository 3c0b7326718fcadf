"""What the processes of a command are told, and what they report; no torch here.

A run of a command has a folder of its own. `SETTINGS` in the environment names the settings in it; each process that
makes updates, or fails, writes a report there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.messages import Message
from autoaccum.serialization import decode_record, encode_record
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import LabelledTrace, Trace, UpdateCost

SETTINGS: Final = "AUTOACCUM_COMMAND"
"""The environment variable with the path of the settings; the hook does nothing without it."""

DEFAULT_UPDATES: Final = 3
"""The first update makes the optimizer's state; the next ones find it, and the cache of the first."""

ENOUGH_UPDATES: Final = 2
"""The second update finds the optimizer's state: a script that has data for no more is measured too."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What each process of a run does beside the training.

    Attributes:
        folder: The folder of the run.
        parts: The micro-batches of an update that the command was told, in samples.
        updates: The number of updates after which the run ends.
        device: `cpu` or `cuda:N`, whose memory is measured; None: nothing is measured.
        limit_bytes: The budget that the process is held to; None: none.
        card: The card to simulate; None: none.
        others: Cards that may share the traces.
        torch_version: The release of PyTorch whose rules the card follows; None: the installed one.
        world_size: The ranks that are simulated, of which the process is the first; real ranks know their number.
        values: As `Options.values`.
        purpose: What is asked of a simulated run: a trace, one with labels, or the cost of an update.
        compares: Whether the gradient of the first update is kept: dropout is off, the seeds are fixed, and autocast
            is off.
        freezes_batchnorm: Whether BatchNorm normalises by its running statistics, where gradients are compared.
        paths: The checkout that its modules are to come from, where one is measured.
    """

    folder: str
    parts: tuple[int, ...]
    updates: int = DEFAULT_UPDATES
    device: str | None = None
    limit_bytes: int | None = None
    card: Card | None = None
    others: tuple[Card, ...] = ()
    torch_version: tuple[int, int] | None = None
    world_size: int = 1
    values: Literal["cpu"] | None = None
    purpose: Literal["trace", "label", "cost"] = "trace"
    compares: bool = False
    freezes_batchnorm: bool = False
    paths: ImportPaths | None = None

    @property
    def micro_batch(self) -> int:
        """The samples of a micro-batch that the command was told."""
        return max(self.parts)

    @property
    def reports(self) -> Path:
        """The folder of the reports, each `<pid>.json`, with the updates until then in `<pid>.updates`."""
        return Path(self.folder, "reports")

    @property
    def temporary(self) -> Path:
        """The folder for temporary files, which scripts that are ended do not remove."""
        return Path(self.folder, "tmp")

    @property
    def files(self) -> Path:
        """The folder of what the script writes in place of the user's files (`script_files`)."""
        return Path(self.folder, "files")

    @property
    def gradients(self) -> Path:
        """The file with the gradients of the first update, by `torch.save`."""
        return Path(self.folder, "gradients.pt")


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What a process on a simulated card recorded.

    Attributes:
        trace: The allocations up to the end of the last update, which begins at `trace.last_update`.
        labelled: The same with labels, if they were asked for.
        cost: The cost of the last update, if that was asked for.
        alike: The names of the other cards that have answered alike.
        notices: Differences between the simulation and a real run.
        notes: Values that were assumed, by line.
    """

    trace: Trace | None = None
    labelled: LabelledTrace | None = None
    cost: UpdateCost | None = None
    alike: tuple[str, ...] = ()
    notices: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """What one process of a run did, up to its last update or its failure.

    Attributes:
        pid: Its process id.
        rank: Its rank.
        world_size: The number of ranks, by the launcher or as the script joined them; 1 without any.
        updates: The number of updates it made.
        backwards: The backward passes of each update.
        first_batch: The shapes of the tensors that the first call of an outermost module had.
        batches: For each such call after the first update, or in the only one, the shapes of its tensors in order.
        peak_reserved_bytes, peak_allocated_bytes, allocator_retries: As of `Trial`.
        caught_oom: Whether it ran out of memory, caught that, and went on.
        message: Why its outcome is `tight`, or not `ok`, though it ran to its end.
        outcome: As of `Trial`.
        failure: What ended it before its last update.
        available: The facts of the meter that a budget is chosen by.
        model: The class of the largest module that was called; `parameters`, `parameter_bytes`, `dtypes` are of it.
        optimizer: The class of the optimizer.
        precision: `bf16` or `fp16` under autocast, else `fp32`.
        batchnorms: The names of the BatchNorm layers that were in training mode.
        environment: As of `Inspection`.
        simulated: What it recorded on a simulated card.
        seconds: The time from the import of PyTorch to the end of the last update.
    """

    pid: int
    rank: int = 0
    world_size: int = 1
    updates: int = 0
    backwards: tuple[int, ...] = ()
    first_batch: tuple[tuple[int, ...], ...] = ()
    batches: tuple[tuple[tuple[int, ...], ...], ...] = ()
    outcome: Literal["ok", "tight", "oom"] = "ok"
    message: str | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    allocator_retries: int | None = None
    caught_oom: bool = False
    failure: Failure | None = None
    available: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    parameters: int | None = None
    parameter_bytes: int | None = None
    dtypes: tuple[str, ...] = ()
    optimizer: str = ""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batchnorms: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    simulated: SimulatedRun | None = None
    seconds: float = 0.0


def write_record(path: Path, record: WatchSettings | ProcessReport) -> None:
    """Write a record to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode_record(record))
    partial.replace(path)


def read_settings(path: str) -> WatchSettings:
    """Return the settings that `write_record` wrote."""
    return decode_record(Path(path).read_bytes(), WatchSettings)


def read_report(path: Path) -> ProcessReport:
    """Return the report that `write_record` wrote."""
    return decode_record(path.read_bytes(), ProcessReport)
