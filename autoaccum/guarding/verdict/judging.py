"""Judgements of what could not be compared: never a pass, and always with a way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.guarding.judgements import Judgement
from autoaccum.guarding.records import Case, Measured, Measurement

_UNMEASURED = NotMeasuredError.exit_code


def unmeasured(case: Case, error: AutoaccumError, *, called: bool = True) -> Judgement:
    """That an error came in place of figures.

    Args:
        case: Of this case.
        error: The error.
        called: Whether the call names the workload. What is wrong with one that a lock or `pyproject.toml` names is no
            fault of the call: it could not be measured.
    """
    code = error.exit_code
    return Judgement(
        case=case,
        outcome="too_large" if isinstance(error, DoesNotFitError) else "unmeasured",
        exit_code=_UNMEASURED if code == UsageError.exit_code and not called else code,
        reasons=(error.message,),
        hint=error.hint or "",
        traceback=error.user_traceback if isinstance(error, WorkloadError) else None,
    )


def not_locked(case: Case, where: str, command: str) -> Judgement:
    """That there is nothing to compare a case with; `where` has none, and `command` writes it."""
    return Judgement(
        case=case,
        outcome="unmeasured",
        exit_code=_UNMEASURED,
        reasons=(where,),
        hint="lock what it takes now, on a branch that is right",
        command=command,
    )


def incomparable(case: Case, before: Measurement, now: Measured, command: str) -> Judgement | None:
    """That figures of other versions, another card or other settings say nothing; None where they are alike.

    Args:
        case: Which.
        before: What is locked.
        now: What is measured.
        command: Locks what it takes now.
    """
    reasons = tuple(_differences(before, now.measurement))
    if not reasons:
        return None
    torch = before.versions.get("torch")
    install = f"install torch {torch}, " if torch != now.measurement.versions.get("torch") else ""
    return Judgement(
        case=case,
        outcome="unmeasured",
        exit_code=_UNMEASURED,
        reasons=reasons,
        hint=f"{install}compare with a revision by --baseline REV, or lock anew on a branch that is right",
        command=command,
        before=before,
        now=now.measurement,
        warnings=now.warnings,
        notes=now.notes,
    )


def _differences(before: Measurement, now: Measurement) -> Iterator[str]:
    if before.card != now.card:
        yield f"the lock was measured on {before.card}, this is {now.card}"
    for name, was, is_now in _different(before.versions, now.versions):
        yield f"the lock was written with {name} {was}, this is {is_now}"
    for name, was, is_now in _different(before.settings, now.settings):
        yield f"the lock was written with {name} {_shown(was)}, here it is {_shown(is_now)}"


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield name, before.get(name), now.get(name)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
