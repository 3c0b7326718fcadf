"""Tensors and modules that are divided among ranks: DTensors, and what FSDP2 (`fully_shard`) makes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, of which each rank holds a part."""
    return type(tensor).__name__ == "DTensor"


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether a parameter of `model` is sharded."""
    return any(map(is_sharded, model.parameters()))


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank holds: the tensor itself, unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # It is at hand then, and needs no operator, which takes DTensor 0.2 ms.
        return cast(Tensor, cast(Any, tensor).to_local())


def fsdp2_modules(model: nn.Module) -> list[Any]:
    """Return the modules of `model` on which `fully_shard` was called."""
    return [module for module in model.modules() if _is_fsdp2(type(module))]


def param_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters of a module on which `fully_shard` was called."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def model_class(model: nn.Module) -> type:
    """Return the class of `model` as its author wrote it: `Net`, where `fully_shard` has made `FSDPNet` of it."""
    return next(kind for kind in type(model).__mro__ if not _is_fsdp2(kind))


def reshard(model: nn.Module) -> None:
    """Let go of the gathered parameters of `model`, which a forward without backward leaves."""
    for module in fsdp2_modules(model):
        module.reshard()


def move_own(module: nn.Module, device: torch.device, stays: Callable[[Tensor], bool]) -> None:
    """Move the own parameters and buffers of `module` to `device`, without the parameters that stay."""
    kept = {name: one for name, one in module._parameters.items() if one is not None and stays(one)}
    own = (*(one for name, one in module._parameters.items() if name not in kept), *module._buffers.values())
    if all(one is None or one.device == device for one in own):
        return  # `_apply` of FSDP2 would assert that shards are where they were.
    module._parameters.update(dict.fromkeys(kept))
    try:
        module._apply(lambda tensor: tensor if tensor.device == device else tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    finally:
        module._parameters.update(kept)


def _is_fsdp2(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)
