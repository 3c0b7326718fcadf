"""Values of all tensors on the simulated card: each operator of the step also runs for real, on the CPU.

They are kept with the storages of fake tensors, as known values are (`known_values`). Operators that only CUDA has run
as what they compute; what the CPU cannot compute stays unknown, and so does what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autoaccum.errors import first_line
from autoaccum.simulation.tracing.known_values import (
    find_tensors,
    forget_values,
    has_values,
    run_on_cpu,
    set_values,
    values_of,
    written_arguments,
)

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class CpuValues:
    """Computes the values of one simulation.

    Attributes:
        lost: A sentence on the first operator that the CPU could not run; empty if there is none.
        numbers: The state of the card's random generator, which is not the host's.
    """

    def __init__(self) -> None:
        self.lost = ""
        self.numbers = torch.Generator().get_state()

    def keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Run an operator, and keep what it returns for `out`; what it writes goes to the values of its arguments."""
        if torch.Tag.inplace_view in func.tags and func is not _aten.resize_.default:
            return  # Another view of the same memory, with which the values are kept.
        made = self.compute(func, args, kwargs)
        if made is None:
            for written in _written(func, args, kwargs):
                if not isinstance(written, nn.Parameter):  # A weight keeps its value, as if it had not been updated.
                    forget_values(written)
            return
        with _disable_current_modes(), torch.no_grad():
            for one, values in zip_longest(tree_leaves(out), tree_leaves(made)):
                if isinstance(one, FakeTensor) and not has_values(one):
                    set_values(one, torch.zeros(()) if values is None else values, limited=False)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator, `()` in place of None; None if the CPU cannot compute it."""
        if not all(map(has_values, find_tensors((*args, *kwargs.values())))):
            return None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng((), enabled=is_random):
            try:
                if is_random:
                    torch.set_rng_state(self.numbers)
                made = _run(func, args, kwargs)
                if is_random:
                    self.numbers = torch.get_rng_state()
            except Exception as error:
                self.lost = self.lost or f"the CPU cannot run {func} ({first_line(error).partition('. ')[0]})"
                return None
        return () if made is None else made


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if func in _EQUIVALENTS:
        return run_on_cpu(_EQUIVALENTS[func], args, kwargs)
    try:
        made = run_on_cpu(func, args, kwargs)
    except RuntimeError:
        tensors = list(find_tensors((*args, *kwargs.values())))
        if written_arguments(func) or not any(one.dtype in _HALVES for one in tensors):
            raise
        read = [tree_map(_in_fp32, each) for each in (list(args), dict(kwargs))]
        made = run_on_cpu(func, *read)  # No kernel of the CPU's for half precision.
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        made.zero_()  # What memory holds by chance would differ from trace to trace.
    return made


def _in_fp32(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in _HALVES:
        return torch.float32 if value in _HALVES else value
    values = values_of(value)
    return None if values is None else values.float()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[FakeTensor]:
    targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written_arguments(func)]
    return (one for one in find_tensors(targets) if isinstance(one, FakeTensor))


def _named(operator: Any, compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function that gives `compute` the arguments of `operator` by name, with defaults for those left out."""
    arguments = operator._schema.arguments

    def run(*args: Any, **kwargs: Any) -> Any:
        given = zip((each.name for each in arguments), args, strict=False)
        return compute({each.name: each.default_value for each in arguments} | dict(given) | kwargs)

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
    grad, *inputs = (each.float() for each in list(named.values())[:4])
    heads = inputs[0].shape[1] // inputs[1].shape[1]
    query, (key, value) = inputs[0], (each.repeat_interleave(heads, 1) for each in inputs[1:])
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
    of_key, of_value = (torch.unflatten(each, 1, (-1, heads)).sum(2) for each in of_both)
    of_mask = () if mask is None else (inner.sum_to_size(mask.shape),)
    return ((inner @ key) * scale, of_key, of_value, *of_mask)


def _batch_norm_backward(named: dict[str, Any]) -> Any:
    x, grad, weight, *statistics, eps, _ = named.values()
    return _aten.native_batch_norm_backward.default(grad, x, weight, *statistics, True, eps, [True, True, True])


_ATTENTION = [f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")]
_BY_NAME = dict.fromkeys(_ATTENTION, _attend) | {f"{name}_backward": _attend_backward for name in _ATTENTION}
_BY_NAME["cudnn_batch_norm_backward"] = _batch_norm_backward
_EQUIVALENTS: Mapping[Any, Callable[..., Any]] = {
    **{
        operator: _named(operator, compute)
        for operator, compute in ((getattr(_aten, name).default, compute) for name, compute in _BY_NAME.items())
    },
    _aten.cudnn_batch_norm.default: _aten.native_batch_norm.default,
}
"""Operators that only CUDA has, and what the CPU computes for them. Outputs that are left out are zero: only the
backward of the same operator reads them, and does not here."""
