"""The progress of a training, and its state: captured for a checkpoint, and restored bit for bit.

Weights and optimizer state use `torch.distributed.checkpoint.state_dict`, by parameter name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.accumulation.rng_state import capture_rng_state, restore_rng_state
from autoaccum.accumulation.step_result import StepResult
from autoaccum.errors import UsageError, first_line
from autoaccum.training.fit_events import Notice
from autoaccum.training.training_setup import TrainingComponents

_GATHERED = torch_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
_MOST_LISTED = 3
"""Differences that one message lists."""


@dataclass
class Progress:
    """Counts over all runs in one folder, saved in its checkpoints.

    Attributes:
        update: Windows trained on or skipped.
        epoch_samples: Samples of the current epoch.
        oom_retries: How many times an update was repeated after running out of memory.
        applied: Updates that changed the weights; the others had no weight, were skipped, or overflowed in fp16.
        skipped: Windows skipped because the loss or the gradient was not finite.
        evaluated_at: The update that was evaluated last; 0 before any.
    """

    update: int = 0
    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    oom_retries: int = 0
    applied: int = 0
    skipped: int = 0
    loss: float | None = None
    evaluation: dict[str, float] | None = None
    evaluated_at: int = 0

    def count(self, samples: int, result: StepResult) -> None:
        """Count an update made from a window of `samples`, or its window being skipped."""
        self.update += 1
        self.samples += samples
        self.epoch_samples += samples
        self.oom_retries += result.retries
        self.applied += result.updated
        self.loss = result.loss


@dataclass(frozen=True)
class Goal:
    """The end of a training: after some epochs or updates, whichever comes first.

    Attributes:
        epochs: Whole epochs; None: only updates count.
        steps: Updates; None: only epochs count.
        updates_per_epoch: Updates per epoch; None if the data has no known length.
    """

    epochs: int | None
    steps: int | None
    updates_per_epoch: int | None

    def is_reached(self, progress: Progress) -> bool:
        """Return whether training is done."""
        if self.steps is not None and progress.update >= self.steps:
            return True
        return self.epochs is not None and progress.epoch >= self.epochs

    @property
    def updates(self) -> int | None:
        """Total updates at the end; None if unknown.

        >>> Goal(3, None, 10).updates, Goal(3, 25, 10).updates, Goal(None, 7, None).updates, Goal(3, 7, None).updates
        (30, 25, 7, None)
        """
        if self.epochs is None:
            return self.steps
        if self.updates_per_epoch is None:
            return None
        updates = self.epochs * self.updates_per_epoch
        return updates if self.steps is None else min(updates, self.steps)


def capture_settings(components: TrainingComponents) -> dict[str, Any]:
    """Return the settings of optimizer and scheduler before any update: a resumed run must have the same."""
    groups = components.optimizer.param_groups
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {"groups": copy.deepcopy(plain), "schedule": copy.deepcopy(_schedule(components))}


def capture_training(components: TrainingComponents) -> dict[str, Any]:
    """Return all state that training changes, except the position in the data. Tensors are not copied.

    That of a sharded model is gathered on rank 0, as all ranks call this; the others return no tensors of it.

    Raises:
        UsageError: The scheduler has no state_dict.
    """
    root, optimizer = _joint_module(components), components.optimizer
    gathered = _GATHERED if components.is_sharded else None
    state = torch_state.get_model_state_dict(root, options=gathered)
    averages = components.averages
    return {
        "model": state,
        "hidden": {name: buffer for name, buffer in root.named_buffers() if name not in state},
        "frozen": [name for name, parameter in _parameters(root).items() if not parameter.requires_grad],
        "evaluating": [name for name, module in root.named_modules() if not module.training],
        "groups": _group_names(root, optimizer),
        # torch makes a step with zero gradients if an optimizer has no state yet.
        "optimizer": (
            torch_state.get_optimizer_state_dict(root, optimizer, options=gathered)
            if optimizer.state
            else optimizer.state_dict()
        ),
        "scheduler": _schedule(components),
        "scaler": None if components.scaler is None else components.scaler.state_dict(),
        "ema": None if averages is None else {"updates": averages.updates, "model": averages.model.state_dict()},
        "random": capture_rng_state(components.devices, _generators(root)),
    }


def full_weights(components: TrainingComponents) -> dict[str, Any]:
    """Return the weights of the model as a `state_dict`; those of a sharded one on rank 0, as all ranks call this."""
    model = unwrap_model(components.model)
    if not components.is_sharded:
        return dict(model.state_dict())
    return dict(torch_state.get_model_state_dict(model, options=_GATHERED))


def restore_training(
    state: Mapping[str, Any], settings: Mapping[str, Any], components: TrainingComponents, notify: Callable[[Any], Any]
) -> None:
    """Restore what `capture_training` captured, bit for bit, except random states, which are restored last.

    Args:
        state: The captured state. The optimizer may take over its tensors.
        settings: The settings at the start of the run, by `capture_settings`.
        components: The components to restore; changed only if everything matches.
        notify: Called with a notice if a setting differs.

    Raises:
        UsageError: The state belongs to another training, or its settings differ; the message names the differences.
    """
    root, here = _joint_module(components), capture_settings(components)
    found = _differences(state, root, components.optimizer)
    if not found:
        found = _changed_groups(settings["groups"], here["groups"], state["optimizer"]["param_groups"])
    if found:
        more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
        raise UsageError(
            f"the checkpoint belongs to another training: {'; '.join(found[:_MOST_LISTED])}{more}",
            hint="use the same arguments as before, or another run folder",
        )
    if components.is_sharded:
        state = _divide(state, _parameters(root))
    _restore("the optimizer", lambda: _restore_optimizer(state["optimizer"], root, components.optimizer))
    _restore("the model", lambda: torch_state.set_model_state_dict(root, dict(state["model"])))
    buffers = dict(root.named_buffers())
    for name, value in state["hidden"].items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)
    for name, parameter in _parameters(root).items():
        parameter.requires_grad_(name not in state["frozen"])
    for name, module in root.named_modules():
        module.training = name not in state["evaluating"]
    if components.scheduler is not None:
        changed = _changed(settings["schedule"], here["schedule"], state["scheduler"])
        _restore("the scheduler", lambda: components.scheduler.load_state_dict(state["scheduler"]))
        if changed:
            notify(Notice(f"the scheduler resumes with its saved {', '.join(changed)}: the new settings are not used"))
    if components.scaler is not None:
        components.scaler.load_state_dict(state["scaler"])
    if components.averages is not None:
        components.averages.model.load_state_dict(state["ema"]["model"])
        components.averages.updates = state["ema"]["updates"]


def _divide(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a captured state with this rank's parts of what is like a sharded parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def part(name: str, value: Any) -> Any:
        like = parameters.get(name)
        if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
            return value
        # Each rank has read the whole.
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    optimizer = state["optimizer"]
    divided = {
        name: {key: part(name, value) for key, value in values.items()} for name, values in optimizer["state"].items()
    }
    model = {name: part(name, value) for name, value in state["model"].items()}
    return {**state, "model": model, "optimizer": {**optimizer, "state": divided}}


def restore_training_rng(random: Mapping[str, Any], components: TrainingComponents) -> None:
    """Restore the random states of the interrupted run, as `capture_training` has them."""
    restore_rng_state(random, components.devices, _generators(_joint_module(components)))


def _joint_module(components: TrainingComponents) -> nn.Module:
    """Return one module of the model, the modules of the loss, and parameters that only the optimizer holds."""
    root = nn.Module()
    root.model = unwrap_model(components.model)
    root.loss_modules = nn.ModuleList(unwrap_model(each) for each in components.loss_modules if _can_be_saved(each))
    known = {id(parameter) for parameter in root.parameters()}
    for group in components.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                root._parameters[f"optimizer_only{len(root._parameters)}"] = parameter  # Need not be an nn.Parameter.
    return root


def _can_be_saved(module: nn.Module) -> bool:
    """Return False for a module that is quantised or on the meta device, as a teacher may be."""
    tensors = (*module.parameters(), *module.buffers())
    return not any(tensor.is_meta or tensor.is_quantized for tensor in tensors)


def _schedule(components: TrainingComponents) -> Any:
    scheduler = components.scheduler
    for name in ("state_dict", "load_state_dict"):
        if scheduler is not None and not callable(getattr(scheduler, name, None)):
            raise UsageError(
                f"the {type(scheduler).__name__} has no {name}, so it cannot be saved in a run folder",
                hint="define state_dict and load_state_dict, or train without a run folder",
            )
    return None if scheduler is None else scheduler.state_dict()


def _generators(root: nn.Module) -> list[torch.Generator]:
    found = (value for module in root.modules() for value in vars(module).values())
    return [value for value in found if isinstance(value, torch.Generator)]


def _parameters(root: nn.Module) -> dict[str, Tensor]:
    """Return parameters by name, without the prefix that torch.compile adds."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in root.named_parameters()}


