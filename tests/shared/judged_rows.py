"""Rows of small studies, for tests of what judges them."""

from __future__ import annotations

from typing import Any

from autoaccum.tuning.records import Row, State
from autoaccum.tuning.settings import Setting

SEED = 7


def setting(rate: float, target: int = 64, micro: int = 16) -> Setting:
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)


def trial(number: int, rate: float, loss: float | None, state: State = "complete", **more: Any) -> Row:
    """A row of the search."""
    known: dict[str, Any] = {"setting": setting(rate), "seed": SEED, "loss": loss} | more
    return Row(number=number, state=state, **known)


def pruned(number: int, rate: float, *losses: tuple[int, float], **more: Any) -> Row:
    """A row of the search that ended at the last of some milestones."""
    return trial(number, rate, None, "pruned", losses=losses, **more)


def repeats(of: Row, *losses: float | None, **more: Any) -> list[Row]:
    """Confirmations of a trial; None: that one diverged."""
    return [
        Row(
            number=index,
            state="diverged" if loss is None else "complete",
            setting=of.setting,
            seed=SEED + 1 + index,
            loss=loss,
            confirms=of.number,
            **more,
        )
        for index, loss in enumerate(losses)
    ]
