"""What a training has learnt and where it stands: taken for a checkpoint, and put back exactly.

Weights and optimizer state go by `torch.distributed.checkpoint.state_dict`, by name.
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

from autoaccum.accumulation.plan_check import unwrap_model
from autoaccum.accumulation.step_result import StepResult
from autoaccum.errors import UsageError, first_line
from autoaccum.training.fit_events import Notice
from autoaccum.training.seeds import capture_rng_state, restore_rng_state
from autoaccum.training.training_setup import TrainingComponents

_TOLD = 3
"""Differences that a message names."""


@dataclass
class Progress:
    """Counted over all runs in one folder; what a checkpoint keeps of it.

    Attributes:
        update: Windows trained on or passed over.
        epoch: Whole epochs.
        samples: Samples of those windows.
        epoch_samples: Those of the epoch that is under way.
        made: Updates that were made; the others had no weight, were skipped, or overflowed in fp16.
        oom_retries: How often an update was repeated because memory ran out.
        skipped: Windows passed over because loss or gradient were not finite.
        loss: Of the last update.
        evaluation: What the last evaluation gave.
        evaluated_at: The update after which it was; 0 before any.
    """

    update: int = 0
    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    oom_retries: int = 0
    made: int = 0
    skipped: int = 0
    loss: float | None = None
    evaluation: dict[str, float] | None = None
    evaluated_at: int = 0

    def count(self, samples: int, result: StepResult) -> None:
        """An update was made of a window of `samples`, or the window was passed over."""
        self.update += 1
        self.samples += samples
        self.epoch_samples += samples
        self.oom_retries += result.retries
        self.made += result.updated
        self.loss = result.loss

    def end_epoch(self) -> None:
        """All of the data was seen once more."""
        self.epoch += 1
        self.epoch_samples = 0


@dataclass(frozen=True)
class Goal:
    """When a training is done.

    Attributes:
        epochs: After so many whole epochs; None: only updates count.
        steps: After so many updates; None: only epochs count. The first of both that is reached.
        updates_per_epoch: Where the data tells its length.
    """

    epochs: int | None
    steps: int | None
    updates_per_epoch: int | None

    def is_reached(self, progress: Progress) -> bool:
        """Whether nothing is left to do."""
        if self.steps is not None and progress.update >= self.steps:
            return True
        return self.epochs is not None and progress.epoch >= self.epochs

    @property
    def updates(self) -> int | None:
        """Updates there will be in all; None where that is not known.

        >>> Goal(3, None, 10).updates, Goal(3, 25, 10).updates, Goal(None, 7, None).updates, Goal(3, 7, None).updates
        (30, 25, 7, None)
        """
        if self.epochs is None:
            return self.steps
        if self.updates_per_epoch is None:
            return None
        updates = self.epochs * self.updates_per_epoch
        return updates if self.steps is None else min(updates, self.steps)


def capture_settings(trainee: TrainingComponents) -> dict[str, Any]:
    """What optimizer and schedule are set to, to be taken before any update: a resumed run must have the same."""
    groups = trainee.optimizer.param_groups
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {"groups": copy.deepcopy(plain), "schedule": copy.deepcopy(_schedule(trainee))}


def capture_training(trainee: TrainingComponents) -> dict[str, Any]:
    """What changes as `trainee` is trained, but for the place in the data; its tensors are no copies.

    Raises:
        UsageError: The scheduler keeps no state.
    """
    root, optimizer = _root(trainee), trainee.optimizer
    state = torch_state.get_model_state_dict(root)
    averages = trainee.averages
    return {
        "model": state,
        "hidden": {name: buffer for name, buffer in root.named_buffers() if name not in state},
        "frozen": [name for name, parameter in _parameters(root).items() if not parameter.requires_grad],
        "evaluating": [name for name, module in root.named_modules() if not module.training],
        "groups": _group_names(root, optimizer),
        # torch makes a step, of gradients that are zero, where an optimizer has no state yet.
        "optimizer": (
            torch_state.get_optimizer_state_dict(root, optimizer) if optimizer.state else optimizer.state_dict()
        ),
        "scheduler": _schedule(trainee),
        "scaler": None if trainee.scaler is None else trainee.scaler.state_dict(),
        "ema": None if averages is None else {"updates": averages.updates, "model": averages.model.state_dict()},
        "random": capture_rng_state(trainee.devices, _generators(root)),
    }


def restore_training(
    state: Mapping[str, Any], settings: Mapping[str, Any], trainee: TrainingComponents, tell: Callable[[Any], Any]
) -> None:
    """Put back what `capture_training` took, bit for bit, but for random states, which come last of all.

    Args:
        state: Tensors of it may become the optimizer's own.
        settings: Those of the run's beginning, by `capture_settings`.
        trainee: Changed only if everything fits.
        tell: Told what is not as it was.

    Raises:
        UsageError: It is of another training, or its settings are others: says what differs.
    """
    root, here = _root(trainee), capture_settings(trainee)
    found = _differences(state, root, trainee.optimizer)
    if not found:
        found = _changed_groups(settings["groups"], here["groups"], state["optimizer"]["param_groups"])
    if found:
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise UsageError(
            f"the checkpoint is of another training: {'; '.join(found[:_TOLD])}{more}",
            hint="give what was given then, or choose another run folder",
        )
    _attempt("the optimizer", lambda: _restore_optimizer(state["optimizer"], root, trainee.optimizer))
    _attempt("the model", lambda: torch_state.set_model_state_dict(root, dict(state["model"])))
    buffers = dict(root.named_buffers())
    for name, value in state["hidden"].items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)
    for name, parameter in _parameters(root).items():
        parameter.requires_grad_(name not in state["frozen"])
    for name, module in root.named_modules():
        module.training = name not in state["evaluating"]
    if trainee.scheduler is not None:
        changed = _changed(settings["schedule"], here["schedule"], state["scheduler"])
        _attempt("the scheduler", lambda: trainee.scheduler.load_state_dict(state["scheduler"]))
        if changed:
            tell(
                Notice(f"the schedule goes on as it was kept: {', '.join(changed)} of it are others here, and not used")
            )
    if trainee.scaler is not None:
        trainee.scaler.load_state_dict(state["scaler"])
    if trainee.averages is not None:
        trainee.averages.model.load_state_dict(state["ema"]["model"])
        trainee.averages.updates = state["ema"]["updates"]


def restore_training_rng(state: Mapping[str, Any], trainee: TrainingComponents) -> None:
    """Go on drawing where the interrupted run did."""
    restore_rng_state(state["random"], trainee.devices, _generators(_root(trainee)))


def _root(trainee: TrainingComponents) -> nn.Module:
    """One module of all that is trained: the model, what the loss holds, and what the optimizer alone knows."""
    root = nn.Module()
    root.model = unwrap_model(trainee.model)
    root.beside = nn.ModuleList(unwrap_model(module) for module in trainee.beside if _can_be_kept(module))
    known = {id(parameter) for parameter in root.parameters()}
    for group in trainee.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                root._parameters[f"alone{len(root._parameters)}"] = parameter  # It need not be an nn.Parameter.
    return root


def _can_be_kept(module: nn.Module) -> bool:
    """Not so for a teacher that is quantised, or on no device."""
    tensors = (*module.parameters(), *module.buffers())
    return not any(tensor.is_meta or tensor.is_quantized for tensor in tensors)


def _schedule(trainee: TrainingComponents) -> Any:
    scheduler = trainee.scheduler
    for name in ("state_dict", "load_state_dict"):
        if scheduler is not None and not callable(getattr(scheduler, name, None)):
            raise UsageError(
                f"the {type(scheduler).__name__} has no {name}, so that no run folder can keep it",
                hint="give it state_dict and load_state_dict, or train without a run folder",
            )
    return None if scheduler is None else scheduler.state_dict()


def _generators(root: nn.Module) -> list[torch.Generator]:
    """Those that modules draw their own noise from."""
    found = (value for module in root.modules() for value in vars(module).values())
    return [value for value in found if isinstance(value, torch.Generator)]


def _parameters(root: nn.Module) -> dict[str, Tensor]:
    """By name, without what torch.compile puts into it."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in root.named_parameters()}


