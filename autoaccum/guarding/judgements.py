"""What a guard says: pure records, which reports draw."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from autoaccum.devices.explanation import Category
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.records import Case, Measurement
from autoaccum.planning.shapes import thaw

SCHEMA: Final = 1

Outcome = Literal["unchanged", "within", "regressed", "improved", "too_large", "unmeasured", "locked"]
"""`unchanged`: to the byte. `within`: other bytes, within the tolerance. `regressed`: exit 1. `improved`: less than the
tolerance allows for, which passes. `too_large`: what was asked for does not fit, and there is nothing to lock: exit 1.
`unmeasured`: nothing can be said, exit 3 or the error's. `locked`: by --update."""


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


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One case, compared.

    Attributes:
        case: Which.
        outcome: What it came to.
        exit_code: What it alone would end with.
        reasons: Why it is not well, or what could not be measured, as sentences; the first is the heaviest.
        hint: The way out, or what is next, in words, without the command; empty where there is none.
        command: The one command that does what the hint says, as it is typed; empty where there is none.
        explanation: In one line what grew, by how much and what now fits, as in the issue; empty where nothing changed.
        growths: What grew and shrank, the most first.
        before: What it is compared with; None where there is none.
        now: What was measured; None where it could not be.
        warnings, notes: Sentences of the measurement.
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
        judgements: In the order of the lock.
        against: What they were compared with: the lock's path, or a revision.
        tolerance: By how much the peak may grow.
        updated: The lock that was written; None: none was.
    """

    judgements: tuple[Judgement, ...]
    against: str
    tolerance: Tolerance
    updated: str | None = None

    @property
    def exit_code(self) -> int:
        """1 where anything has regressed, else 3 or 2 where anything could not be measured, else 0."""
        codes = {judgement.exit_code for judgement in self.judgements}
        return next((code for code in (1, 3, 2) if code in codes), 0 if codes else 3)

    def to_json(self) -> str:
        """The record as indented JSON: `schema`, `exit_code`, the fields of this record and of those in it.

        Each judgement also has `name` and `growth_bytes`, each measurement `micro_batch` and `spread_bytes`; later
        versions of this schema may add fields, and change none.
        """
        record = {"schema": SCHEMA, "exit_code": self.exit_code, **thaw(self)}
        del record["judgements"]
        record["judgements"] = [_judgement_record(judgement) for judgement in self.judgements]
        return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _judgement_record(judgement: Judgement) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": case_name(judgement.case),
        **thaw(judgement),
        "growth_bytes": judgement.growth_bytes,
    }
    for name, measurement in (("before", judgement.before), ("now", judgement.now)):
        if measurement is not None:
            record[name] |= {"micro_batch": measurement.micro_batch, "spread_bytes": measurement.spread_bytes}
    return record
