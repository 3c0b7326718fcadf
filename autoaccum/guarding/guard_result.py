"""The records of a guard: measurements, growth, verdicts, the report, and the events on the way.

What a guard has to say is in messages, codes and facts whose sentences are in `autoaccum.messages`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoaccum.devices.explanation import Holding
from autoaccum.errors import UsageError
from autoaccum.guarding.cases import CASE_FIELDS, Case, case_name
from autoaccum.messages import Message
from autoaccum.serialization import to_plain
from autoaccum.simulation.trace_records import Category
from autoaccum.units import MemorySize, parse_size

Outcome = Literal["passed", "regressed", "unmeasured", "locked"]
"""`regressed`: exit 1. `unmeasured`: not measured, exit 3 or the error's, which is 1 where the requested size does not
fit. `locked`: written by --update."""

DEFAULT_TOLERANCE = MemorySize(fraction=0.01)
"""The allowed growth, a fraction of what there was, or bytes."""


def parse_tolerance(text: Any) -> MemorySize:
    """Read `1%`, `0.5 %` or `50MiB`; `0%` allows nothing.

    Raises:
        UsageError: It is neither a share up to 100 % nor a size.

    >>> parse_tolerance("0.5 %").fraction, parse_tolerance("50MiB").bytes, str(parse_tolerance("1%"))
    (0.005, 52428800, '1%')
    """
    if text == "0%":
        return MemorySize(fraction=0.0)
    try:
        return parse_size(text)
    except (UsageError, TypeError):
        raise UsageError(
            f"the tolerance {text!r:.40} is neither a share up to 100% nor a size",
            hint="write such as 1%, 0.5% or 50MiB",
        ) from None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The memory of an update by one schedule, and what would fit.

    Attributes:
        card: The card's full name.
        update: The settings of the update, as words: `precision`, `optimizer`, `batchnorm`, `savers`, `parameters`.
        micro_batches: The schedule that was measured, in samples.
        fits: Whether it runs within `limit_bytes`.
        largest: The largest micro-batch that fits, in samples; 0 if none does.
        capped: Whether the search stopped at its upper limit, not where memory ended.
        limit_bytes: The budget.
        peak_bytes: As `Plan.peak_bytes`.
        min_budget_bytes: As `Plan.min_budget_bytes`.
        micro_tokens: The token budget that was measured; None for a workload that does not count them.
        token_peak_bytes: The most that tensors hold in an update by its extreme shapes (`extreme_shapes`).
        phase: The phase of the moment at which most is held, as in `Explanation`.
        holdings: The bytes held at that moment, by module.
        environment: What else affects memory: versions, and settings of the allocator that are not the default.
        warnings: Warnings of the measurement, which are not locked.
    """

    card: str
    update: Mapping[str, str] = field(default_factory=dict)
    micro_batches: tuple[int, ...]
    fits: bool
    largest: int
    capped: bool
    limit_bytes: int
    peak_bytes: int
    min_budget_bytes: int
    micro_tokens: int | None = None
    token_peak_bytes: int | None = None
    phase: str = ""
    holdings: tuple[Holding, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[Message, ...] = ()

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""
        return max(self.micro_batches)

    @property
    def held_bytes(self) -> int:
        """The most that tensors and workspaces hold at one time."""
        return sum(holding.bytes for holding in self.holdings)

    @property
    def sizes(self) -> Mapping[str, int]:
        """What is compared, in bytes; a single one may change only because blocks are packed in another way."""
        by_tokens = {} if self.token_peak_bytes is None else {"tokens": self.token_peak_bytes}
        return {"peak": self.peak_bytes, "held": self.held_bytes, "min_budget": self.min_budget_bytes, **by_tokens}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The growth of one category in one module, or in several that differ only in numbers.

    Attributes:
        category: The category.
        module: The module, with all modules in it; empty for several, or none, as `change` says.
        bytes: The growth; negative where it shrank.
        change: What changed, such as `bf16 -> fp32` or `new`; empty where only the size did.
        line: The line of the user's code that the module, or the one in it that grew most, comes from now, such as
            `model.py:12`; may be empty.
    """

    category: Category
    module: str
    bytes: int
    change: str = ""
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one case.

    Attributes:
        case: The case.
        outcome: The outcome.
        exit_code: The exit code of this case alone.
        reasons: Why it regressed or could not be measured, the most important first.
        hint: What to do next, without the command.
        command: The command for the hint, ready to be typed; may be empty.
        explanation: By how much memory changed, for what, and what fits now; empty where nothing changed.
        growths: What grew and shrank, the most first.
        before: The measurement it is compared with; may be None.
        now: What was measured; None where it could not be.
        traceback: The user's own frames, when their code raised.
    """

    case: Case
    outcome: Outcome
    exit_code: int = 0
    reasons: tuple[Message, ...] = ()
    hint: Message | None = None
    command: str = ""
    explanation: tuple[Message, ...] = ()
    growths: tuple[Growth, ...] = ()
    before: Measurement | None = None
    now: Measurement | None = None
    traceback: str | None = None

    @property
    def growth_bytes(self) -> int | None:
        """The growth of the peak; None where one of the two measurements is missing."""
        return None if self.before is None or self.now is None else self.now.peak_bytes - self.before.peak_bytes

    @property
    def warnings(self) -> tuple[Message, ...]:
        """Warnings of the measurement."""
        return () if self.now is None else self.now.warnings


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdicts on all cases of one call.

    Attributes:
        verdicts: In the order of the lock.
        against: What they were compared with: the lock's path, or a revision.
        tolerance: The allowed growth.
        updated: The lock that was written; None if none was.
    """

    verdicts: tuple[Verdict, ...]
    against: str
    tolerance: MemorySize
    updated: str | None = None

    @property
    def exit_code(self) -> int:
        """1 if a case has regressed, else 3 or 2 if one could not be measured, else 0."""
        codes = {verdict.exit_code for verdict in self.verdicts}
        return next((code for code in (1, 3, 2) if code in codes), 0 if codes else 3)

    def to_json(self) -> str:
        """Return the record as indented JSON: `schema`, `exit_code`, and the fields of this record and those in it.

        Each verdict also has `name`, `growth_bytes` and `warnings`, each measurement `micro_batch` and `held_bytes`,
        each message its `text`; later versions of this schema may add fields, and change none.
        """
        record = {"schema": 5, "exit_code": self.exit_code, **to_plain(self)}
        record["verdicts"] = [_verdict_record(verdict) for verdict in self.verdicts]
        return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    derived = {"growth_bytes": verdict.growth_bytes, "warnings": to_plain(verdict.warnings)}
    record = {"name": case_name(verdict.case), **to_plain(verdict), **derived}
    record["case"] = {**dict.fromkeys(CASE_FIELDS), "world_size": 1, "equal": False, **verdict.case.to_record()}
    for name, measured in (("before", verdict.before), ("now", verdict.now)):
        if measured is not None:
            record[name] |= {"micro_batch": measured.micro_batch, "held_bytes": measured.held_bytes}
    return record


@dataclass(frozen=True)
class CaseStarted:
    """The measurement of a case begins."""

    case: Case


@dataclass(frozen=True)
class CaseFinished:
    """The verdict on a case is known."""

    number: int
    count: int
    verdict: Verdict


Event = CaseStarted | CaseFinished
Listener = Callable[[Event], None]
