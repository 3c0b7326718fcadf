"""What a guard measures, says and tells meanwhile: pure records, which the lock keeps and reports draw."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoaccum.devices.explanation import Category, Holding, Moment
from autoaccum.errors import UsageError
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes, parse_size

Outcome = Literal["unchanged", "within", "regressed", "improved", "too_large", "unmeasured", "locked"]
"""`unchanged`: to the byte. `within`: other bytes, within the tolerance. `regressed`: exit 1. `improved`: less than the
tolerance allows for, which passes. `too_large`: what was asked for does not fit, and there is nothing to lock: exit 1.
`unmeasured`: nothing can be said, exit 3 or the error's. `locked`: by --update."""

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Tolerance:
    """A share of what there was, or bytes.

    Attributes:
        fraction: Such as 0.01 of 1 %; None: `bytes` tells.
        bytes: Whatever there was; None: `fraction` tells.
    """

    fraction: float | None = 0.01
    bytes: int | None = None

    def __str__(self) -> str:
        """As it is written in sentences."""
        return f"{100 * (self.fraction or 0):g} %" if self.bytes is None else format_bytes(self.bytes)

    def allows(self, before_bytes: int, now_bytes: int, spread_bytes: int = 0) -> bool:
        """Whether `now_bytes` is no more than what may have become of `before_bytes`.

        Args:
            before_bytes: What there was.
            now_bytes: What there is.
            spread_bytes: How far apart equal runs are, on top of the tolerance.
        """
        allowed = int(before_bytes * (self.fraction or 0)) if self.bytes is None else self.bytes
        return now_bytes - before_bytes <= allowed + spread_bytes


