"""Computing in float64 what was written for float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoaccum.workload import nests

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WIDE = {**dict.fromkeys(_NARROW, torch.float64), torch.complex64: torch.complex128}
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@contextmanager
def in_double() -> Iterator[None]:
    """Everything computed within is in float64, what the user's code converts to a narrower dtype by name included.

    Models raise their logits to float32 (`.float()`) or normalise in it whatever they are given: kept, that would be
    rounding of 1e-7 in a comparison to 1e-10.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def double_module(module: nn.Module) -> nn.Module:
    """`module` in float64 (complex128 of what is complex), and what it keeps beside its buffers: masks, tables."""
    module = module.double()
    for parameter in module.parameters():
        if parameter.dtype == torch.complex64:
            parameter.data = parameter.data.to(torch.complex128)
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.dtype == torch.complex64:
                inner._buffers[name] = buffer.to(torch.complex128)
        for name, value in list(vars(inner).items()):
            if isinstance(value, Tensor):
                setattr(inner, name, widened(value))
    return module


def widened(node: Any) -> Any:
    """A nest with its floating tensors in float64 and its complex ones in complex128 (copies), all else as it is."""
    if isinstance(node, Tensor):
        wide = _WIDE.get(node.dtype)
        return node if wide is None else node.detach().to(wide)
    children = nests.children(node)
    if nests.is_leaf(node) or children is None:
        return node
    return nests.rebuild(node, [widened(child) for _, child in children])


class _Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Exchanges a narrow `dtype` that an operator is asked for by float64, and narrow tensors that meet wide ones.

    Those are what a loss names: class weights, a table, a mask.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _UNSCALE:
            return _unscale(*args)
        if kwargs.get("dtype") in _WIDE:
            kwargs = {**kwargs, "dtype": _WIDE[kwargs["dtype"]]}
        given = {tensor.dtype for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        if not func._schema.is_mutable and not given.isdisjoint(_WIDE) and not given.isdisjoint(_WIDE.values()):
            args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
        return func(*args, **kwargs)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _unscale(gradients: Sequence[Tensor], found_infinite: Tensor, inverse_scale: Tensor) -> None:
    """What a GradScaler does to gradients: torch's own takes nothing but float32 for its scalars."""
    for gradient in gradients:
        if not bool(gradient.isfinite().all()):
            found_infinite.fill_(1)
        gradient.mul_(inverse_scale)
