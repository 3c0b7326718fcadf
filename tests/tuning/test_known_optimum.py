"""A noisy quadratic whose best learning rate can be computed: studies of 30 trials find it, for nine seeds of ten."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import noisy_quadratic as quadratic
import pytest
import torch
from judged_rows import pruned, trial
from studies_in_process import Task, run_study

import autoaccum
from autoaccum.tuning.judging.bracket import find_bracket
from autoaccum.tuning.judging.standings import own_standing, rank
from autoaccum.tuning.records import Bracket, Standing

SEEDS, TRIALS = range(10), 30
ENOUGH = 9
WIDEST = 10.0
"""How wide the median bracket may be, of a range whose ends differ by a factor of 10,000."""
NEAR = 1.05
"""How far above the least expected loss that of the rate found may lie, in nine studies of ten."""


@dataclass(frozen=True)
class Found:
    """What a study came to."""

    best: Standing
    own: Standing
    bracket: Bracket
    trials: int

    @property
    def holds_the_optimum(self) -> bool:
        return (self.bracket.low or 0.0) <= optimum() <= (self.bracket.high or math.inf)

    @property
    def width(self) -> float:
        low, high = self.bracket.low, self.bracket.high
        return math.inf if low is None or high is None else high / low


@cache
def optimum() -> float:
    return quadratic.best_rate()


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    storage = tmp_path_factory.mktemp("studies") / "tune.journal"
    return [study_of(seed, storage) for seed in SEEDS]


def study_of(seed: int, storage: Path) -> Found:
    workload = autoaccum.Workload(
        model=quadratic.model,
        dataset=quadratic.dataset,
        evaluation_dataset=quadratic.evaluation_dataset,
        loss=quadratic.loss,
        optimizer=quadratic.optimizer,
    )
    task = Task(
        workload=workload,
        own_rate=quadratic.OWN_RATE,
        target_batch=quadratic.TARGET_BATCH,
        budget_samples=quadratic.BUDGET,
        evaluation_batch=1,
    )
    rows = run_study(task, storage, seed=seed, trials=TRIALS)
    bracket, own = find_bracket(rows, rank(rows)), own_standing(rows)
    assert bracket is not None
    assert own is not None
    return Found(rank(rows)[0], own, bracket, sum(row.confirms is None for row in rows))


def test_the_optimum_lies_in_the_stated_bracket(studies: list[Found]) -> None:
    assert [found.trials for found in studies] == [TRIALS] * len(SEEDS)
    assert sum(found.holds_the_optimum for found in studies) >= ENOUGH


def test_the_bracket_is_narrow_and_has_the_noise_of_the_seeds(studies: list[Found]) -> None:
    assert sorted(found.width for found in studies)[len(SEEDS) // 2] <= WIDEST
    assert all(found.bracket.noise for found in studies)


def test_the_rate_found_is_as_good_as_the_best_one(studies: list[Found]) -> None:
    least = quadratic.expected_loss(optimum())
    near = [quadratic.expected_loss(found.best.setting.learning_rate) <= NEAR * least for found in studies]
    assert sum(near) >= ENOUGH


def test_it_beats_the_workload_s_own_rate(studies: list[Found]) -> None:
    assert all(found.best.mean is not None and found.best.mean < found.own.losses[0] for found in studies)
    assert all(len(found.best.losses) == 3 for found in studies)


@pytest.mark.parametrize("rate", [0.02, 0.11, 0.5])
def test_the_expected_loss_is_the_mean_of_many_trainings(rate: float) -> None:
    """A thousand at once, with means of batches as they are distributed."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(1000, quadratic.WIDTH)
    for _ in range(quadratic.UPDATES):
        means = torch.randn(weights.shape, generator=generator) / math.sqrt(quadratic.TARGET_BATCH)
        weights -= rate * quadratic.H * (weights - means)
    losses = 0.5 * (weights * quadratic.H * weights).sum(1)
    error = float(losses.std()) / math.sqrt(len(losses))
    assert float(losses.mean()) == pytest.approx(quadratic.expected_loss(rate), abs=4 * error)


def test_under_a_cosine_the_best_rate_is_behind_at_half_of_the_budget() -> None:
    """So that a bracket, which takes what is behind there for worse, would leave it out."""
    courses = {rate: expected_course(rate) for rate in (0.2, 0.25, 0.33, 0.4)}
    best, slower = courses[0.33], courses[0.25]
    assert best[100] == min(course[100] for course in courses.values())
    assert best[50] > slower[50]
    rows = [
        trial(0, 0.25, slower[100], losses=((25, slower[25]), (50, slower[50]))),
        pruned(1, 0.33, (25, best[25]), (50, best[50])),
    ]
    as_constant, bracket = (find_bracket(rows, rank(rows), scheduled=scheduled) for scheduled in (False, True))
    assert as_constant is not None
    assert bracket is not None
    assert (as_constant.high, bracket.high) == (0.33, None)


def expected_course(rate: float) -> dict[int, float]:
    """The expected held-out loss at the milestones and the end, where a cosine takes the rate to 0 over the budget."""
    losses, square = {}, torch.ones_like(quadratic.CURVATURES)
    for update in range(quadratic.UPDATES):
        now = rate * (1 + math.cos(math.pi * update / quadratic.UPDATES)) / 2
        square = (1 - now * quadratic.CURVATURES) ** 2 * square
        square += (now * quadratic.CURVATURES) ** 2 / quadratic.TARGET_BATCH
        percent = 100 * (update + 1) // quadratic.UPDATES
        losses[percent] = float(0.5 * (quadratic.CURVATURES * square).sum())
    return losses
