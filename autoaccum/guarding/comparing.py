"""The verdict on one case: whether memory grew more than it may, and whether what fitted still does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoaccum.guarding.attribution import growths
from autoaccum.guarding.phrases import explain
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.guarding.selection import guard_words
from autoaccum.guarding.tolerance import Tolerance
from autoaccum.guarding.verdicts import Judgement, Outcome
from autoaccum.units import MIB, format_bytes, percent, precise_bytes

_REGRESSED = 1
_UNMEASURED = 3
_SEGMENT_BYTES = 20 * MIB
"""What PyTorch's allocator asks the driver for at a time; only what tensors hold tells of growths below that."""


def compare(
    case: Case, before: Measurement, measured: Measured, tolerance: Tolerance, *, command: str | None = None
) -> Judgement:
    """Judge what a case takes now by what it took, both of the same schedule.

    Args:
        case: What was measured.
        before: What it is compared with.
        measured: What was measured now.
        tolerance: By how much memory may grow. Of runs on a real device, how far apart they are comes on top.
        command: Locks in what was measured; empty where there is no lock, None: the one that guards the case, from the
            folder of the lock.
    """
    now = measured.measurement
    reasons = tuple(_unlike(before, now))
    outcome: Outcome = "unmeasured"
    if not reasons:
        reasons = tuple(_faults(before, now, tolerance))
        outcome = "regressed" if reasons else _harmless(before, now, tolerance)
    if command is None:
        command = guard_words(case, Path(), "--update")
    found = () if outcome == "unmeasured" else growths(before, now)
    return Judgement(
        case=case,
        outcome=outcome,
        exit_code={"regressed": _REGRESSED, "unmeasured": _UNMEASURED}.get(outcome, 0),
        reasons=reasons,
        hint=_hint(outcome, command),
        explanation="" if outcome == "unmeasured" else explain(case, before, now, found),
        growths=found,
        before=before,
        now=now,
        warnings=measured.warnings,
        notes=(*measured.notes, *_notes(before, now)),
    )


def _unlike(before: Measurement, now: Measurement) -> Iterator[str]:
    """Why two measurements say nothing about each other, beside versions and settings (`judging.incomparable`)."""
    if before.kind != now.kind:
        yield f"what it is compared with was {before.kind}, this was {now.kind}"
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, each.micro_batches)) for each in (before, now))
        yield f"what it is compared with is of micro-batches of {was}, this is of {is_now}"


def _faults(before: Measurement, now: Measurement, tolerance: Tolerance) -> Iterator[str]:
    """What is worse than it may be, the heaviest first."""
    if before.fits and not now.fits:
        there = format_bytes(now.limit_bytes)
        needs = f"more than the {there} that"
        if now.kind == "predicted":
            needs = f"at least {format_bytes(now.least_bytes or now.peak_bytes)}, {there}"
        yield f"micro-batch {now.micro_batch} does not fit any more: it needs {needs} are there"
    if now.largest < _least_expected(before, now):
        yield f"the largest micro-batch that fits fell from {before.largest} to {now.largest}"
    allowed = f"{tolerance} is allowed"
    spread_bytes = before.spread_bytes + now.spread_bytes
    if spread_bytes:
        allowed += f", and {format_bytes(spread_bytes)} for how far runs are apart"
    if _peak_grew(before, now, tolerance):
        yield f"the peak grew by {_growth(before.peak_bytes, now.peak_bytes)}, {allowed}"
    elif _held_grew(before, now, tolerance):
        yield f"what is held at the peak grew by {_growth(before.held_bytes or 0, now.held_bytes or 0)}, {allowed}"


def _harmless(before: Measurement, now: Measurement, tolerance: Tolerance) -> Outcome:
    """What it comes to where nothing is worse."""
    if _figures(before) == _figures(now):
        return "unchanged"
    fits_more = now.largest > before.largest + _explained(before, now) or (now.fits and not before.fits)
    return "improved" if fits_more or _shrank(before, now, tolerance) else "within"


def _peak_grew(before: Measurement, now: Measurement, tolerance: Tolerance) -> bool:
    if tolerance.allows(before.peak_bytes, now.peak_bytes, before.spread_bytes + now.spread_bytes):
        return False
    by_segments = before.held_bytes is not None and now.held_bytes is not None
    return not by_segments or now.peak_bytes - before.peak_bytes >= _SEGMENT_BYTES or _held_grew(before, now, tolerance)


def _held_grew(before: Measurement, now: Measurement, tolerance: Tolerance) -> bool:
    if before.held_bytes is None or now.held_bytes is None:
        return False
    return not tolerance.allows(before.held_bytes, now.held_bytes)


def _shrank(before: Measurement, now: Measurement, tolerance: Tolerance) -> bool:
    """Whether it would be a regression the other way round."""
    return (_peak_grew(now, before, tolerance) and now.peak_bytes < before.peak_bytes) or _held_grew(
        now, before, tolerance
    )


def _least_expected(before: Measurement, now: Measurement) -> int:
    """The largest micro-batch that has to fit still."""
    return before.largest - _explained(before, now)


def _explained(before: Measurement, now: Measurement) -> int:
    """How many samples more or less do not tell of the workload, since runs differ or another budget was there."""
    if before.kind == "predicted":
        return 0
    bytes_ = before.spread_bytes + now.spread_bytes + abs(before.limit_bytes - now.limit_bytes)
    return -(-before.largest * bytes_ // max(before.peak_bytes, 1))


def _figures(measurement: Measurement) -> tuple[object, ...]:
    held = {category: count for category, count in measurement.categories.items() if count}
    return measurement.peak_bytes, measurement.held_bytes, measurement.largest, measurement.fits, held


def _growth(before_bytes: int, now_bytes: int) -> str:
    grown = now_bytes - before_bytes
    return f"{precise_bytes(grown)} ({percent(grown, before_bytes)})"


def _hint(outcome: Outcome, command: str) -> str:
    if not command or outcome not in ("regressed", "improved", "unmeasured"):
        return ""
    return {
        "regressed": f"if it is meant, lock it in: {command}",
        "improved": f"lock it in: {command}",
        "unmeasured": f"lock anew, on a branch that is right: {command}",
    }[outcome]


def _notes(before: Measurement, now: Measurement) -> Iterator[str]:
    if before.limit_bytes != now.limit_bytes:
        yield f"the budget was {format_bytes(before.limit_bytes)}, it is {format_bytes(now.limit_bytes)} now"
