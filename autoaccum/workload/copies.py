"""Deep copies of modules, which torch refuses of those that hold what a forward has computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_module(module: ModuleT, memo: dict[int, Any] | None = None) -> ModuleT:
    """A deep copy of `module`.

    What a forward has left in attributes (attention maps, an auxiliary loss, the weight of `weight_norm`) comes without
    its graph.

    Args:
        module: The module; what copying its other attributes raises comes through as it is.
        memo: What `copy.deepcopy` takes for known.
    """
    known = {} if memo is None else memo
    for held in module.modules():
        for value in vars(held).values():
            known.update({id(tensor): tensor.detach().clone() for tensor in _computed(value)})
    return copy.deepcopy(module, known)


def _computed(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.grad_fn is not None else []
    elif type(value) in (dict, list, tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _computed(entry)
