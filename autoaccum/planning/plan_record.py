"""The plan: a frozen record of how a batch is split and of the trials that proved it, as versioned JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Trial
from autoaccum.devices.explanation import Explanation
from autoaccum.errors import PlanFileError, UsageError
from autoaccum.files import read_text, write_text
from autoaccum.messages import Message
from autoaccum.options import GradSync, Parallel
from autoaccum.planning.throughput import Throughput
from autoaccum.serialization import HtmlRecord, RecordError, freeze, read_record, to_plain
from autoaccum.spec import DeviceFacts, Padding, TrainingSpec, WorkloadFacts
from autoaccum.units import format_bytes

SCHEMA = 3
_AGAIN = "plan again with `autoaccum plan`"


@dataclass(frozen=True, kw_only=True)
class ValueTrial:
    """The trial of one value of `Solved`."""

    value: int
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The search for the largest value of a name with which a micro-batch fits.

    Attributes:
        name: The constant of a workload file, the parameter of a model by name, or the place in a command.
        value: The answer: it ran, and `next_fail` did not, or it is `high`.
        low, high, step: The values that could be tried.
        micro_batch: The micro-batch that had to fit, in samples.
        tried: The trials, in the order they ran.
        stopped: The limit that ended the search before it knew the largest value; None when none did.
    """

    name: str
    value: int
    low: int
    high: int
    step: int
    micro_batch: int
    tried: tuple[ValueTrial, ...]
    stopped: Literal["time", "trials"] | None = None

    @property
    def proof(self) -> Trial:
        """The trial that confirmed the answer; where ranks took a smaller one than this, that of the next larger."""
        ran = (tried for tried in reversed(self.tried) if tried.value >= self.value and tried.trial.ran)
        return min(ran, key=lambda tried: tried.value).trial

    @property
    def next_fail(self) -> ValueTrial | None:
        """The smallest larger value that did not fit; None if none was tried."""
        above = [tried for tried in self.tried if tried.value > self.value and tried.trial.outcome != "ok"]
        return min(above, key=lambda tried: tried.value, default=None)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The least, the median and the most of several numbers."""

    least: int
    median: int
    most: int


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """How micro-batches are made by what they cost in tokens, and what that is worth on the lengths of the data.

    Attributes:
        micro_tokens: The most padded tokens of a micro-batch: the length of its longest sample times the number of its
            samples; without padding, the sum of the lengths.
        padding: How micro-batches are laid out (`spec.Padding`), which decides between the two.
        target_tokens: The tokens that an update has at least, in place of `Plan.target_batch` samples, which then is
            the number to expect; None: updates are counted in samples.
        search: The trials of budgets: of each, an update by the extreme shapes that it allows.
        lengths: Tokens of a sample, of those that were read.
        samples: Samples of a micro-batch.
        costs: Padded tokens of a micro-batch.
        iter_sizes: Micro-batches of an update, on each rank.
        padding_saved: The share of the padded tokens that is saved against micro-batches of `Plan.micro_batch` samples
            in the order of the data, which fit into the same memory.
        speed_up: How much faster updates are than those, estimated by padded tokens and the number of micro-batches.
    """

    micro_tokens: int
    padding: Padding
    target_tokens: int | None = None
    search: Solved
    lengths: Spread
    samples: Spread
    costs: Spread
    iter_sizes: Spread
    padding_saved: float
    speed_up: float


@dataclass(frozen=True, kw_only=True)
class Plan(HtmlRecord):
    """The schedule of one update of `target_batch` samples, and the trials that proved it.

    Attributes:
        kind: `measured` by real trials, or `predicted`.
        target_batch: Samples per update, over all ranks.
        micro_batch: The largest part of any rank, in samples.
        iter_size: Micro-batches per update, the same on every rank.
        micro_batches: The parts of the rank with the longest share, in order; with one rank, of all there is.
        multiple_of: The number that every part is a multiple of.
        world_size: Number of ranks.
        ranks: The parts of every rank; None when there is one.
        parallel: How ranks train one model (`options.Parallel`), where they were simulated; else None.
        mesh: The ranks in one or two dimensions (`Options.mesh`), where a mesh was given; else None.
        grad_sync: When FSDP2 sums gradients (`options.GradSync`): `last` where the schedule fits so, with fewer
            collectives; None where it does not shard the model.
        grad_sync_peaks: The peak of each of these ways that was tried, in bytes, whether it fits or not.
        largest_fit: The largest micro-batch that ran, or that is predicted to run.
        capped: `largest_fit` is the cap of the search (the share, `max_micro_batch`, or the data of a command), not the
            limit of memory.
        stopped: The limit that ended the search before it knew the largest size; None when none did.
        limit_bytes: The budget of every trial.
        peak_bytes: Peak of the schedule's own trial; None where the device cannot measure it. A predicted peak is
            that without a memory limit, and may exceed the budget: the allocator manages with less.
        min_budget_bytes: The smallest budget at which this schedule would still run; None when measured.
        uncertainty_bytes: The uncertainty of whether a prediction fits: of the bytes needed and of the bytes free on
            the card, as far as those were never measured; None when measured.
        host_bytes: The host memory beside a card: for what backward needs, where parts run in lock step, and of savers;
            else None.
        device: Where its trials ran, or what was simulated.
        devices: The device of every rank, where each tried on its own, and the plan is that of the one where the least
            fits; None: `device` alone was tried.
        environment: Versions and settings the trials ran under.
        workload: What is trained.
        spec: How its updates were run, and how `fit` and an Accumulator run them by this plan.
        trials: All trials in the order they ran, or were predicted; the last one is the schedule's, from a clean state.
        warnings: Messages on what could make the plan fail or mislead.
        notes: Messages on what is good to know, such as the learning rate.
        coupling: Batch coupling: whether samples depend on others of their micro-batch; None: not examined.
        explanation: The memory at the peak by purpose and module, simulated; None unless requested.
        learning_rate: The tuned rate of the first parameter group, used by `fit` but not by an Accumulator, which
            takes the optimizer as it is. None: the workload's own.
        throughput: Samples per second by micro-batch, where the fastest was preferred; else None.
        arguments: By the name of a framework, the arguments that make it train by this plan (`autoaccum plan --for`);
            None where none was named.
        solved: How a value in `workload.overrides` (of a command: in its words) was found, if that was asked for.
        tokens: The token budget of its micro-batches, for a workload that says what its samples cost; else None.
            `micro_batch` and `iter_size` are then what always fits, of the longest samples.
        schema: Version of the record.

    Raises:
        UsageError: The numbers contradict each other, or no trial proves the micro-batch.
    """

    kind: Literal["measured", "predicted"]
    target_batch: int
    micro_batch: int
    iter_size: int
    micro_batches: tuple[int, ...]
    multiple_of: int = 1
    world_size: int
    ranks: tuple[tuple[int, ...], ...] | None = None
    parallel: Parallel | None = None
    mesh: tuple[int, ...] | None = None
    grad_sync: GradSync | None = None
    grad_sync_peaks: Mapping[GradSync, int] = field(default_factory=dict)
    largest_fit: int
    capped: bool
    stopped: Literal["time", "trials"] | None = None
    limit_bytes: int
    peak_bytes: int | None
    min_budget_bytes: int | None = None
    uncertainty_bytes: int | None = None
    host_bytes: int | None = None
    device: DeviceFacts
    devices: tuple[DeviceFacts, ...] | None = None
    environment: Mapping[str, Any]
    workload: WorkloadFacts
    spec: TrainingSpec = TrainingSpec()
    trials: tuple[Trial, ...]
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    coupling: Coupling | None = None
    explanation: Explanation | None = None
    learning_rate: float | None = None
    throughput: Throughput | None = None
    arguments: Mapping[str, Any] | None = None
    solved: Solved | None = None
    tokens: TokenBudget | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("device", "devices", "environment", "workload", "explanation", "grad_sync_peaks", "arguments"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        for text in self._contradictions():
            raise UsageError(f"a plan that contradicts itself: {text}")

    @classmethod
    def of_schedule(cls, schedule: Schedule, **fields: Any) -> Plan:
        """Make the plan of a schedule, which gives the fields on parts and ranks."""
        return cls(
            target_batch=schedule.target_batch,
            micro_batch=schedule.micro_batch,
            iter_size=schedule.iter_size,
            micro_batches=schedule.micro_batches,
            world_size=schedule.world_size,
            ranks=schedule.ranks if schedule.world_size > 1 else None,
            **fields,
        )

    def __repr__(self) -> str:
        """Return the answer in one line; `to_json` has all of it."""
        needed = self.peak_bytes if self.min_budget_bytes is None else self.min_budget_bytes
        memory = "" if needed is None else f", {format_bytes(needed)} of {format_bytes(self.limit_bytes)}"
        return (
            f"<Plan: target_batch {self.target_batch}, micro_batch {self.micro_batch}, iter_size {self.iter_size}, "
            f"{self.kind} on {self.device.name or 'this device'}{memory}>"
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        return Plan.from_json, (self.to_json(),)

    @property
    def schedule(self) -> Schedule:
        """The parts of every rank."""
        return Schedule(self.ranks or (self.micro_batches,))

    @property
    def update(self) -> dict[str, int | None]:
        """The samples of an update, or else its tokens, by the names of `fit`'s arguments."""
        tokens = None if self.tokens is None else self.tokens.target_tokens
        return {"target_batch": None if tokens else self.target_batch, "target_tokens": tokens}

    @property
    def headroom_bytes(self) -> int | None:
        """The budget less the peak, negative where the peak exceeds it; None where the peak was not measured."""
        return None if self.peak_bytes is None else self.limit_bytes - self.peak_bytes

    def to_json(self) -> str:
        """Return the record as indented JSON, with its fields in order."""
        return json.dumps(_record(self), indent=2, allow_nan=False) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of the record in hex: equal for equal decisions from equal trials.

        Left out are all times and the fields that decide nothing: warnings, notes, the coupling (its experiment
        has a time limit), the explanation and the arguments of a framework.
        """
        record = _record(self)
        for name in ("arguments", "coupling", "explanation", "notes", "throughput", "warnings"):
            del record[name]
        searches = [record["solved"], record["tokens"] and record["tokens"]["search"]]
        tried = [tried["trial"] for search in filter(None, searches) for tried in search["tried"]]
        for trial in (*record["trials"], *tried):
            del trial["seconds"]
        return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str, *, source: str = "the text") -> Plan:
        """Read what `to_json` wrote; fields that a later version added are ignored.

        Raises:
            PlanFileError: The text is damaged, not a plan, of a newer schema, or contradicts itself. `source` names
                it in the message.
        """
        try:
            plain = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PlanFileError(f"{source} is not valid JSON ({error})", hint=f"is it cut off? {_AGAIN}") from None
        if not isinstance(plain, dict) or not {"schema", "kind", "target_batch"} <= plain.keys():
            raise PlanFileError(
                f"{source} is not a plan: it has no schema, kind and target_batch", hint="give a file of `plan -o FILE`"
            )
        _check_schema(plain["schema"], source)
        try:
            return read_record(plain, cls)
        except RecordError as error:
            raise PlanFileError(f"{source} is damaged: {error}", hint=_AGAIN) from None
        except UsageError as error:
            raise PlanFileError(f"{source} is {error.message}", hint=_AGAIN) from None

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan to a file, whole or not at all; with `force` over a file that is there.

        Raises:
            UsageError: There is a file and `force` is not given, or it cannot be written.
        """
        write_text(Path(path), self.to_json(), force=force)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanFileError: The file cannot be read, is damaged, is not a plan, or comes from a newer autoaccum.
        """
        return cls.from_json(read_text(Path(path)), source=str(path))

    def _contradictions(self) -> list[str]:
        """Return a sentence for each number that its parts contradict, and each size that no trial proves."""
        if not all(trial.parts for trial in self.trials):
            return ["a trial has no parts"]
        try:
            schedule = self.schedule
        except UsageError as error:
            return [error.message]
        names = ("target_batch", "world_size", "iter_size", "micro_batch", "micro_batches")
        found = [
            f"{name} is {getattr(self, name)}, its parts give {getattr(schedule, name)}"
            for name in names
            if getattr(self, name) != getattr(schedule, name)
        ]
        sizes = {trial.micro_batch for trial in self.trials if trial.ran}
        found += [f"no trial ran at size {size}" for size in sorted({self.micro_batch, self.largest_fit} - sizes)]
        if self.largest_fit < self.micro_batch:
            found.append(f"micro_batch is {self.micro_batch}, the largest that ran is {self.largest_fit}")
        if self.tokens is not None and self.tokens.micro_tokens != self.tokens.search.value:
            found.append(f"micro_tokens is {self.tokens.micro_tokens}, the largest that ran {self.tokens.search.value}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            found.append(f"learning_rate is {self.learning_rate}")
        if (self.kind == "predicted") != (None not in (self.min_budget_bytes, self.uncertainty_bytes)):
            found.append(
                f"it is {self.kind}, with min_budget_bytes {self.min_budget_bytes}, and uncertainty_bytes "
                f"{self.uncertainty_bytes}"
            )
        return found


def _record(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, the schema first."""
    return {"schema": plan.schema, **to_plain(plan)}


def _check_schema(schema: object, source: str) -> None:
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise PlanFileError(f"{source} is damaged: its schema is {schema!r}", hint=_AGAIN)
    if schema != SCHEMA:
        age = "a newer" if schema > SCHEMA else "an older"
        raise PlanFileError(
            f"{source} was written by {age} autoaccum (schema {schema}, this one reads {SCHEMA})",
            hint=f"upgrade autoaccum, or {_AGAIN}" if schema > SCHEMA else _AGAIN,
        )
