"""What a device answers: one trial of a workload at one size, as a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

from autoaccum.accumulation.coupling import Coupling
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.options import Options

Outcome = Literal["ok", "tight", "oom", "error"]
"""`ok`: it ran. `tight`: it ran, but only because the allocator released and retried. `oom`: memory ran out.
`error`: anything else went wrong; a smaller batch is no answer to it."""

Phase = Literal["start", "load", "model", "optimizer", "batch", "forward", "backward", "clip", "update", "evaluation"]
"""Where a trial is; `accumulation.phases` tells those of an update. `evaluation`: between updates, see `Workload`."""


TRIAL_LIMIT_SECONDS = 600.0
"""Where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: an update, then an update accumulated over `parts`, by the Accumulator that trains.

    Attributes:
        parts: Micro-batch sizes, in samples, of the second update; the first update ran `parts[:1]`.
        outcome: See `Outcome`.
        phase: Where it ended when it did not run through; None when it did.
        peak_allocated_bytes: Peak of the bytes tensors held; None where the device cannot tell.
        peak_reserved_bytes: Peak of what the process held of the device for this; None when nothing was measured.
        allocator_retries: How often the allocator released its cache and tried again; None where it has none.
        seconds: Wall time of the trial, without the start of its process.
        message: One line on what went wrong, or on why it is `tight`.
        traceback: The user's own frames, when their code raised.
        certain: False when an `oom` was recognised by a text that some bugs share: a smaller size has to run then.
        fresh: Whether its process had run no trial before, or its trace was of just its parts.
        blames: Whose fault an `error` is: "user" (exit 2) or "measurement" (exit 3).
        limit_bytes: The budget it was held to, where that is another than the plan's.
        timed_out: Whether it is an `error` only because it took too long, and was ended.
        crashed: Whether a fault in native code (SIGSEGV, SIGBUS, SIGABRT) ended its process.
    """

    parts: tuple[int, ...]
    outcome: Outcome
    phase: Phase | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocator_retries: int | None = None
    seconds: float = 0.0
    message: str | None = None
    traceback: str | None = None
    certain: bool = True
    fresh: bool = False
    blames: Literal["user", "measurement"] | None = None
    limit_bytes: int | None = None
    timed_out: bool = False
    crashed: bool = False

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""
        return max(self.parts)

    @property
    def ran(self) -> bool:
        """Whether it ran through."""
        return self.outcome in ("ok", "tight")


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """What all trials of one plan have in common.

    Attributes:
        share: Samples per update on this rank: the effective batch a trial holds in memory.
        options: How the workload is to run, and within which limits.
        reference: The workload: `model.py`, `model.py:name` or `package.module:name`.
        load_limit_seconds: What importing the workload may take at first; None: as a trial, five minutes at least.
        on_output: Gets each line the workload prints; None: it goes to stderr.
        checkout: Where its modules lie; None: where this process finds them.
        pickled: Live objects (`devices.child.pickling.pack`), in place of what `reference` would load.
    """

    share: int
    options: Options = field(default_factory=Options)
    reference: str = ""
    load_limit_seconds: float | None = None
    on_output: Callable[[str], None] | None = None
    checkout: Checkout | None = None
    pickled: str | None = field(default=None, repr=False)

    @property
    def trial_limit_seconds(self) -> float:
        """After which a trial is ended and recorded as an error."""
        return self.options.trial_limit or TRIAL_LIMIT_SECONDS

    def to_request(self) -> dict[str, Any]:
        """Return the fields of a request to load the workload (`devices.trial_requests.LoadWorkload`)."""
        return {
            "reference": self.reference,
            "share": self.share,
            "options": self.options.to_record(),
            "pickled": self.pickled,
        }


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a workload before any trial.

    Attributes:
        loss: The name the workload gives its loss: "loss", or "criterion" for one of outputs and targets, or "model"
            where there is none and the model computes it.
        least_size: The smallest micro-batch that can be trained at all, in samples: 2 where a BatchNorm would have one
            value per channel to normalise.
        update_bytes: Peak of one update of `update_samples` samples that no budget limited; None when not measured.
        sample_bytes: What the activations of one sample take until its backward; None when that is not known.
        recipe: What a training step written by hand must know of loss and batch: see `workload.step_recipe`.
        keeps: What the loop keeps beside the step (`options.Keep`).
        evaluation_batch: Samples of each pass of its evaluation; None: none is planned.
        worst_of: Of how many samples the longest make the batches; None: `batch` makes them.
        batchnorm: The mode of its BatchNorms (`options.BatchNormMode`).
        accumulate_in: What its gradients are summed in (`options.AccumulateIn`).
        multiple_of: Every micro-batch is a multiple of so many samples: as the workload says, or as was found out.
        found_multiple: The sentence on that where it was found out.
        modules: Bytes of the modules beside the model (`accumulation.reach`), by name.
        coupling: What an experiment told of samples that depend on the others of their batch; None: none was made.
        warnings: Sentences for the plan on gradients that are not the full batch's.
        accumulation_warnings: Likewise, which hold only where more than one micro-batch makes an update.
        cautions: Sentences for the plan on what is weak about the way its trials are made.
        notes: Sentences for the plan on what was taken for granted.
    """

    name: str
    digest: str
    model: str
    parameters: int
    parameter_bytes: int
    precision: str
    optimizer: str
    reduction: str
    weight: str
    environment: Mapping[str, Any]
    loss: Literal["loss", "criterion", "model"] = "loss"
    least_size: int = 1
    update_bytes: int | None = None
    update_samples: int = 0
    sample_bytes: int | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    evaluation_batch: int | None = None
    worst_of: int | None = None
    batchnorm: str = "micro"
    accumulate_in: str = "fp32"
    multiple_of: int = 1
    found_multiple: str | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    coupling: Coupling | None = None
    warnings: tuple[str, ...] = ()
    accumulation_warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Device(Protocol):
    """Where trials run. Use as a context manager: leaving it ends its processes."""

    @property
    def name(self) -> str:
        """Short name, such as `cpu` or `cuda:0`."""

    @property
    def limit_bytes(self) -> int:
        """The budget every trial is held to."""

    def describe(self) -> Mapping[str, Any]:
        """What the plan records about the device: name, kind, total and free bytes, how limits are enforced."""

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load and check the workload, without a limit on memory.

        Raises:
            WorkloadError: The workload is not usable.
            UsageError: The budget is not.
            DoesNotFitError: A small update already runs the machine itself out of memory.
            NotMeasuredError: Its process died or hung.
        """

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """Run one trial.

        Args:
            parts: As in `Trial`.
            fresh: Ask for a process that has run no trial before.
            limit_bytes: Hold it to this budget, below the device's own.
            limit_seconds: End it after this time, below the settings' own limit; in place, it runs to its end.
        """

    def close(self) -> None:
        """End every process of this device's own."""

    def __enter__(self) -> Device:
        """Itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
