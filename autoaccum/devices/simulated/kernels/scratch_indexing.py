"""What gathering, scattering, sorting and scanning take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from autoaccum.devices.simulated.kernels.scratch_call import Call, Handler, accumulator_bytes, bytes_of, layout_copies
from autoaccum.devices.simulated.scratch.indexing import index_threshold
from autoaccum.devices.simulated.trace import Scratch

_BAG_OF_MAXIMA = 2


def _embedding_gradient(call: Call) -> list[Scratch]:
    grad, indices = call["grad_output"], call["indices"]
    least = 1 if call["scale_grad_by_freq"] else index_threshold(bag=False)
    return layout_copies(grad, indices) + _embedding(grad, indices, call["num_weights"], least)


def _embedding_bag_gradient(call: Call) -> list[Scratch]:
    if call["mode"] == _BAG_OF_MAXIMA:
        return []
    return _embedding(call["grad"], call["indices"], call["num_weights"], index_threshold(bag=True))


def _embedding(grad: Tensor, indices: Tensor, rows: int, least: int) -> list[Scratch]:
    sums = (indices.numel(), rows, grad.shape[-1], accumulator_bytes(grad.dtype), least)
    sorted_indices = (indices.numel(), rows, indices.dtype.itemsize, least)
    return [Scratch("embedding_indices", sorted_indices), Scratch("embedding_sums", sums)]


def _index_put(call: Call) -> list[Scratch]:
    """Only sums need their indices sorted; a mask's count of indices is not known."""
    indices = [index for index in call["indices"] if index is not None]
    accumulate = call["accumulate"] or torch.are_deterministic_algorithms_enabled()
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shapes = (reversed(index.shape) for index in indices)
    count = prod(map(max, zip_longest(*shapes, fillvalue=1)))
    return [*layout_copies(call["self"]), Scratch("index_put", (count,))]


def _sort(call: Call) -> list[Scratch]:
    tensor = call.first
    columns = tensor.shape[call["dim"]] if tensor.dim() else 0
    return [Scratch("sort", (tensor.numel() // columns, columns, tensor.dtype.itemsize))] if columns else []


def _scan(call: Call) -> list[Scratch]:
    tensor = call.first
    single = tensor.dim() and tensor.shape[call["dim"]] == tensor.numel()
    return [Scratch("scan", (tensor.numel(),))] if single else []


def _ctc_gradient(call: Call) -> list[Scratch]:
    return [Scratch("ctc_gradient", (bytes_of(call["log_alpha"]),))]


INDEXING_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "embedding_dense_backward": _embedding_gradient,
        **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_bag_gradient),
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
        "sort": _sort,
        **dict.fromkeys(("cumsum", "cumprod"), _scan),
        "_ctc_loss_backward": _ctc_gradient,
    }
)
