"""Computing in float64 what was written for float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.workload import nests

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


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


def widened(node: Any) -> Any:
    """A nest with its floating tensors in float64 (copies), all else as it is."""
    if isinstance(node, Tensor):
        return node.detach().to(torch.float64) if node.dtype in _NARROW else node
    children = nests.children(node)
    if nests.is_leaf(node) or children is None:
        return node
    return nests.rebuild(node, [widened(child) for _, child in children])


class _Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Exchanges a narrow `dtype` that an operator is asked for by float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
