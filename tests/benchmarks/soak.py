"""Runs of `fit` that are killed at random moments and resumed: do they end with the same weights, bit for bit?

    python tests/benchmarks/soak.py --kills 100

A run is a fork of this process, which has imported PyTorch and computed nothing: so a start takes no time, and a kill
may strike anywhere, also before the first checkpoint and within one. Of each run that was killed on its way the final
weights, optimizer state and log are compared with those of one that was never stopped. Exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer of a process imports it, which takes longer than a run.
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

import autoaccum

SAMPLES = 150


class Noisy(Dataset[Any]):
    """Samples that are augmented at random, from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((6,), index / SAMPLES) + torch.randn(6) * 0.1 + random.random() + np.random.rand()
        return x.float(), torch.tensor(index % 3)


def train(folder: Path, updates: int, workers: int) -> None:
    """Run to the end, and leave a digest of weights, state, and the figures of the log in the folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = autoaccum.fit(
        nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3)),
        Noisy(),
        target_batch=16,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=updates + 1),
        micro_batch=5,
        steps=updates,
        clip_norm=1.0,
        run_dir=folder,
        checkpoint_every=4,
        workers=workers,
        progress=False,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [(line["update"], line["loss"], line["grad_norm"]) for line in lines]
    leaves = tree_leaves([result.model.state_dict(), result.optimizer.state_dict()])
    state = repr([figures, *(one.tolist() if isinstance(one, Tensor) else one for one in leaves)])
    (folder / "digest").write_text(hashlib.sha256(state.encode()).hexdigest())


def run_through(folder: Path, updates: int, workers: int, kill_after: list[float]) -> int:
    """Start runs in `folder` until one ends by itself, and kill the first after these seconds; how many were killed.

    Raises:
        RuntimeError: A run failed by itself.
    """
    kills = 0
    while True:
        run = multiprocessing.get_context("fork").Process(target=train, args=(folder, updates, workers))
        run.start()
        run.join(kill_after.pop() if kill_after else None)
        if run.exitcode is None:
            run.kill()
            run.join()
            kills += 1
        elif run.exitcode:
            raise RuntimeError(f"a run in {folder} failed by itself after {kills} kills")
        else:
            return kills


def soak(kills: int, updates: int, workers: int, draw: random.Random) -> int:
    """Kill runs `kills` times and resume them; how many ended otherwise than one that was never stopped."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch) / "reference"
        run_through(reference, updates, workers, [])
        whole_seconds = time.monotonic() - began
        made = runs = different = 0
        while made < kills:
            folder = Path(scratch) / f"run{runs}"
            limits = [draw.random() * whole_seconds for _ in range(min(kills - made, 8))]
            made += run_through(folder, updates, workers, limits)
            runs += 1
            different += (folder / "digest").read_text() != (reference / "digest").read_text()
    print(
        f"{made} kills in {runs} runs of {updates} updates, {workers} workers:"
        f" {different} ended otherwise than one never stopped"
    )
    print(f"{time.monotonic() - began:.0f} s, one whole run takes {whole_seconds:.1f} s", file=sys.stderr)
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    return 1 if sum(soak(asked.kills, asked.updates, workers, draw) for workers in asked.workers) else 0


if __name__ == "__main__":
    sys.exit(main())
