"""The tensors of a module, those it does not show in its `state_dict` included: taken, compared, put back in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.backpropagation import model_device

_COMPILED = "_orig_mod."
"""What torch.compile puts into the names below a module that was compiled alone."""

_TOLD = 3


@dataclass(frozen=True)
class Slot:
    """A place in a module where a tensor is, or may be.

    Attributes:
        name: As in `state_dict`.
        module: Where it is.
        key: Its name there.
        value: The tensor; None where there is none.
        is_parameter: Not a buffer.
        is_persistent: Whether `state_dict` shows it.
    """

    name: str
    module: nn.Module
    key: str
    value: Tensor | None
    is_parameter: bool
    is_persistent: bool


def named_slots(root: nn.Module) -> Iterator[Slot]:
    """Every place of parameters and buffers; those of modules and tensors that occur twice, twice."""
    for path, module in _named_modules(root):
        dot = "." if path else ""
        for key, parameter in module._parameters.items():
            yield Slot(f"{path}{dot}{key}", module, key, parameter, is_parameter=True, is_persistent=True)
        for key, buffer in module._buffers.items():
            shown = key not in module._non_persistent_buffers_set
            yield Slot(f"{path}{dot}{key}", module, key, buffer, is_parameter=False, is_persistent=shown)


def capture_module(root: nn.Module) -> dict[str, Any]:
    """The tensors of `root`, no copies; hooks on its `state_dict` are not asked.

    `state` is what `load_state_dict` takes, `buffers` are those that are not in it.
    """
    slots = [slot for slot in named_slots(root) if slot.value is not None]
    return {
        "state": {slot.name: slot.value for slot in slots if slot.is_persistent},
        "buffers": {slot.name: slot.value for slot in slots if not slot.is_persistent},
        "extra": {path: module.get_extra_state() for path, module in _named_modules(root) if _has_extra(module)},
        "tied": _tied(slots),
        "frozen": [slot.name for slot in slots if slot.value is not None and not slot.value.requires_grad],
        "evaluating": [path for path, module in _named_modules(root) if not module.training],
    }


def module_differences(state: Mapping[str, Any], root: nn.Module, what: str) -> list[str]:
    """What keeps `state` from being put back, as parts of a sentence.

    Buffers outside `state_dict` may differ: many are caches that are made, or grow, as a model runs.
    """
    slots = {slot.name: slot for slot in named_slots(root)}
    here = {name: slot.value for name, slot in slots.items() if slot.is_persistent}
    there = state["state"]
    lost = [name for name in there if here.get(name) is None and (name not in slots or slots[name].is_parameter)]
    new = [name for name, value in here.items() if value is not None and name not in there]
    found = [f"{what} has no {_listed(lost)}"] if lost else []
    found += [f"{what} has {_listed(new)} as well"] if new else []
    for name, tensor in there.items():
        value = here.get(name)
        if value is not None and form(value) != form(tensor):
            found.append(f"{name} is {form(tensor)} there, {form(value)} here")
    found += _tie_differences(state["tied"], _tied([slot for slot in slots.values() if slot.value is not None]))
    extra = {path for path, module in _named_modules(root) if _has_extra(module)}
    odd = sorted(extra ^ state["extra"].keys())
    return found + ([f"{what} keeps extra state of {_listed(odd)} in one of them only"] if odd else [])


def restore_module(state: Mapping[str, Any], root: nn.Module) -> None:
    """Put back what `capture_module` took, in place; `module_differences` found none."""
    device = model_device(root)
    slots = {slot.name: slot for slot in named_slots(root)}
    modules = dict(_named_modules(root))
    for name, tensor in {**state["state"], **state["buffers"]}.items():
        if name in slots:
            _put(slots[name], tensor, device)
        elif (module := modules.get(name.rpartition(".")[0])) is not None:
            module.register_buffer(name.rpartition(".")[2], tensor.to(device), persistent=False)
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for slot in slots.values():
        if slot.is_parameter and slot.value is not None:
            slot.value.requires_grad_(slot.name not in frozen)
    for path, module in modules.items():
        module.training = path not in evaluating
        if path in state["extra"]:
            module.set_extra_state(state["extra"][path])


def _put(slot: Slot, tensor: Tensor, device: torch.device) -> None:
    value = slot.value
    if value is None or (not slot.is_parameter and form(value) != form(tensor)):
        slot.module._buffers[slot.key] = tensor.to(device if value is None else value.device)
    elif value.layout is torch.strided and _overlaps(value):
        value.data = tensor.to(value.device)  # Nothing can be written into a tensor whose entries share their place.
    else:
        with torch.no_grad():
            value.copy_(tensor)


def _named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules(remove_duplicate=False):
        yield f"{path}.".replace(_COMPILED, "").removesuffix("."), module


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _tied(slots: list[Slot]) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {slot.name: first.setdefault(id(slot.value), slot.name) for slot in slots if slot.is_persistent}
    return {name: other for name, other in names.items() if name != other}


def _tie_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    return [
        f"{name} is {_tie(theirs.get(name))} there, {_tie(ours.get(name))} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _tie(other: str | None) -> str:
    return "a tensor of its own" if other is None else f"tied to {other}"


def form(tensor: Tensor) -> str:
    """Its dtype and shape: `float32 (2, 3)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more