def _group_names(root: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in _parameters(root).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _restore_optimizer(saved: dict[str, Any], root: nn.Module, optimizer: Optimizer) -> None:
    if not saved["state"]:
        for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})
        return
    parameters = _parameters(root)
    for name in saved["state"]:
        parameters[name].requires_grad_(True)  # Of what is frozen, torch passes the state over.
    if not optimizer.state:  # Without any, torch makes a step first, which some optimizers count.
        optimizer.state[parameters[next(iter(saved["state"]))]] = {}
    options = torch_state.StateDictOptions(strict=False)  # What never had a gradient has no state.
    torch_state.set_optimizer_state_dict(root, optimizer, saved, options=options)
    for name, values in saved["state"].items():
        state = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, str):  # torch makes something else of a word,
                state[key] = value
            elif isinstance(value, Tensor) and state[key].dtype != value.dtype:  # and rounds to the parameter's digits.
                state[key] = value.to(state[key].device)


def _differences(state: Mapping[str, Any], root: nn.Module, optimizer: Optimizer) -> list[str]:
    here, there = torch_state.get_model_state_dict(root), state["model"]
    forms = {name: (_form(there.get(name)), _form(here.get(name))) for name in {**there, **here}}
    found = [f"{name} is {theirs} there, {ours} here" for name, (theirs, ours) in forms.items() if theirs != ours]
    if not found and state["groups"] != _group_names(root, optimizer):
        found.append("the optimizer has other parameter groups")
    return found


def _form(value: Any) -> str:
    """Of a tensor its dtype and shape: `float32 (2, 3)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "missing" if value is None else "no tensor"


def _changed_groups(then: Any, now: Any, kept: Any) -> list[str]:
    found: dict[str, None] = {}
    for old, new, current in zip(then, now, kept, strict=True):
        found |= {f"{key} was {_shown(old[key])}, is {_shown(new[key])}": None for key in _changed(old, new, current)}
    return list(found)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """The settings that were set anew; not those that training itself has set so since, in an object given again."""
    return [key for key in now if key in then and repr(now[key]) not in (repr(then[key]), repr(kept.get(key)))]


def _attempt(what: str, restore: Callable[[], Any]) -> None:
    try:
        restore()
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UsageError(f"{what} cannot take its state back ({reason})", hint="choose another run folder") from error
