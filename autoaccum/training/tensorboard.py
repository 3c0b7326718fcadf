"""The figures of `metrics.jsonl` for TensorBoard, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoaccum.training.events import Evaluated, Updated

_FIGURES = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries", "noise_scale")
_FLUSH_SECONDS = 30


def open_board(folder: Path, update: int) -> Board | None:
    """A board whose figures follow those of `update`; None, silently, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        purged = update + 1 if update else None
        writer = SummaryWriter(folder, purge_step=purged, flush_secs=_FLUSH_SECONDS)
    except Exception:  # Also one that is installed and does not work: the same figures are in metrics.jsonl.
        return None
    return Board(writer)


class Board:
    """Figures by update: `train/...`, `terms/...` and `evaluation/...`.

    One that cannot be written any more (a full disk) is given up; the figures are in `metrics.jsonl` as well.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, updated: Updated) -> None:
        """Add the figures of an update that there are."""
        figures = {f"train/{name}": getattr(updated, name) for name in _FIGURES}
        self._add(updated.update, figures | dict(_under("terms", updated.terms or {})))

    def write_evaluation(self, evaluated: Evaluated) -> None:
        """Add what an evaluation gave."""
        self._add(evaluated.update, dict(_under("evaluation", evaluated.values)))

    def close(self) -> None:
        """Write out what is waiting."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception:
            return

    def _add(self, update: int, figures: Mapping[str, Any]) -> None:
        try:
            for name, value in figures.items():
                if value is not None and self._writer is not None:
                    self._writer.add_scalar(name, value, update)
        except Exception:
            self.close()


def _under(room: str, values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((f"{room}/{name}", value) for name, value in values.items())
