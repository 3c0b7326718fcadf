"""An update over several ranks equals that of one process with the whole batch: real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_updates import CASES, Net, changed, check_updates, ddp, pairs
from torch import nn

from autoaccum import Accumulator
from autoaccum.accumulation.ranks.group import join_ranks
from autoaccum.sources.batches import split_batch

SIZES = (0, *range(1980, 2060), 100_000)


def messages() -> list[list[bytes]]:
    ranks = join_ranks()
    return [ranks.gather(bytes([ranks.rank + 1]) * size) for size in SIZES]


def test_messages_of_any_length_arrive() -> None:
    """As they do around the length that one collective takes."""
    for seen in on_ranks(2, messages):
        assert seen == [[b"\1" * size, b"\2" * size] for size in SIZES]


@pytest.mark.parametrize(
    ("rank_samples", "clip", "wrap"),
    [([4, 3], None, changed), ([2, 5], 0.1, ddp), ([3, 0, 2, 2], 0.1, changed)],
    ids=["2 ranks", "2 ranks, ddp, clipped", "4 ranks, one without samples"],
)
def test_an_update_over_ranks_is_that_of_one_process(rank_samples: list[int], clip: float | None, wrap: Any) -> None:
    check_updates(rank_samples, [(case, wrap) for case in CASES], clip_norm=clip)


def step_with(rank_samples: list[int], form: type) -> tuple[float, int, tuple[int, ...], float | None]:
    """Step with this rank's samples of a batch, which may be an empty batch; alone with all of it."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, clip_norm=1.0)
    batch = form(pairs(sum(rank_samples)))
    result = accumulator.step(split_batch(batch, rank_samples)[dist.get_rank()] if dist.is_initialized() else batch)
    return result.loss, result.samples, result.micro_batches, result.grad_norm


@pytest.mark.parametrize("form", [tuple, list])
def test_a_rank_may_have_an_empty_batch(form: type) -> None:
    loss, samples, _, norm = step_with([3, 0], form)
    ranks = on_ranks(2, step_with, [3, 0], form, timeout=30)
    for rank, parts in zip(ranks, [(2, 1), ()], strict=True):
        assert rank == (pytest.approx(loss, rel=1e-12), samples, parts, pytest.approx(norm, rel=1e-12))
