"""A trial of one rank takes the memory in which several ranks sum their gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.ranks.group import join_ranks
from autoaccum.accumulation.ranks.replicated import sum_gradients, take_room


class Taken(TorchDispatchMode):
    """Keeps the sizes of floating tensors that are made, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if str(func) in ("aten.empty.memory_format", "aten.empty_like.default") and made.is_floating_point():
            self.sizes.append(made.numel() * made.itemsize)
        return made


def rooms() -> list[tuple[list[int], list[int]]]:
    """Return what the sum takes and what a trial takes: in float32, in bfloat16 with buffers and without."""
    found = []
    for dtype, in_buffers in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(3000, 3000, bias=False)).to(dtype)
        parameters = list(model.parameters())
        buffers = GradientBuffers(parameters, in_fp32=True) if in_buffers else None
        with buffers or nullcontext():
            torch.autograd.backward(torch.stack([parameter.sum() for parameter in parameters]).sum())
        with Taken() as by_ranks:
            sum_gradients(join_ranks(), parameters, buffers)
        with Taken() as by_trial:
            take_room(parameters, in_fp32=in_buffers, parts=2)
        found.append((by_ranks.sizes, by_trial.sizes))
    return found


def test_the_room_of_a_trial_is_that_of_the_sum() -> None:
    small, large = 4 * (8 * 8 + 8 + 8 * 5 + 5), 4 * 3000 * 3000
    for found in on_ranks(2, rooms):
        assert [by_ranks for by_ranks, _ in found] == [[small], [small], [large]]
        assert all(by_trial == by_ranks for by_ranks, by_trial in found)


def test_a_trial_of_one_part_takes_the_buffers_that_it_would_have_among_ranks() -> None:
    parameters = [nn.Parameter(torch.zeros(10, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))]
    for parts, in_fp32, expected in ((1, True, [20, 52]), (2, True, [52]), (1, False, [52])):
        with Taken() as taken:
            take_room(parameters, in_fp32=in_fp32, parts=parts)
        assert taken.sizes == expected
