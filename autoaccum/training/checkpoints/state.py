"""What a training has learnt and where its optimizer stands: taken for a checkpoint, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import UsageError, first_line
from autoaccum.training.checkpoints.companions import CRITERION
from autoaccum.training.checkpoints.module_state import capture_module, module_differences, restore_module
from autoaccum.training.checkpoints.optimizer_state import (
    capture_optimizer,
    optimizer_differences,
    restore_alone,
    restore_optimizer,
)
from autoaccum.training.checkpoints.settings import Settings

_HINT = "train what it is of, or give another folder"
_TOLD = 3
"""Differences that a message names."""


def capture_training(
    model: nn.Module,
    companions: Mapping[str, nn.Module],
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """What changes as `model` is trained, but for random states and the place in the data.

    Tensors are those that are trained, no copies: write them before the next update.

    Args:
        model: The model, also one that is compiled or wrapped for several cards.
        companions: Modules beside it that may learn or count, too, by name (`find_companions`).
        optimizer: The optimizer of all.
        scheduler: Something with `state_dict` and `load_state_dict`.
        scaler: The scaler.
        settings: What optimizer and scheduler were set to before any update; None: what is kept goes on.

    Raises:
        UsageError: The scheduler keeps no state.
    """
    return {
        "model": capture_module(unwrapped(model)),
        "companions": {name: capture_module(module) for name, module in companions.items()},
        "optimizer": capture_optimizer(optimizer, model, companions),
        "scheduler": None if scheduler is None else {"class": _class_of(scheduler), "state": _state_of(scheduler)},
        "scaler": scaler.state_dict() if scaler is not None and scaler.is_enabled() else None,
        "settings": None if settings is None else settings.state(),
    }


def restore_training(
    state: Mapping[str, Any],
    model: nn.Module,
    companions: Mapping[str, nn.Module],
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
    settings: Settings | None = None,
) -> list[str]:
    """Put back what `capture_training` took, bit for bit; modes, `requires_grad` and learning rates included.

    Where `settings` are given, those that were set anew since win (`Settings.merge`). Tensors of `state` may become
    the optimizer's own.

    Raises:
        UsageError: It is of another training, whose names, shapes, dtypes or classes differ: nothing is changed. Or
            an object of the user's own cannot take its state back.

    Returns:
        What is not as it was, as sentences.
    """
    found = _differences(state, model, companions, optimizer, scheduler, scaler)
    if found:
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise UsageError(f"the checkpoint is of another training: {'; '.join(found[:_TOLD])}{more}", hint=_HINT)
    restore_module(state["model"], unwrapped(model))
    for name in state["companions"].keys() & companions.keys():
        restore_module(state["companions"][name], companions[name])
    restore_alone(state["optimizer"], optimizer, model, companions)
    place = state["optimizer"]["state"]
    changes: list[str] = []
    if settings is not None and state["settings"] is not None:
        place, changes = settings.merge(state["settings"], place, optimizer, scheduler, state["scheduler"])
    _attempt("the optimizer", lambda: restore_optimizer(place, optimizer))
    if scheduler is not None:
        _attempt("the scheduler", lambda: scheduler.load_state_dict(state["scheduler"]["state"]))
    if scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])
    there = state["companions"]
    lost = [f"nothing leads to {name}, which is in the checkpoint" for name in there if name not in companions]
    new = [f"{name} begins as it is here: it is not in the checkpoint" for name in companions if name not in there]
    return [*(["; ".join(changes)] if changes else []), *lost, *new]


def _differences(
    state: Mapping[str, Any],
    model: nn.Module,
    companions: Mapping[str, nn.Module],
    optimizer: Optimizer,
    scheduler: Any | None,
    scaler: GradScaler | None,
) -> list[str]:
    kept, learnt = state["optimizer"], state["companions"]
    found = module_differences(state["model"], unwrapped(model), "the model")
    for name in [name for name in companions if name in learnt]:
        found += module_differences(learnt[name], companions[name], f"the {name}" if name == CRITERION else name)
    found += _unlike("the criterion", _presence(CRITERION in learnt), _presence(CRITERION in companions))
    found += _unlike("the optimizer", kept["class"], type(optimizer).__qualname__)
    found += optimizer_differences(kept, optimizer, model, companions)
    theirs = None if state["scheduler"] is None else state["scheduler"]["class"]
    found += _unlike("the scheduler", theirs, None if scheduler is None else _class_of(scheduler))
    return found + _unlike(
        "the scaler", _presence(state["scaler"] is not None), _presence(scaler is not None and scaler.is_enabled())
    )


def _unlike(what: str, theirs: Any, ours: Any) -> list[str]:
    return [] if theirs == ours else [f"{what} is {theirs or 'none'} there, {ours or 'none'} here"]


def _presence(is_there: bool) -> str:
    return "in use" if is_there else "none"


def _state_of(scheduler: Any) -> Any:
    missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))]
    if missing:
        raise UsageError(
            f"the {type(scheduler).__name__} has no {' and no '.join(missing)}, so that no run folder can keep it",
            hint="give it both, or train without a run folder",
        )
    return scheduler.state_dict()


def _class_of(scheduler: Any) -> str:
    """With those it is made of: `SequentialLR(LinearLR, CosineAnnealingLR)`."""
    parts = getattr(scheduler, "_schedulers", None)
    inside = f"({', '.join(_class_of(part) for part in parts)})" if isinstance(parts, list | tuple) else ""
    return f"{type(scheduler).__qualname__}{inside}"


def _attempt(what: str, restore: Callable[[], Any]) -> None:
    try:
        restore()
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UsageError(f"{what} cannot take its state back ({reason})", hint=_HINT) from error
