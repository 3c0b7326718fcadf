"""Operators that only CUDA has, as the CPU computes them.

Outputs that are left out are zero: only the backward of the same operator reads them, and does not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten


def _by_name(operator: Any, compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function that gives `compute` the arguments of `operator` by name, with defaults for those left out."""
    arguments = operator._schema.arguments

    def run(*args: Any, **kwargs: Any) -> Any:
        given = zip((argument.name for argument in arguments), args, strict=False)
        return compute({argument.name: argument.default_value for argument in arguments} | dict(given) | kwargs)

    return run


def _attend(named: dict[str, Any]) -> tuple[Tensor]:
    query, key, value = named["query"], named["key"], named["value"]
    mask = named.get("attn_bias")
    mask = None if mask is None else mask[..., : key.shape[-2]]  # Its rows are padded.
    attention, grouped = nn.functional.scaled_dot_product_attention, query.shape[1] != key.shape[1]
    options = named["dropout_p"], named["is_causal"]
    return (attention(query, key, value, mask, *options, scale=named["scale"], enable_gqa=grouped),)


def _attend_backward(named: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and mask, as without dropout."""
    grad, *inputs = (tensor.float() for tensor in list(named.values())[:4])
    heads = inputs[0].shape[1] // inputs[1].shape[1]
    query, (key, value) = inputs[0], (tensor.repeat_interleave(heads, 1) for tensor in inputs[1:])
    scale = query.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
    scores = query @ key.mT * scale
    if named["is_causal"]:
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    mask = named.get("attn_bias")
    if mask is not None:
        mask = mask[..., : key.shape[-2]]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).nan_to_num()
    products = grad @ value.mT
    inner = weights * (products - (weights * products).sum(-1, keepdim=True))
    of_both = [(inner.mT @ query) * scale, weights.mT @ grad]
    of_key, of_value = (torch.unflatten(gradient, 1, (-1, heads)).sum(2) for gradient in of_both)
    of_mask = () if mask is None else (inner.sum_to_size(mask.shape),)
    return ((inner @ key) * scale, of_key, of_value, *of_mask)


def _batch_norm_backward(named: dict[str, Any]) -> Any:
    x, grad, weight, *statistics, eps, _ = named.values()
    return _aten.native_batch_norm_backward.default(grad, x, weight, *statistics, True, eps, [True, True, True])


_ATTENTION = [f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")]
_NAMED = {
    **dict.fromkeys(_ATTENTION, _attend),
    **{f"{name}_backward": _attend_backward for name in _ATTENTION},
    "cudnn_batch_norm_backward": _batch_norm_backward,
}
CPU_KERNELS: Mapping[Any, Callable[..., Any]] = {
    _aten.cudnn_batch_norm.default: _aten.native_batch_norm.default,
    **{(op := getattr(_aten, name).default): _by_name(op, compute) for name, compute in _NAMED.items()},
}
