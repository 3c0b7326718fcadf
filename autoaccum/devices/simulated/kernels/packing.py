"""Sequences packed on a card: lengths lie on the CPU and have values, so the sizes are known."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Replace `_pack_padded_sequence`, whose sizes FakeTensorMode cannot tell."""
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("_pack_padded_sequence", _pack, key)


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`_pack_padded_sequence` in `aten/src/ATen/native/PackedSequence.cpp`."""
    counts = [int(length) for length in lengths.tolist()]
    padded = input.transpose(0, 1) if batch_first else input
    batch_sizes = [sum(length > step for length in counts) for step in range(max(counts))]
    data: Tensor = _Pack.apply(padded, batch_sizes)  # type: ignore[no-untyped-call]
    return data, torch.tensor(batch_sizes)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, batch_sizes: list[int]) -> Tensor:
        ctx.shape = padded.shape
        rows = [padded[step, :size] for step, size in enumerate(batch_sizes)]
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape), None
