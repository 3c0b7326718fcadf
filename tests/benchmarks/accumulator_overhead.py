"""Accumulator.step against a hand-written correct loop on a small GPT.

Run it with `python tests/benchmarks/accumulator_overhead.py`.

Both train a model of their own from the same weights with the same tokens, a quarter of which is padding; their
updates alternate, so that the machine's moods meet both. The ratio of the medians is printed. The aim is 1.02.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.accumulation.accumulator import Accumulator

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 512, 64, 128, 4, 4
BATCH, MICRO_BATCH = 16, 4
CLIP_NORM = 1.0


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (samples, tokens, width)."""
        samples, tokens, _ = x.shape
        split = self.qkv(self.norm1(x)).view(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return torch.as_tensor(x + self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """Token ids of shape (samples, tokens) to logits of shape (samples, vocabulary, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, class dimension second as cross_entropy wants it."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return torch.as_tensor(self.head(self.norm(self.blocks(x))).transpose(1, 2))


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids, and the next ones with padding ignored."""
    ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    targets = ids[:, 1:].clone()
    lengths = torch.randint(CONTEXT // 2, CONTEXT + 1, (BATCH, 1), generator=generator)
    targets[torch.arange(CONTEXT) >= lengths] = -100
    return ids[:, :-1], targets


def loop_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """What a careful person writes: token weights, one clip, one update, the full batch's loss."""
    ids, targets = batch
    tokens = int((targets != -100).sum())
    losses = []
    for start in range(0, BATCH, MICRO_BATCH):
        part = targets[start : start + MICRO_BATCH]
        logits = model(ids[start : start + MICRO_BATCH])
        loss = functional.cross_entropy(logits, part, reduction="sum", ignore_index=-100) / tokens
        del logits
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    total = float(torch.stack(losses).sum())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def seconds_of(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=60, help="updates of each (default: 60)")
    updates = parser.parse_args().updates
    torch.manual_seed(0)
    model = Gpt()
    other = copy.deepcopy(model)
    optimizer, their_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=MICRO_BATCH, clip_norm=CLIP_NORM)
    generator = torch.Generator().manual_seed(1)
    mine: list[float] = []
    theirs: list[float] = []
    for update in range(updates + 3):
        batch = make_batch(generator)
        pairs: list[tuple[list[float], Callable[[], object]]] = [
            (mine, partial(accumulator.step, batch)),
            (theirs, partial(loop_step, other, their_optimizer, batch)),
        ]
        for times, run in pairs if update % 2 else reversed(pairs):
            times.append(seconds_of(run))
    mine, theirs = mine[3:], theirs[3:]
    medians = statistics.median(mine), statistics.median(theirs)
    paired = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    print(f"Accumulator.step {medians[0] * 1e3:.1f} ms, loop {medians[1] * 1e3:.1f} ms, {updates} updates each")
    print(f"ratio of medians {medians[0] / medians[1]:.3f}, median of paired ratios {paired:.3f}")


if __name__ == "__main__":
    main()
