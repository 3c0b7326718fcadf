"""Devices that trials run on, and the records that they return."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from autoaccum.accumulation.coupling import Coupling
from autoaccum.devices.child.failures import Failure, Outcome
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.messages import Message
from autoaccum.options import GradSync, Options, Parallel
from autoaccum.simulation.cards import CardRates
from autoaccum.simulation.trace_records import Phase, UpdateCost
from autoaccum.sources.source import Source
from autoaccum.spec import DeviceFacts, SampleLengths, TrainingSpec, WorkloadFacts

if TYPE_CHECKING:
    from typing_extensions import Self

    from autoaccum.devices.explanation import MemoryReport

Sizes: TypeAlias = tuple[int, ...]
"""A number for each part."""

TRIAL_LIMIT_SECONDS = 600.0
"""The default limit on the time of a trial."""
_MIN_LOAD_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: an update, then an update accumulated over `parts`, by the Accumulator that trains.

    Attributes:
        parts: Micro-batch sizes of the last update, in samples; the first update is by `parts[:1]`.
        lengths: The length of the samples of each part, in tokens; empty: the longest that training will see.
        outcome: See `Outcome`.
        phase: The phase in which it failed; None if it ran.
        peak_allocated_bytes: The peak of the bytes that tensors held; None if the device does not count them.
        peak_reserved_bytes: The peak of the device's memory that the process held for it; None if not measured.
        allocator_retries: How often the allocator released its cache and tried again in the last update; None if it
            has no cache.
        seconds: Wall time of the trial, without the start of its process.
        message: One line on what went wrong, or on why it is `tight`.
        traceback: The user's own frames, when their code raised.
        is_definite_oom: False if the message of an `oom` could also be that of a bug: then a smaller size has to run.
        fresh: Whether its process had run no trial before, or it failed with all the memory that a fresh process would
            have had; of a simulated one, whether just its parts were traced.
        fault: The cause of an `error`: "user" (exit code 2) or "measurement" (exit code 3).
        timed_out: Whether it was ended because it took too long.
        host_bytes: The host memory for what backward needs, where parts run in lock step, and of savers; None where
            there is none, or on the CPU, where the peak has it.
        most_samples: The largest micro-batch to try instead, of an `error` for lack of data.
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
    is_definite_oom: bool = True
    fresh: bool = False
    fault: Literal["user", "measurement"] | None = None
    timed_out: bool = False
    host_bytes: int | None = None
    lengths: tuple[int, ...] = ()
    most_samples: int | None = None

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""
        return max(self.parts)

    @property
    def ran(self) -> bool:
        """Return whether it ran to its end."""
        return self.outcome in ("ok", "tight")

    def failed(self, failure: Failure, phase: Phase | None = None) -> Trial:
        """Return the record of the same trial if it failed."""
        fields = {field.name for field in dataclasses.fields(self)}
        reasons = {name: value for name, value in vars(failure).items() if name in fields}
        return dataclasses.replace(self, phase=phase, **reasons)


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """The settings that all trials of a plan share.

    Attributes:
        rank_samples: Samples per update on this rank: the effective batch that a trial holds in memory.
        options: The options of the run.
        source: The workload.
        load_limit_seconds: Time limit for the first import of the workload; None: that of a trial, at least 300 s.
        on_output: Gets each line the workload prints; None: it goes to stderr.
        paths: Where its modules are; None: where this process finds them.
    """

    rank_samples: int
    source: Source
    options: Options = field(default_factory=Options)
    load_limit_seconds: float | None = None
    on_output: Callable[[str], None] | None = None
    paths: ImportPaths | None = None

    def job_seconds(self, limit_seconds: float | None = None) -> float:
        """Return the time after which a job is ended: the limit on trials, or `limit_seconds` if that is less."""
        return min(self.options.trial_limit or TRIAL_LIMIT_SECONDS, limit_seconds or math.inf)

    @property
    def load_seconds(self) -> float:
        """The time after which loading is ended: a short limit on trials must not end the workload's imports."""
        return self.load_limit_seconds or max(self.job_seconds(), _MIN_LOAD_SECONDS)

    def to_request(self) -> dict[str, Any]:
        """Return the fields of a request to load the workload (`devices.trial_requests.LoadWorkload`)."""
        return {
            "source": self.source.to_record(),
            "rank_samples": self.rank_samples,
            "options": self.options.to_record(),
        }


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The facts about a workload that are found before any trial.

    Attributes:
        workload: What it is.
        spec: How its updates are run, with the `multiple_of` that was found.
        environment: Versions and settings that trials run under.
        least_size: The smallest micro-batch that can be trained at all, in samples: 2 where a BatchNorm would have one
            value per channel to normalise.
        update_bytes: Peak of an update of `update_samples` samples without a budget; None if not measured.
        resident_bytes: Bytes of parameters, gradients and optimizer state; None if not known.
        sample_bytes: Bytes of the activations of one sample, kept for its backward; None if not known.
        parallel: How its ranks train one model, where there are several and the device knows; else None.
        coupling: The result of the experiment on batch coupling (samples that depend on others of their batch); None:
            not made.
        warnings: Warnings for the plan: gradients that are not the full batch's.
        accumulation_warnings: Warnings for the plan that hold only if an update has more than one micro-batch.
        cautions: Warnings for the plan: weaknesses of the way its trials run.
        notes: Notes for the plan: assumptions that were made.
        sample_lengths: The lengths of its samples, of a workload that counts tokens and has a dataset; else None.
    """

    workload: WorkloadFacts
    spec: TrainingSpec = field(default_factory=TrainingSpec)
    environment: Mapping[str, Any]
    least_size: int = 1
    update_bytes: int | None = None
    resident_bytes: int | None = None
    update_samples: int = 0
    sample_bytes: int | None = None
    parallel: Parallel | None = None
    coupling: Coupling | None = None
    warnings: tuple[Message, ...] = ()
    accumulation_warnings: tuple[Message, ...] = ()
    cautions: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    sample_lengths: SampleLengths | None = None

    @property
    def multiple_of(self) -> int:
        """The number of samples that every micro-batch is a multiple of."""
        return self.spec.multiple_of or 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's record of a schedule that was predicted, and did not run.

    Attributes:
        min_budget_bytes: The smallest budget at which it would still run.
        uncertainty_bytes: The uncertainty of the prediction.
        warnings: Warnings for the plan.
        notes: Notes for the plan.
    """

    min_budget_bytes: int
    uncertainty_bytes: int
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The peaks that are expected before any trial.

    Attributes:
        peak_bytes: A function of a size from 2 samples on, to the peak or None if it is not known; None: no peak is.
        notes: Notes for the plan.
        alone: Why every size is traced by itself, which takes long; empty where larger ones follow from small ones.
    """

    peak_bytes: Callable[[int], int | None] | None = None
    notes: tuple[Message, ...] = ()
    alone: tuple[Message, ...] = ()


ChooseParts = Callable[[Callable[[int], Trial]], tuple[int, ...]]
"""Makes a plan by a function that predicts the trial of two parts of a size; returns the parts that would confirm it.

