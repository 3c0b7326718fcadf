"""Whole studies whose trials train in this process, as the children of `autoaccum tune` do in theirs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoaccum.tuning.judging.standings import rank
from autoaccum.tuning.records import Outcome, Row
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.running.orders import TrainOrder
from autoaccum.tuning.running.training_job import train_setting
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Setting, Space
from autoaccum.tuning.studies.confirming import confirm
from autoaccum.tuning.studies.searching import search
from autoaccum.tuning.studies.storage import open_storage
from autoaccum.tuning.studies.study import open_study
from autoaccum.tuning.studies.terms import Terms
from autoaccum.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is tuned; the rates reach from a hundredth of the workload's own to a hundred times it.

    Attributes:
        workload: With a dataset and an evaluation_dataset.
        own_rate: Its learning rate.
        target_batch: Samples per update, in one micro-batch.
        budget_samples: Of every trial.
        evaluation_batch: The micro-batch of evaluations.
    """

    workload: Workload
    own_rate: float
    target_batch: int
    budget_samples: int
    evaluation_batch: int

    @property
    def rates(self) -> RateSpan:
        return RateSpan(self.own_rate / 100, self.own_rate * 100)

    def setting(self, rate: float) -> Setting:
        return Setting(learning_rate=rate, target_batch=self.target_batch, micro_batch=self.target_batch)

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        """As of `runner.Runner`."""
        budget = Budget(self.budget_samples, "samples")
        order = TrainOrder(
            setting=setting, seed=seed, budget=budget, evaluation_batch=self.evaluation_batch, device="cpu"
        )
        return train_setting(self.workload, order, go_on)


def run_study(
    task: Task,
    storage: Path,
    *,
    seed: int,
    trials: int,
    confirmed: int = 3,
    sampler: str = "tpe",
    pruner: str = "halving",
) -> tuple[Row, ...]:
    """The rows of a study of some trials, and of the best few repeated with two more seeds."""
    targets = BatchSpan(task.target_batch, task.target_batch)
    terms = Terms(
        workload=task.workload.name,
        digest="",
        learning_rates=task.rates,
        target_batches=targets,
        budget=Budget(task.budget_samples, "samples"),
        seed=seed,
        sampler=sampler,
        pruner=pruner,
        precision="fp32",
        batchnorm="micro",
        optimizer="",
        held_out="evaluation_dataset",
        device="cpu",
    )
    name = f"{sampler}, {pruner}, seed {seed}"
    study = open_study(open_storage(str(storage), heartbeat=20.0), name, terms)
    space = Space(
        learning_rates=task.rates,
        target_batches=targets,
        micro_batches=(task.target_batch,),
        micro_batch=task.target_batch,
        coupled=None,
        own_rate=task.own_rate,
    )
    assert search(study, space, task, trials=trials, time_limit=None, tell=_silent) is None
    chosen = [(one.trial, one.setting) for one in rank(study.rows())[:confirmed]]
    confirm(study, chosen, task, seeds=[seed + 1, seed + 2], tell=_silent)
    return study.rows()


def _silent(event: object) -> None:
    pass
