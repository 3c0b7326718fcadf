"""`metrics.jsonl`: one object a line for each update and each evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoaccum.training.events import Evaluated, Updated
from autoaccum.training.run_folder.appended_file import AppendedFile

_FIGURES = (
    "update",
    "epoch",
    "samples",
    "loss",
    "grad_norm",
    "learning_rate",
    "samples_per_second",
    "peak_bytes",
    "retries",
    "micro_batches",
    "micro_batch",
    "updated",
)
_WHERE_THERE = ("noise_scale", "terms")


class MetricsLog:
    """Lines at the end of a file, each there as soon as it is written.

    What cannot be written is lost, and training goes on: later lines follow when there is room again.

    Args:
        path: The file.
        on_failure: Told, once, why a line could not be written.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], Any]) -> None:
        self._path = path
        self._on_failure = on_failure
        self._file = AppendedFile(path)
        self._has_failed = False

    def resume(self, update: int, evaluated_at: int | None = None) -> None:
        """Cut off what is made again, and a last line that is torn.

        Args:
            update: Updates later than this one are.
            evaluated_at: Evaluations later than that after this update are; None: those of later updates.
        """
        try:
            with self._path.open("r+b") as file:
                file.truncate(_kept_bytes(file, update, update if evaluated_at is None else evaluated_at))
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail(error)

    def write(self, updated: Updated) -> None:
        """Add the figures of an update; what is not a finite number is null."""
        figures = {name: getattr(updated, name) for name in _FIGURES}
        figures |= {name: value for name in _WHERE_THERE if (value := getattr(updated, name)) is not None}
        self._add(figures)

    def write_evaluation(self, evaluated: Evaluated) -> None:
        """Add what an evaluation gave."""
        self._add({"update": evaluated.update, "evaluation": evaluated.values, "samples": evaluated.samples})

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        self._file.close()

    def _add(self, figures: Mapping[str, Any]) -> None:
        line = json.dumps(_finite(figures), allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(f"{self._path} cannot be written ({error.strerror or error}): lines of it are missing")


def _kept_bytes(lines: Iterator[bytes], update: int, evaluated_at: int) -> int:
    kept = end = 0
    for line in lines:
        end += len(line)
        figures = _figures_of(line)
        if figures is None:
            continue
        if figures["update"] > (min(update, evaluated_at) if "evaluation" in figures else update):
            break
        kept = end
    return kept


def _figures_of(line: bytes) -> dict[str, Any] | None:
    """What a line holds; None where it is no whole line of ours."""
    try:
        figures = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return figures if isinstance(figures, dict) and isinstance(figures.get("update"), int) else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
