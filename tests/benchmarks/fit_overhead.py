"""Accumulator.step and autoaccum.fit against a hand-written correct loop, on a small GPT and a convolutional net.

Run it with `python tests/benchmarks/fit_overhead.py`.

All train a model of their own from the same weights, on the same dataset, in the same micro-batches, with one clip, one
update and one loss to log. After each update of fit a loop makes one from samples that it reads and shuffles itself;
then the Accumulator and another loop make one from the same batch, either first in turns, within fit's callback, whose
time is not fit's. So each update is paired with a loop's beside it. On one thread, the CPU seconds of this process are
counted, which other programs change little. The medians of the paired ratios (aims: 1.01 and 1.02) and of the
differences are printed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import process_time
from typing import Any

import torch
from measuring import load_model
from torch import nn
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.training.fit_events import Started, Updated

MODELS = {"small GPT": "transformer", "convolutional net": "conv_net"}
TARGET_BATCH, MICRO_BATCH, CLIP_NORM = 16, 4, 1.0
WARM_UP, ROUNDS = 3, 4


class Loop:
    """A careful hand-written loop over micro-batches: of an ordinary DataLoader, or of a batch that it is given."""

    def __init__(self, model: nn.Module, dataset: Any, criterion: nn.Module) -> None:
        self.model, self.criterion = model, criterion
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.batches = self._endless(DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True))
        self.losses: list[float] = []

    def read_and_step(self) -> None:
        """One update from samples of its own."""
        self._update([next(self.batches) for _ in range(TARGET_BATCH // MICRO_BATCH)])

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One update from `batch`."""
        inputs, targets = batch
        self._update(list(zip(torch.split(inputs, MICRO_BATCH), torch.split(targets, MICRO_BATCH), strict=True)))

    def _update(self, parts: Sequence[Any]) -> None:
        """One update; all parts have as many samples, and each sample as much weight."""
        losses = []
        for inputs, targets in parts:
            loss = self.criterion(self.model(inputs), targets) / len(parts)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.losses.append(float(torch.stack(losses).sum()))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @staticmethod
    def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from loader


@dataclass
class Pairs:
    """CPU seconds of updates, each with those of the loop's beside it."""

    mine: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(self.mine + other.mine, self.theirs + other.theirs)

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return median(mine / theirs for mine, theirs in zip(self.mine, self.theirs, strict=True))

    def __str__(self) -> str:
        more = median(mine - theirs for mine, theirs in zip(self.mine, self.theirs, strict=True))
        update = median(self.theirs)
        return f"{self.ratio:.4f} ({more * 1e3:+.2f} ms of {update * 1e3:.0f}, {len(self.mine)} pairs)"


class Turns:
    """Within a callback of fit, lets the loop and the Accumulator make an update of their own after each of fit's."""

    def __init__(self, workload: Any, model: nn.Module) -> None:
        self.fit, self.accumulator = Pairs(), Pairs()
        self._batch = workload.batch(TARGET_BATCH)
        # A loop for each: one that ran twice as often would find more of its weights in the processor's caches.
        self._loops = [Loop(copy.deepcopy(model), workload.dataset, workload.criterion) for _ in range(2)]
        own = copy.deepcopy(model)
        self._step = autoaccum.Accumulator(
            own,
            torch.optim.AdamW(own.parameters()),
            workload.criterion,
            micro_batch=MICRO_BATCH,
            clip_norm=CLIP_NORM,
        ).step
        self._updates, self._began = 0, 0.0

    def __call__(self, event: Any) -> None:
        """Hear what fit does."""
        seconds = process_time() - self._began
        if isinstance(event, Updated):
            theirs = seconds_of(self._loops[0].read_and_step)
            turns = [self._step, self._loops[1].step]
            order = turns if self._updates % 2 else turns[::-1]
            taken = {update: seconds_of(update, self._batch) for update in order}
            self._updates += 1
            if self._updates > WARM_UP:
                self.fit += Pairs([seconds], [theirs])
                self.accumulator += Pairs(*([taken[update]] for update in turns))
        elif not isinstance(event, Started):
            return
        self._began = process_time()


def seconds_of(update: Callable[..., object], *batch: Any) -> float:
    """CPU seconds of an update."""
    began = process_time()
    update(*batch)
    return process_time() - began


def measure(workload: Any, updates: int) -> Turns:
    """Train all, in turns."""
    torch.manual_seed(0)
    model = workload.model()
    turns = Turns(workload, model)
    autoaccum.fit(
        model,
        workload.dataset,
        target_batch=TARGET_BATCH,
        loss=workload.criterion,
        optimizer=torch.optim.AdamW(model.parameters()),
        clip_norm=CLIP_NORM,
        micro_batch=MICRO_BATCH,
        steps=updates + WARM_UP,
        progress=False,
        callbacks=[turns],
    )
    return turns


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="updates of each kind (default: 100)")
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    for name, module in MODELS.items():
        runs = [measure(load_model(module), updates // ROUNDS) for _ in range(ROUNDS)]
        print(f"{name}: Accumulator.step / loop {sum((turns.accumulator for turns in runs), Pairs())}")
        print(f"{name}: fit / loop {sum((turns.fit for turns in runs), Pairs())}")


if __name__ == "__main__":
    main()
