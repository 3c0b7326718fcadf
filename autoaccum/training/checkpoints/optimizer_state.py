"""Where an optimizer stands, and the parameters that nothing else knows: taken, compared, put back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.planned import unwrapped
from autoaccum.training.checkpoints.module_state import form, named_slots

_UNKNOWN = "?"


def capture_optimizer(optimizer: Optimizer, model: nn.Module, companions: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Its state, the names of its parameters, and the values of those that are in no module (learnt loss weights)."""
    names = group_names(optimizer, model, companions)
    return {
        "class": type(optimizer).__qualname__,
        "groups": names,
        "alone": dict(_alone(optimizer, names)),
        "state": optimizer.state_dict(),
    }


def optimizer_differences(
    kept: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, companions: Mapping[str, nn.Module]
) -> list[str]:
    """What keeps the groups from being put back, as parts of a sentence."""
    names = group_names(optimizer, model, companions)
    found = _group_differences(kept["groups"], names)
    if not found:
        for place, parameter in _alone(optimizer, names):
            their, our = form(kept["alone"][place]), form(parameter)
            found += [] if their == our else [f"parameter {place} of the optimizer is {their} there, {our} here"]
    return found


def restore_alone(
    kept: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, companions: Mapping[str, nn.Module]
) -> None:
    """Put the parameters that are in no module back, in place; `optimizer_differences` found none."""
    for place, parameter in _alone(optimizer, group_names(optimizer, model, companions)):
        with torch.no_grad():
            parameter.copy_(kept["alone"][place])


def group_names(optimizer: Optimizer, model: nn.Module, companions: Mapping[str, nn.Module]) -> list[list[str]]:
    """The parameters of each group; `?` is one of neither the model nor a companion."""
    names: dict[int, str] = {}
    for prefix, root in (("", unwrapped(model)), *((f"{name}.", module) for name, module in companions.items())):
        for slot in named_slots(root):
            names.setdefault(id(slot.value), f"{prefix}{slot.name}")
    return [[names.get(id(parameter), _UNKNOWN) for parameter in group["params"]] for group in optimizer.param_groups]


def restore_optimizer(state: dict[str, Any], optimizer: Optimizer) -> None:
    """PyTorch rounds state to the parameter's dtype, makes new tensors of rates that are tensors, and reorders keys."""
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for old, group in zip(before, optimizer.param_groups, strict=True):
        loaded = dict(group)
        group.clear()
        group.update({key: _as_it_was(old.get(key), loaded[key]) for key in (*old, *loaded) if key in loaded})
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(_numbers(state["param_groups"]), parameters, strict=True):
        if number in state["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state["state"][number])


def _alone(optimizer: Optimizer, names: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    """By group and place: `0.2`."""
    for number, (group, known) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        for place, (parameter, name) in enumerate(zip(group["params"], known, strict=True)):
            if name == _UNKNOWN:
                yield f"{number}.{place}", parameter


def _group_differences(theirs: list[list[str]], ours: list[list[str]]) -> list[str]:
    if len(theirs) != len(ours):
        return [f"the optimizer has {len(theirs)} parameter groups there, {len(ours)} here"]
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if len(their) != len(our):
            return [f"parameter group {number} has {len(their)} parameters there, {len(our)} here"]
        for first, second in zip(their, our, strict=True):
            if first != second:
                return [f"parameter group {number} has {first} there where it has {second} here"]
    return []


def _as_it_was(old: Any, loaded: Any) -> Any:
    return old.copy_(loaded) if isinstance(old, Tensor) and isinstance(loaded, Tensor) else loaded


def _numbers(groups: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(group["params"] for group in groups)


def _as_saved(loaded: Any, saved: Any) -> Any:
    """`saved`, with its tensors where PyTorch put them."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    return saved
