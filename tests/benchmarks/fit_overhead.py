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
Pairs = list[tuple[float, float]]
"""CPU seconds of updates, each with those of the loop's beside it."""


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


def measure(workload: Any, updates: int) -> tuple[Pairs, Pairs]:
    """Train all, in turns; return the seconds of fit and of the Accumulator beside the loops'."""
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch(TARGET_BATCH)
    options: dict[str, Any] = {"micro_batch": MICRO_BATCH, "clip_norm": CLIP_NORM}
    # A loop for each: one that ran twice as often would find more of its weights in the processor's caches.
    reading, given = (Loop(copy.deepcopy(model), workload.dataset, workload.criterion) for _ in range(2))
    own = copy.deepcopy(model)
    step = autoaccum.Accumulator(own, torch.optim.AdamW(own.parameters()), workload.criterion, **options).step
    fits, steps, began = Pairs(), Pairs(), 0.0

    def hear(event: Any) -> None:
        nonlocal began
        seconds = process_time() - began
        if isinstance(event, Updated):
            fits.append((seconds, seconds_of(reading.read_and_step)))
            turns = [step, given.step]
            taken = {turn: seconds_of(turn, batch) for turn in (turns if len(fits) % 2 else turns[::-1])}
            steps.append((taken[step], taken[given.step]))
        elif not isinstance(event, Started):
            return
        began = process_time()

    optimizer = torch.optim.AdamW(model.parameters())
    options |= {"steps": updates + WARM_UP, "progress": False, "callbacks": [hear], "target_batch": TARGET_BATCH}
    autoaccum.fit(model, workload.dataset, loss=workload.criterion, optimizer=optimizer, **options)
    return fits[WARM_UP:], steps[WARM_UP:]


def seconds_of(update: Callable[..., object], *batch: Any) -> float:
    """CPU seconds of an update."""
    began = process_time()
    update(*batch)
    return process_time() - began


def show(pairs: Pairs) -> str:
    """Return the median ratio and difference."""
    more, update = median(mine - theirs for mine, theirs in pairs), median(theirs for _, theirs in pairs)
    ratio = median(mine / theirs for mine, theirs in pairs)
    return f"{ratio:.4f} ({more * 1e3:+.2f} ms of {update * 1e3:.0f}, {len(pairs)} pairs)"


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="updates of each kind (default: 100)")
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    for name, module in MODELS.items():
        fits, steps = zip(*(measure(load_model(module), updates // ROUNDS) for _ in range(ROUNDS)), strict=True)
        print(f"{name}: Accumulator.step / loop {show(sum(steps, []))}")
        print(f"{name}: fit / loop {show(sum(fits, []))}")


if __name__ == "__main__":
    main()