def _group_names(root: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in _parameters(root).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _restore_optimizer(saved: dict[str, Any], root: nn.Module, optimizer: Optimizer) -> None:
    if not saved["state"]:
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        return
    parameters = _parameters(root)
    for name in saved["state"]:
        parameters[name].requires_grad_(True)  # torch skips the state of frozen parameters.
    if not optimizer.state:  # Without any state torch makes a step first, which some optimizers count.
        optimizer.state[parameters[next(iter(saved["state"]))]] = {}
    options = torch_state.StateDictOptions(strict=False)  # Parameters that never had a gradient have no state.
    torch_state.set_optimizer_state_dict(root, optimizer, saved, options=options)
    for name, values in saved["state"].items():
        state = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, str):  # torch splits a string,
                state[key] = value
            elif isinstance(value, Tensor) and state[key].dtype != value.dtype:  # and casts to the parameter's dtype.
                state[key] = value.to(state[key].device)


def _differences(state: Mapping[str, Any], root: nn.Module, optimizer: Optimizer) -> list[str]:
    here, there = torch_state.get_model_state_dict(root), state["model"]
    forms = {name: (_describe_tensor(there.get(name)), _describe_tensor(here.get(name))) for name in {**there, **here}}
    found = [f"{name} was {theirs}, is {ours}" for name, (theirs, ours) in forms.items() if theirs != ours]
    if not found and state["groups"] != _group_names(root, optimizer):
        found.append("the optimizer's parameter groups differ")
    return found


def _describe_tensor(value: Any) -> str:
    """Describe a tensor by dtype and shape: `float32 (2, 3)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "missing" if value is None else "not a tensor"


def _changed_groups(then: Any, now: Any, saved: Any) -> list[str]:
    found: dict[str, None] = {}
    for old, new, current in zip(then, now, saved, strict=True):
        for key in _changed(old, new, current):
            was, now_is = (f"{it:.6g}" if isinstance(it, float) else str(it) for it in (old[key], new[key]))
            found[f"{key} was {was}, is {now_is}"] = None
    return list(found)


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, except those that training itself has changed in a reused object."""
    return [key for key in now if key in then and repr(now[key]) not in (repr(then[key]), repr(saved.get(key)))]


def _restore(what: str, restore: Callable[[], Any]) -> None:
    try:
        restore()
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UsageError(f"the state of {what} cannot be restored ({reason})", hint="use another run folder") from error
