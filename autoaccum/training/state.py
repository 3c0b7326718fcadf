"""What a training has learnt and where its optimizer stands: taken for a checkpoint, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import UsageError, first_line
from autoaccum.training.module_state import capture_module, module_differences, named_slots, restore_module

_HINT = "train what it is of, or give another folder"
_TOLD = 3
"""Differences that a message names."""


def capture_training(
    model: nn.Module,
    criterion: nn.Module | None,
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
) -> dict[str, Any]:
    """What changes as `model` is trained, but for random states and the place in the data.

    Tensors are those that are trained, no copies: write them before the next update.

    Args:
        model: The model, also one that is compiled or wrapped for several cards.
        criterion: The loss where it is a module; it may learn, too.
        optimizer: The optimizer of both.
        scheduler: Something with `state_dict` and `load_state_dict`.
        scaler: The scaler.
    """
    return {
        "model": capture_module(unwrapped(model)),
        "criterion": None if criterion is None else capture_module(criterion),
        "optimizer": {
            "class": type(optimizer).__qualname__,
            "groups": _group_names(model, criterion, optimizer),
            "state": optimizer.state_dict(),
        },
        "scheduler": None if scheduler is None else {"class": _class_of(scheduler), "state": scheduler.state_dict()},
        "scaler": scaler.state_dict() if scaler is not None and scaler.is_enabled() else None,
    }


def restore_training(
    state: Mapping[str, Any],
    model: nn.Module,
    criterion: nn.Module | None,
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
) -> None:
    """Put back what `capture_training` took, bit for bit; modes, `requires_grad` and learning rates included.

    Tensors of `state` may become the optimizer's own.

    Raises:
        UsageError: It is of another training, whose names, shapes, dtypes or classes differ: nothing is changed. Or
            an object of the user's own cannot take its state back.
    """
    found = _differences(state, model, criterion, optimizer, scheduler, scaler)
    if found:
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise UsageError(f"the checkpoint is of another training: {'; '.join(found[:_TOLD])}{more}", hint=_HINT)
    restore_module(state["model"], unwrapped(model))
    if criterion is not None:
        restore_module(state["criterion"], criterion)
    _attempt("the optimizer", lambda: _restore_optimizer(state["optimizer"]["state"], optimizer))
    if scheduler is not None:
        _attempt("the scheduler", lambda: scheduler.load_state_dict(state["scheduler"]["state"]))
    if scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])


def _differences(
    state: Mapping[str, Any],
    model: nn.Module,
    criterion: nn.Module | None,
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
) -> list[str]:
    kept, learnt = state["optimizer"], state["criterion"]
    found = module_differences(state["model"], unwrapped(model), "the model")
    if learnt is not None and criterion is not None:
        found += module_differences(learnt, criterion, "the criterion")
    found += _unlike("the criterion", _presence(learnt is not None), _presence(criterion is not None))
    found += _unlike("the optimizer", kept["class"], type(optimizer).__qualname__)
    found += _group_differences(kept["groups"], _group_names(model, criterion, optimizer))
    theirs = None if state["scheduler"] is None else state["scheduler"]["class"]
    found += _unlike("the scheduler", theirs, None if scheduler is None else _class_of(scheduler))
    return found + _unlike(
        "the scaler", _presence(state["scaler"] is not None), _presence(scaler is not None and scaler.is_enabled())
    )


def _unlike(what: str, theirs: Any, ours: Any) -> list[str]:
    return [] if theirs == ours else [f"{what} is {theirs or 'none'} there, {ours or 'none'} here"]


def _presence(is_there: bool) -> str:
    return "in use" if is_there else "none"


def _class_of(scheduler: Any) -> str:
    """With those it is made of: `SequentialLR(LinearLR, CosineAnnealingLR)`."""
    parts = getattr(scheduler, "_schedulers", None)
    inside = f"({', '.join(_class_of(part) for part in parts)})" if isinstance(parts, list | tuple) else ""
    return f"{type(scheduler).__qualname__}{inside}"


def _group_names(model: nn.Module, criterion: nn.Module | None, optimizer: Optimizer) -> list[list[str]]:
    """The parameters of each group; `?` is one of neither the model nor the criterion."""
    names = {} if criterion is None else {id(slot.value): f"criterion.{slot.name}" for slot in named_slots(criterion)}
    names |= {id(slot.value): slot.name for slot in reversed(list(named_slots(unwrapped(model))))}
    return [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]


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


def _restore_optimizer(state: dict[str, Any], optimizer: Optimizer) -> None:
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


def _attempt(what: str, restore: Callable[[], Any]) -> None:
    try:
        restore()
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UsageError(f"{what} cannot take its state back ({reason})", hint=_HINT) from error