def parse_tolerance(text: Any) -> Tolerance:
    """Read `1%`, `0.5 %` or `50MiB`; `0%` allows nothing.

    Raises:
        UsageError: It is neither a share up to 100 % nor a size.

    >>> parse_tolerance("0.5 %").fraction, parse_tolerance("50MiB").bytes, str(parse_tolerance("1%"))
    (0.005, 52428800, '1 %')
    """
    share = _SHARE.fullmatch(text) if isinstance(text, str) else None
    if share is not None and float(share[1]) <= 100:
        return Tolerance(fraction=float(share[1]) / 100)
    try:
        if share is None and isinstance(text, str):
            return Tolerance(fraction=None, bytes=parse_size(text).bytes)
    except UsageError:
        pass
    shown = f"{text!r:.40}"
    raise UsageError(
        f"the tolerance {shown} is neither a share up to 100% nor a size", hint="write such as 1%, 0.5% or 50MiB"
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What an update takes by one schedule, and what would fit: everything that an outcome rests on.

    Attributes:
        kind: `predicted` by a simulation, or `measured` by runs in fresh processes.
        card: The card's full name, or the processor's.
        precision, optimizer, batchnorm: What the update is made with, as an inspection tells.
        parameters: How many the model has.
        micro_batches: The schedule that was measured, in samples.
        fits: Whether it runs within `limit_bytes`.
        largest: The largest micro-batch that fits, in samples; 0: none.
        capped: `largest` is where the search was told to stop, not where memory ended.
        limit_bytes: The budget.
        peak_bytes: As `Plan.peak_bytes`; the median of `runs` where there are several.
        held_bytes: The most that tensors and workspaces hold at one time; None when measured.
        least_bytes: As `Plan.least_bytes`; None when measured.
        runs: Peaks of runs in fresh processes, in bytes, ascending; empty when predicted.
        phase, op, module: The moment at which most is held, as in `Explanation`; empty when measured.
        categories: What is held then, and `unused`, the rest of the peak; empty when measured.
        holdings: The same by module, complete: they add up to `held_bytes`. Empty when measured.
        moments: The same for each phase of the update, in order. Empty when measured.
        versions: Of what decides about the figures: torch, autoaccum; on a card also cuda, cudnn, driver.
        settings: What else does, where it is not as it comes: variables of the allocator and their values.
        warnings: Sentences on the way, which are not locked.
    """

    kind: Literal["predicted", "measured"]
    card: str
    precision: str
    optimizer: str
    batchnorm: str
    parameters: int
    micro_batches: tuple[int, ...]
    fits: bool
    largest: int
    capped: bool
    limit_bytes: int
    peak_bytes: int
    held_bytes: int | None = None
    least_bytes: int | None = None
    runs: tuple[int, ...] = ()
    phase: str = ""
    op: str = ""
    module: str = ""
    categories: Mapping[Category, int] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    moments: tuple[Moment, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""
        return max(self.micro_batches)

    @property
    def spread_bytes(self) -> int:
        """How far apart the runs are; 0 when predicted."""
        return self.runs[-1] - self.runs[0] if self.runs else 0


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What grew or shrank: one purpose of one module or of several that are called alike.

    Attributes:
        category: What for.
        module: As in `ModuleShare.name`, with all modules in it; empty for what belongs to no module.
        bytes: By how much; below 0 where it shrank.
        change: What is different about it, such as `bfloat16 -> float32` or `new`; empty where only the size is.
    """

    category: Category
    module: str
    bytes: int
    change: str = ""

    @property
    def is_unused(self) -> bool:
        """Whether it is what the allocator holds and no tensor does."""
        return self.category == "unused"

    @property
    def what(self) -> str:
        """What it is of, such as `optimizer state of blocks.*.mlp`."""
        return f"{self.category.replace('_', ' ')}{f' of {self.module}' if self.module else ''}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One case, compared.

    Attributes:
        case: The case.
        outcome: What it came to.
        exit_code: What it alone would end with.
        reasons: Why it is not well, or what could not be measured, as sentences; the first is the heaviest.
        hint: The way out, or what is next, in words, without the command; empty where there is none.
        command: The one command that does what the hint says, as it is typed; empty where there is none.
        explanation: In one line what grew, by how much and what now fits; empty where nothing changed.
        growths: What grew and shrank, the most first.
        before: What it is compared with; None where there is none.
        now: What was measured; None where it could not be.
        warnings, notes: Sentences of the measurement, and of the comparison.
        traceback: The user's own frames, when their code raised.
    """

    case: Case
    outcome: Outcome
    exit_code: int = 0
    reasons: tuple[str, ...] = ()
    hint: str = ""
    command: str = ""
    explanation: str = ""
    growths: tuple[Growth, ...] = ()
    before: Measurement | None = None
    now: Measurement | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    traceback: str | None = None

    @property
    def growth_bytes(self) -> int | None:
        """By how much the peak grew; None where it was not measured twice."""
        return None if self.before is None or self.now is None else self.now.peak_bytes - self.before.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cases of one call.

    Attributes:
        verdicts: In the order of the lock.
        against: What they were compared with: the lock's path, or a revision.
        tolerance: By how much the peak may grow.
        updated: The lock that was written; None: none was.
    """

    verdicts: tuple[Verdict, ...]
    against: str
    tolerance: Tolerance
    updated: str | None = None

    @property
    def exit_code(self) -> int:
        """1 where anything has regressed, else 3 or 2 where anything could not be measured, else 0."""
        codes = {verdict.exit_code for verdict in self.verdicts}
        return next((code for code in (1, 3, 2) if code in codes), 0 if codes else 3)

    def to_json(self) -> str:
        """The record as indented JSON: `schema`, `exit_code`, the fields of this record and of those in it.

        Each verdict also has `name` and `growth_bytes`, each measurement `micro_batch` and `spread_bytes`; later
        versions of this schema may add fields, and change none.
        """
        record = {"schema": 2, "exit_code": self.exit_code, **to_plain(self)}
        record["verdicts"] = [_verdict_record(verdict) for verdict in self.verdicts]
        return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    record = {"name": case_name(verdict.case), **to_plain(verdict), "growth_bytes": verdict.growth_bytes}
    record["case"] = {**dict.fromkeys(CASE_FIELDS), "world_size": 1, "equal": False, **verdict.case.asked()}
    for name, measurement in (("before", verdict.before), ("now", verdict.now)):
        if measurement is not None:
            record[name] |= {"micro_batch": measurement.micro_batch, "spread_bytes": measurement.spread_bytes}
    return record


@dataclass(frozen=True)
class CheckedOut:
    """Another revision lies in a folder of its own now, to be measured there."""

    revision: str


@dataclass(frozen=True)
class CaseStarted:
    """A case is measured from now on."""

    case: Case


@dataclass(frozen=True)
class CaseFinished:
    """All is known of a case."""

    number: int
    count: int
    verdict: Verdict


Event = CheckedOut | CaseStarted | CaseFinished
Listener = Callable[[Event], None]
