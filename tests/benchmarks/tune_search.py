"""How soon a search comes within 2 % of a grid's best: TPE with successive halving against plain random search.

Run it with `python tests/benchmarks/tune_search.py` (6 minutes; `--seeds 10` for more).

On a noisy quadratic whose best learning rate is known, and on the digits example, a grid of 60 learning rates from a
hundredth of the workload's own to a hundred times it is trained with each seed. Studies with that seed then search the
same range: plain random search, and TPE with and without halving. Printed are medians over seeds of the trials, and of
the samples in budgets of whole trials, until the best loss of a complete trial is within 2 % of the grid's; in how many
studies it came so far in as many trials as the grid has; and what share of the budgets a whole study trained.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

import noisy_quadratic as quadratic
from studies_in_process import Task, run_study

from autoaccum.tuning.records import Row
from autoaccum.workload.loading import load_workload
from autoaccum.workload.spec import Workload

GRID, NEAR = 60, 1.02
SEARCHES = {"random": ("random", "none"), "TPE": ("tpe", "none"), "TPE, halving": ("tpe", "halving")}


def tasks() -> dict[str, Task]:
    """What is tuned, by name."""
    workload = Workload(
        model=quadratic.model,
        dataset=quadratic.dataset,
        evaluation_dataset=quadratic.evaluation_dataset,
        loss=quadratic.loss,
        optimizer=quadratic.optimizer,
    )
    digits = load_workload(str(Path(__file__).parents[2] / "examples" / "digits_fit.py"))
    return {
        "quadratic": Task(
            workload=workload,
            own_rate=quadratic.OWN_RATE,
            target_batch=quadratic.TARGET_BATCH,
            budget_samples=quadratic.BUDGET,
            evaluation_batch=1,
        ),
        "digits": Task(workload=digits, own_rate=2e-3, target_batch=128, budget_samples=1437, evaluation_batch=360),
    }


def best_of_grid(task: Task, seed: int) -> float:
    """The lowest loss over the grid."""
    low, high = math.log(task.rates.low), math.log(task.rates.high)
    rates = [math.exp(low + (high - low) * index / (GRID - 1)) for index in range(GRID)]
    outcomes = [task.run(task.setting(rate), seed, lambda percent, loss: True) for rate in rates]
    return min(outcome.loss for outcome in outcomes if outcome.loss is not None)


def until_near(rows: tuple[Row, ...], bound: float) -> tuple[float, float]:
    """Trials and samples until a loss is within the bound; infinite where none is."""
    samples = 0
    for count, row in enumerate(rows, 1):
        samples += row.samples
        if row.state == "complete" and row.loss is not None and row.loss <= bound:
            return count, samples
    return math.inf, math.inf


def compare(name: str, task: Task, seeds: int, trials: int) -> None:
    """Search with every seed, and print."""
    found: dict[str, list[tuple[float, float]]] = {search: [] for search in SEARCHES}
    trained: dict[str, list[int]] = {search: [] for search in SEARCHES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            bound = NEAR * best_of_grid(task, seed)
            for search, (sampler, pruner) in SEARCHES.items():
                rows = run_study(
                    task,
                    Path(folder) / "search.journal",
                    seed=seed,
                    trials=trials,
                    confirmed=0,
                    sampler=sampler,
                    pruner=pruner,
                )
                found[search].append(until_near(rows, bound))
                trained[search].append(sum(row.samples for row in rows))
    for search, reached in found.items():
        count = sum(trial < math.inf for trial, _ in reached)
        samples = median([samples for _, samples in reached]) / task.budget_samples
        share = fmean(trained[search]) / task.budget_samples / trials
        print(
            f"{name}, {search}: {median([trial for trial, _ in reached]):g} trials, {samples:.1f} budgets;"
            f" {count} of {seeds} studies came so far in {trials} trials, which trained {share:.0%} of their budgets",
            flush=True,
        )


def main() -> None:
    """Compare on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many studies of each kind (default: 5)")
    parser.add_argument("--trials", type=int, default=GRID, help=f"of a study (default: {GRID})")
    parser.add_argument("--task", choices=["quadratic", "digits"], help="one of the two (default: both)")
    asked = parser.parse_args()
    for name, task in tasks().items():
        if asked.task in (None, name):
            compare(name, task, asked.seeds, asked.trials)


if __name__ == "__main__":
    main()
