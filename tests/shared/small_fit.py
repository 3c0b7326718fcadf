"""Small trainings by `autoaccum.fit`: run and interrupt them, and read what they leave on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autoaccum
from autoaccum.training.fit_events import Updated


class Interrupted(Exception):
    """Any exception of the user's code."""


def fit(model_or_workload: Any, data: Any = None, **options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    """Train, and return the result and the events; `target_batch` is 8 and `micro_batch` 4 unless given or planned."""
    events: list[Any] = []
    defaults = {"target_batch": 8, "progress": False} | ({} if "plan" in options else {"micro_batch": 4})
    callbacks = [events.append, *options.pop("callbacks", ())]
    return autoaccum.fit(model_or_workload, data, callbacks=callbacks, **defaults | options), events


def of_kind(kind: type | tuple[type, ...], events: list[Any]) -> list[Any]:
    """Return the events of a kind."""
    return [event for event in events if isinstance(event, kind)]


def after_update(update: int, act: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a callback that acts after an update."""
    return lambda event: act() if isinstance(event, Updated) and event.update == update else None


def interrupt_after(update: int, error: BaseException | None = None) -> Callable[[Any], Any]:
    """Return a callback that raises after an update."""

    def act() -> None:
        raise Interrupted if error is None else error

    return after_update(update, act)


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in a run's folder."""
    return max((folder / "checkpoints").glob("*.pt"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log, which hold nothing that JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]
