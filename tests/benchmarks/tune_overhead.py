"""What a study costs beside its trainings: trials through processes and storage against a hand-written loop.

Run it with `python tests/benchmarks/tune_overhead.py` (trials of 30 s; 3 minutes), or with `--seconds 5`, from which
trials of 30 s are extrapolated.

Both train the digits example with the same batches, as many updates, and a loss on held-out data at the end; the
study's also at its milestones. After each trial the loop trains once in this process, so that the machine's moods meet
both. Printed is the median of the paired ratios (aim: 1.10 for 30 s): the time from one trial's beginning to the next
one's, over the loop's. What does not grow with a trial is told apart: a process, evaluations, the storage. The same is
printed for seconds of processors, in which it does not count that a process starts while another one trains: these
are what a trial costs where no core is free for that.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from autoaccum.tuning.events import TrialBegan, TrialEnded
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.child_runner import ChildRunner
from autoaccum.tuning.running.describing import describe
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Space
from autoaccum.tuning.studies.searching import search
from autoaccum.tuning.studies.storage import open_storage
from autoaccum.tuning.studies.study import open_study
from autoaccum.tuning.studies.terms import Terms
from autoaccum.workload.loading import load_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_fit.py"
TARGET_BATCH, MICRO_BATCH, RATES = 128, 64, RateSpan(1e-3, 4e-3)
CALIBRATION_UPDATES, STATED_SECONDS = 40, 30.0


class Loop:
    """What a careful person writes: micro-batches, an update, and a loss on held-out data at the end."""

    def __init__(self) -> None:
        self.workload = load_workload(str(EXAMPLE))

    def train(self, updates: int) -> float:
        """Seconds of a training from new weights."""
        began = time.perf_counter()
        torch.manual_seed(0)
        model = self.workload.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        criterion = torch.nn.CrossEntropyLoss()
        parts = TARGET_BATCH // MICRO_BATCH
        batches = self._endless()
        for _ in range(updates):
            for _ in range(parts):
                inputs, targets = next(batches)
                torch.autograd.backward(criterion(model(inputs), targets) / parts)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._evaluate(model, criterion)
        return time.perf_counter() - began

    def _endless(self) -> Iterator[Any]:
        loader: Any = DataLoader(self.workload.dataset, batch_size=MICRO_BATCH, shuffle=True, drop_last=True)
        while True:
            yield from loader

    def _evaluate(self, model: torch.nn.Module, criterion: torch.nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            inputs, targets = next(iter(DataLoader(self.workload.evaluation_dataset, batch_size=360)))
            return float(criterion(model(inputs), targets))


@dataclass(frozen=True)
class Pair:
    """A trial, and the loop after it.

    Attributes:
        trial: Seconds from the end of what came before to the trial's own.
        trial_cpu: Those of processors, of its process and this one.
        training: Seconds of its updates.
        loop: Seconds of the loop.
        loop_cpu: Those of processors.
    """

    trial: float
    trial_cpu: float
    training: float
    loop: float
    loop_cpu: float


@dataclass
class Pairs:
    """Makes a training of the loop after each trial that it hears of."""

    loop: Loop
    updates: int
    pairs: list[Pair] = field(default_factory=list)
    began: tuple[float, float] | None = None

    def __call__(self, event: Any) -> None:
        """Hear what the study does; what comes between two trials is the later one's."""
        if isinstance(event, TrialBegan) and self.began is None:
            self.began = now()
        elif isinstance(event, TrialEnded) and self.began is not None:
            ended = now()
            self.loop.train(self.updates)
            looped = now()
            (trial, trial_cpu), (loop, loop_cpu) = since(self.began, ended), since(ended, looped)
            self.pairs.append(Pair(trial, trial_cpu, event.row.seconds or 0.0, loop, loop_cpu))
            self.began = looped


def now() -> tuple[float, float]:
    """The time, and seconds of processors of this process and of those it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


def since(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Seconds between two times."""
    return other[0] - one[0], other[1] - one[1]


def measure(pairs: Pairs, trials: int, storage: Path) -> None:
    """Run a study of some trials without pruning."""
    samples = pairs.updates * TARGET_BATCH
    request = TuneRequest(
        reference=str(EXAMPLE),
        target_batch=BatchSpan(TARGET_BATCH, TARGET_BATCH),
        learning_rate=RATES,
        budget_samples=samples,
        pruner="none",
        device="cpu",
    )
    facts, budget = describe(request), Budget(samples, "samples")
    study = open_study(
        open_storage(str(storage), heartbeat=request.heartbeat),
        "overhead",
        Terms.of(request, facts, budget, RATES),
    )
    space = Space(
        learning_rates=RATES,
        target_batches=request.target_batch,
        micro_batches=(MICRO_BATCH,),
        micro_batch=MICRO_BATCH,
        coupled=None,
        own_rate=facts.learning_rate,
    )
    with ChildRunner(request, budget, 360) as runner:
        search(study, space, runner, trials=trials, time_limit=None, tell=pairs)


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=STATED_SECONDS, help="of a trial (default: 30)")
    parser.add_argument("--trials", type=int, default=3, help="how many, beside the first (default: 3)")
    asked = parser.parse_args()
    loop = Loop()
    loop.train(CALIBRATION_UPDATES)
    pairs = Pairs(loop, max(1, round(asked.seconds * CALIBRATION_UPDATES / loop.train(CALIBRATION_UPDATES))))
    with tempfile.TemporaryDirectory() as folder:
        measure(pairs, asked.trials + 1, Path(folder) / "tune.db")
    report(pairs.pairs)


def report(pairs: list[Pair]) -> None:
    """Print what was measured; the first trial, whose process was not started ahead, is told apart."""
    first, rest = pairs[0], pairs[1:]
    loop = median([pair.loop for pair in rest])
    slower = median([pair.training / pair.loop for pair in rest])
    fixed = median([pair.trial - pair.training for pair in rest])
    ratio = median([pair.trial / pair.loop for pair in rest])
    print(f"trials of {loop:.1f} s in a loop: study / loop {ratio:.3f}; of processors {_cpu_ratio(rest):.3f}")
    print(
        f"training / loop {slower:.3f}, and {fixed:.2f} s beside it ({first.trial - first.training:.2f} for the first)"
    )
    print(f"trials of {STATED_SECONDS:.0f} s, by these two: {slower + fixed / STATED_SECONDS:.3f}")


def _cpu_ratio(pairs: list[Pair]) -> float:
    return median([pair.trial_cpu / pair.loop_cpu for pair in pairs])


if __name__ == "__main__":
    main()