Raises `AutoaccumError` if there is no plan."""


class Device(ABC):
    """A device that runs trials. Use it as a context manager: leaving it ends its processes.

    Attributes:
        explains: Whether it can report where the memory goes.
        grants_leftovers: Whether a process that has run trials has no less memory for the next than a fresh one.
        findings: Warnings for the plan that trials have brought up.
    """

    explains: bool = False
    grants_leftovers: bool = False
    findings: tuple[Message, ...] = ()

    @property
    def predictor(self) -> Predictor | None:
        """The device itself, if its trials are predictions, which can do more; None if they run."""
        return None

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name, such as `cpu` or `cuda:0`."""

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The budget that every trial is held to."""

    @abstractmethod
    def describe(self) -> DeviceFacts:
        """Return what a plan records of the device."""

    @abstractmethod
    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load and check the workload, without a limit on memory.

        Raises:
            WorkloadError: The workload is not usable.
            UsageError: The budget is not usable.
            DoesNotFitError: A small update already runs the machine out of memory.
            NotMeasuredError: The process died or hung.
        """

    @abstractmethod
    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        """Run one trial; of parts that need each other (`WorkloadFacts.whole_batch`), all of an update.

        Args:
            parts: As in `Trial`.
            lengths: As in `Trial`; a device of commands is given none.
            fresh: Ask for a process that has run no trial before.
            limit_seconds: End it after this time, below the settings' own limit.

        Raises:
            UsageError, WorkloadError, NotMeasuredError: The workload cannot be loaded, or no budget be chosen.
        """

    def timing(self) -> AbstractContextManager[Callable[[int], float]]:
        """Return a context with a process that makes updates: a function from micro-batch to seconds.

        Raises:
            WorkloadError: The workload fails.
            DoesNotFitError: An update runs out of memory.
            NotMeasuredError: The process cannot be started, died or hung.
        """
        raise NotImplementedError

    def forecast(self, *, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> Forecast:
        """Forecast peaks; without a forecast, the search only takes more trials.

        A device that predicts trials may check its forecast by a trace of the parts that `choose` chooses by it.
        """
        return Forecast()

    def explain(
        self,
        parts: tuple[int, ...],
        *,
        limit_seconds: float | None = None,
        changes: bool = True,
        curve: bool = False,
        repeatable: bool = False,
    ) -> MemoryReport:
        """Report the memory of `parts`, after their trial ran; also simulate `changes` and the `curve` of the peak.

        Only a device that `explains` is asked. `repeatable` refuses parts that take other memory when they run again.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: The step cannot be simulated.
        """
        raise NotImplementedError

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """Use these savers (`spec.read_savers`) in all that follows; None: the workload's own."""
        raise NotImplementedError

    def turn_to(self, settings: TrialSettings) -> None:
        """Run another source in all that follows, with the budget and by the inspection of the first.

        It is the same source with another value set by name, so that nothing has to be inspected for its trials.
        """
        raise NotImplementedError

    def simulation(self) -> Device:
        """Return a device that predicts trials on this card, within the same budget; the caller closes it.

        Raises:
            UsageError: A setting of PyTorch's allocator cannot be simulated.
        """
        return self

    @abstractmethod
    def close(self) -> None:
        """End every process that this device started."""

    def __enter__(self) -> Self:
        """Return itself; nothing is started before the first job."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class Predictor(Device):
    """A device whose trials are predictions: it can also predict, count and choose what a real one cannot."""

    @property
    def predictor(self) -> Predictor:
        """The device itself."""
        return self

    @property
    @abstractmethod
    def allocator_settings(self) -> dict[str, Any]:
        """The allocator's settings that differ from PyTorch's defaults."""

    @property
    @abstractmethod
    def rates(self) -> CardRates:
        """How fast the card computes and moves bytes."""

    @abstractmethod
    def count_cost(self, *, limit_seconds: float | None = None) -> UpdateCost:
        """Count the work of an update; raise WorkloadError or NotMeasuredError where it cannot be counted."""

    @abstractmethod
    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """Return the prediction for `parts` after a fresh trial of them, whether they fit or not."""

    @abstractmethod
    def use_grad_sync(self, grad_sync: GradSync | None) -> None:
        """Sum the gradients of a sharded model so in all that follows; None: as the Accumulator does by default."""
