"""The commands that are offered below what a study has found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.outputs import running_words

if TYPE_CHECKING:
    from autoaccum.tuning.records import Tuning

_OUTPUTS = ("as_json", "output", "plot", "force", "quiet")
"""What only concerns this run's output."""
_OF_THE_STUDY = (
    *("target_batch", "trials", "learning_rate", "budget_samples", "budget_seconds", "confirm", "storage", "study"),
    *("sampler", "pruner", "plan", "memory", "reserve", "time_limit", "trial_limit", "heartbeat"),
)
"""What a training has no use for, or is told anyway."""


def offers(tuning: Tuning) -> dict[str, Any]:
    """What `print_tuning` offers next, by what it calls that."""
    return {
        "command": _own_words(*_OUTPUTS),
        "more": _more_trials(tuning),
        "train": _training_words(tuning),
        "name": _free_name(),
    }


def _more_trials(tuning: Tuning) -> list[str]:
    searched = sum(row.confirms is None and not row.lost for row in tuning.rows)
    trials = 2 * max(searched, click.get_current_context().params["trials"])
    return [*_own_words(*_OUTPUTS, "trials"), "--trials", str(trials)]


def _own_words(*without: str) -> list[str]:
    """The command that is running, without the password of its storage."""
    storage = click.get_current_context().params["storage"]
    if storage is None or "://" not in storage:
        return running_words(without=without)
    from autoaccum.tuning.studies.addresses import read_address

    address = read_address(storage)
    return running_words(without=without, instead={"storage": storage if address.path else address.shown})


def _training_words(tuning: Tuning) -> list[str]:
    """A command that trains with what was found, but for the plan."""
    words = running_words(without=(*_OUTPUTS, *_OF_THE_STUDY))
    words[words.index("tune")] = "fit"
    best = tuning.best
    target = tuning.space.target_batches.high if best is None else best.setting.target_batch
    return [*words, "--target-batch", str(target), "--epochs", "3", "--run-dir", f"runs/{_free_run()}"]


def _free_run() -> str:
    return _free("best", lambda name: Path("runs") / name)


def _free_name() -> str:
    """The name of a plan file that is not there yet."""
    return f"{_free('best', lambda name: Path(f'{name}.json'))}.json"


def _free(name: str, path: Callable[[str], Path]) -> str:
    free, number = name, 1
    while path(free).exists():
        number += 1
        free = f"{name}-{number}"
    return free
