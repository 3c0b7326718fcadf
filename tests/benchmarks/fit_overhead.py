"""autoaccum.fit against a hand-written correct loop, on a small GPT and a convolutional net; and its checkpoints.

Run it with `python tests/benchmarks/fit_overhead.py`.

Both train a model of their own from the same weights, on the same dataset read and shuffled sample by sample, in the
same micro-batches, with one clip, one update and one loss to log. After each update of fit the loop makes one of its
own within a callback, whose time is not fit's, so that the machine's moods meet both. The median of the paired ratios
is printed (aim: 1.03); then that of fit with a run folder, in turns with the former, to which is added what a
checkpoint takes as a share of the 100 updates between two of them (aim, with over without: 1.02).
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from measuring import load_model
from torch import nn
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.training.fit_events import CheckpointWritten, Started, Updated

MODELS = {"small GPT": "transformer", "convolutional net": "conv_net"}
TARGET_BATCH, MICRO_BATCH, CLIP_NORM = 16, 4, 1.0
WARM_UP, ROUNDS, CHECKPOINT_EVERY, UPDATES_BETWEEN = 3, 4, 10, 100


class Loop:
    """A careful hand-written loop around an ordinary DataLoader of micro-batches."""

    def __init__(self, model: nn.Module, dataset: Any, criterion: nn.Module) -> None:
        self.model, self.criterion = model, criterion
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.batches = self._endless(DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True))
        self.losses: list[float] = []

    def step(self) -> None:
        """One update of the full batch; all parts have as many samples, and each sample as much weight."""
        parts = TARGET_BATCH // MICRO_BATCH
        losses = []
        for _ in range(parts):
            inputs, targets = next(self.batches)
            loss = self.criterion(self.model(inputs), targets) / parts
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
    """Seconds of fit's updates and of the loop's, in turns; those of checkpoints apart from both."""

    loop: Loop
    mine: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    checkpoints: list[float] = field(default_factory=list)
    began: float = 0.0

    def __call__(self, event: Any) -> None:
        """Hear what fit does."""
        now = time.perf_counter()
        if isinstance(event, Updated):
            self.mine.append(now - self.began)
            self.loop.step()
            self.theirs.append(time.perf_counter() - now)
        elif isinstance(event, CheckpointWritten):
            self.checkpoints.append(event.seconds)
        elif not isinstance(event, Started):
            return
        self.began = time.perf_counter()

    @property
    def ratios(self) -> list[float]:
        """Fit's time over that of the loop's update that followed it."""
        return [mine / theirs for mine, theirs in zip(self.mine, self.theirs, strict=True)][WARM_UP:]


def measure(workload: Any, updates: int, run_dir: str | None = None) -> Pairs:
    """Train both, in turns."""
    torch.manual_seed(0)
    model = workload.model()
    pairs = Pairs(Loop(copy.deepcopy(model), workload.dataset, workload.criterion))
    autoaccum.fit(
        model,
        workload.dataset,
        target_batch=TARGET_BATCH,
        loss=workload.criterion,
        optimizer=torch.optim.AdamW(model.parameters()),
        clip_norm=CLIP_NORM,
        micro_batch=MICRO_BATCH,
        steps=updates + WARM_UP,
        run_dir=run_dir,
        checkpoint_every=CHECKPOINT_EVERY,
        progress=False,
        callbacks=[pairs],
    )
    return pairs


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="updates of each kind (default: 60)")
    updates = parser.parse_args().updates
    for name, module in MODELS.items():
        workload = load_model(module)
        bare: list[Pairs] = []
        kept: list[Pairs] = []
        for _ in range(ROUNDS):
            bare.append(measure(workload, updates // ROUNDS))
            with tempfile.TemporaryDirectory() as folder:
                kept.append(measure(workload, updates // ROUNDS, folder))
        report(name, bare, kept)


def report(name: str, bare: list[Pairs], kept: list[Pairs]) -> None:
    """Print what was measured with one model."""
    without, with_folder = (median([ratio for pairs in runs for ratio in pairs.ratios]) for runs in (bare, kept))
    update = median([seconds for pairs in kept for seconds in pairs.theirs[WARM_UP:]])
    checkpoint = median([seconds for pairs in kept for seconds in pairs.checkpoints])
    share = checkpoint / (UPDATES_BETWEEN * update)
    print(
        f"{name}: fit / loop {without:.3f}, {sum(len(pairs.ratios) for pairs in bare)} updates of {update * 1e3:.0f} ms"
    )
    print(
        f"{name}: with a run folder {with_folder:.3f}, and a checkpoint of {checkpoint * 1e3:.0f} ms every"
        f" {UPDATES_BETWEEN} updates: with / without {(with_folder + share) / without:.3f}, of which the checkpoint"
        f" {share:.3f}"
    )


if __name__ == "__main__":
    main()
