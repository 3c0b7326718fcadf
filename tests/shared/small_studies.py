"""Studies without a training: what they are asked, and runners whose result is a function of setting and seed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoaccum.tuning.facts import Facts
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.runner import MILESTONES, GoOn
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Setting, Space
from autoaccum.tuning.studies.storage import open_storage
from autoaccum.tuning.studies.study import Study, open_study
from autoaccum.tuning.studies.terms import Terms

RATES = RateSpan(1e-4, 1.0)
BUDGET = Budget(1000, "samples")
FACTS = Facts(
    name="valley",
    digest="ab" * 32,
    model="Linear",
    parameters=10,
    optimizer="SGD",
    learning_rate=0.01,
    schedule=None,
    precision="fp32",
    batchnorm="micro",
    has_batch=True,
    training_samples=1000,
    held_out="evaluation_dataset (100 samples)",
    device="cpu",
)


def small_terms(**asked: Any) -> Terms:
    """Terms of a small study; `asked` as of `TuneRequest`."""
    request = TuneRequest(**{"reference": "valley.py", "target_batch": BatchSpan(256, 256), **asked})
    return Terms.of(request, FACTS, BUDGET, request.learning_rate or RATES)


def small_space(**changes: Any) -> Space:
    """What a small study searches."""
    space: dict[str, Any] = {
        "learning_rates": RATES,
        "target_batches": BatchSpan(256, 256),
        "micro_batches": (1, 2, 4, 8),
        "micro_batch": 8,
        "coupled": None,
        "own_rate": FACTS.learning_rate,
    }
    return Space(**{**space, **changes})


def small_study(storage: str | Path, *, heartbeat: float = 20.0, **asked: Any) -> Study:
    """A small study in that storage, opened."""
    return open_study(open_storage(str(storage), heartbeat=heartbeat), "valley", small_terms(**asked))


def valley(setting: Setting, seed: int) -> float:
    """A loss with its lowest point at a rate of 0.02, a little different for each seed; infinite from 0.6 on."""
    if setting.learning_rate > 0.6:
        return math.inf
    noise = math.sin(1e4 * setting.learning_rate + seed) / 100
    return (math.log10(setting.learning_rate) - math.log10(0.02)) ** 2 + 1 / setting.micro_batch + noise


class PureRunner:
    """Gives the loss of `valley` at once.

    Args:
        before: Called with the number of runs before, the setting, and the percent that is reached: 0, 25, 50, 100.

    Attributes:
        runs: Settings and seeds that were begun.
    """

    def __init__(self, before: Callable[[int, Setting, int], object] = lambda run, setting, percent: None) -> None:
        self._before = before
        self.runs: list[tuple[Setting, int]] = []

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        """One training."""
        number = len(self.runs)
        self.runs.append((setting, seed))
        self._before(number, setting, 0)
        loss = valley(setting, seed)
        if loss == math.inf:
            return Outcome(state="diverged", samples=10, updates=1, seconds=0.25, reason="the loss is nan")
        for percent in MILESTONES:
            if not go_on(percent, loss + 1 / percent):
                return Outcome(state="pruned", loss=loss + 1 / percent, samples=10 * percent, seconds=0.5)
            self._before(number, setting, percent)
        self._before(number, setting, 100)
        return Outcome(state="complete", loss=loss, samples=1000, updates=4, seconds=1.0)


def run_worker(storage: str, log: str, trials: int, seconds: float, heartbeat: float) -> None:
    """What a worker's process does: search, with trials of so many seconds, and write down what it begins and ends."""
    from autoaccum.tuning.studies.searching import search

    def note(run: int, setting: Setting, percent: int) -> None:
        with Path(log).open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "rate": setting.learning_rate, "percent": percent}) + "\n")
        time.sleep(seconds / 4)

    study = small_study(storage, heartbeat=heartbeat)
    search(study, small_space(), PureRunner(note), trials=trials, time_limit=None, tell=lambda event: None)
