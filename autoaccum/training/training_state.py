"""What a training counts, and its state: captured for a checkpoint, and restored bit for bit.

Weights and optimizer state are saved whole and by parameter name, whether the model is sharded, wrapped or neither.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.accumulation.rng_state import RngState, derive_seed, restore_rng_state, seed_generators
from autoaccum.errors import UsageError
from autoaccum.sharded_tensors import is_sharded, model_class
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.training_setup import TrainingComponents

_PATIENCE, _MOST_PATIENCE = 32, 1024
_MOST_LISTED = 3
"""Differences that one message lists."""


@dataclass
class Progress:
    """Counts over all runs in one folder, saved in its checkpoints.

    Attributes:
        update: Windows trained on or skipped.
        epoch_samples: Samples of the current epoch.
        oom_retries: How many times an update was repeated after running out of memory.
        skipped: Windows skipped because the loss or the gradient was not finite.
        evaluated_at: The update that was evaluated last; 0 before any.
    """

    update: int = 0
    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    oom_retries: int = 0
    skipped: int = 0
    loss: float | None = None
    evaluation: dict[str, float] | None = None
    evaluated_at: int = 0


class Ceiling:
    """The largest micro-batch, in samples or tokens, from update to update.

    The Accumulator lowers it when memory runs out. After `patience` updates without that, the planned size is tried
    again, and the patience doubles, up to 1,024 updates.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.record(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 90), (0, 90)]]
    [100, 100, 256, 90, 90, 90]
    """

    def __init__(self, planned: int, *, patience: int = _PATIENCE) -> None:
        self.planned = self.largest = planned
        self.patience, self.stable_updates = patience, 0

    def record(self, retries: int, micro_batch: int) -> int:
        """Record an update's `retries` and the Accumulator's ceiling after it; return the ceiling of the next one."""
        self.largest = min(micro_batch, self.planned)
        self.stable_updates = 0 if retries else self.stable_updates + 1
        if self.largest < self.planned and self.stable_updates >= self.patience:
            self.largest, self.stable_updates = self.planned, 0
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        return self.largest


def training_facts(request: FitRequest, of_data: Mapping[str, Any], components: TrainingComponents) -> dict[str, Any]:
    """Return what must be equal on resuming, as plain values, except what `TrainingState.restore` compares.

    These may change: `epochs` and `steps`, everything about evaluations, checkpoints and callbacks, the workers that
    read data, the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, `check`, and the
    workload's code (with a warning). A learning-rate schedule continues from its saved state.
    """
    objective, spec = components.objective, components.spec
    return {
        "target batch": request.target_batch,
        "target tokens": request.target_tokens,
        "seed": request.seed,
        **{f"data: {name}": value for name, value in of_data.items()},
        "model": model_class(unwrap_model(components.model)).__name__,
        "optimizer": type(components.optimizer).__name__,
        "schedule": None if components.scheduler is None else type(components.scheduler).__name__,
        "loss": f"{objective.reduction} over {objective.divisor_label}",
        **{name: getattr(spec, name) for name in ("precision", "batchnorm", "accumulate_in")},
        "coupled": objective.coupled,
        "ema_decay": None if components.averages is None else components.averages.decay,
    }


class TrainingState:
    """All state that training changes, except the position in the data: for a checkpoint, and restored bit for bit.

    Made before the first update, since a resumed run must begin with the same settings of the optimizer's groups.

    Args:
        components: What is trained.
        facts: What else must be equal on resuming, by `training_facts`.
    """

    def __init__(self, components: TrainingComponents, facts: Mapping[str, Any]) -> None:
        self._components, self._facts = components, dict(facts)
        groups = components.optimizer.param_groups
        self._settings = copy.deepcopy([{name: group[name] for name in group if name != "params"} for group in groups])

    def capture(self) -> dict[str, Any]:
        """Return the state, with what must be equal on resuming; tensors are not copied.

        That of a sharded model is gathered, as all ranks call this.

        Raises:
            UsageError: The scheduler has no state_dict.
        """
        root, components, averages = self._root, self._components, self._components.averages
        model, groups = _whole(root.state_dict()), self._group_names(root)
        optimizer = _whole(components.optimizer.state_dict())
        names = [name for group in groups for name in group]
        state = {
            "model": {_bare(name): value for name, value in model.items()},
            "hidden": {name: buffer for name, buffer in root.named_buffers() if name not in model},
            "frozen": [_bare(name) for name, parameter in root.named_parameters() if not parameter.requires_grad],
            "evaluating": [name for name, module in root.named_modules() if not module.training],
            "groups": groups,
            "optimizer": {**optimizer, "state": {names[index]: of for index, of in optimizer["state"].items()}},
            "scheduler": _schedule(components.scheduler),
            "scaler": None if components.scaler is None else components.scaler.state_dict(),
            "ema": None if averages is None else {"updates": averages.updates, "model": averages.model.state_dict()},
        }
        return {"run": self._facts, "settings": self._settings, "training": state}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Restore what `capture` returned, whose tensors the optimizer may take over; random states are restored last.

        Raises:
            UsageError: The state belongs to another training, or its settings differ. The message names the
                differences, and nothing is changed.
        """
        root, components, state = self._root, self._components, captured["training"]
        differences = self._changed_facts(captured["run"]) or [*self._differences(state, root)]
        differences = differences or [*self._changed_settings(captured["settings"], state["optimizer"])]
        if differences:
            more = f"; and {len(differences) - _MOST_LISTED} more" if len(differences) > _MOST_LISTED else ""
            raise UsageError(
                f"the checkpoint belongs to another training: {'; '.join(differences[:_MOST_LISTED])}{more}",
                hint="use the same arguments as before, or another run folder",
            )
        self._settings = captured["settings"]
        here = root.state_dict()
        root.load_state_dict({name: _part(state["model"][_bare(name)], like) for name, like in here.items()})
        _restore_optimizer(state, components.optimizer)
        buffers = dict(root.named_buffers())
        for name, value in state["hidden"].items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)
        for name, parameter in root.named_parameters():
            parameter.requires_grad_(_bare(name) not in state["frozen"])
        for name, module in root.named_modules():
            module.training = name not in state["evaluating"]
        if components.scheduler is not None:
            components.scheduler.load_state_dict(state["scheduler"])
        if components.scaler is not None:
            components.scaler.load_state_dict(state["scaler"])
        if components.averages is not None:
            components.averages.model.load_state_dict(state["ema"]["model"])
            components.averages.updates = state["ema"]["updates"]

    def capture_rng(self) -> dict[str, Any]:
        """Return the random states of this rank: those of the process, its devices, and generators of modules."""
        return RngState(self._components.devices, self._generators()).saved()

    def restore_rng(self, states: Mapping[str, Any]) -> None:
        """Restore what `capture_rng` returned."""
        restore_rng_state(states, self._components.devices, self._generators())

    @property
    def _root(self) -> nn.Module:
        """One module of the model, the modules of the loss, and parameters that only the optimizer holds."""
        root, components = nn.Module(), self._components
        root.model = unwrap_model(components.model)
        root.loss_modules = nn.ModuleList(map(unwrap_model, filter(_can_be_saved, components.loss_modules)))
        in_modules = {id(parameter) for parameter in root.parameters()}
        for group in components.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in in_modules:  # It need not be an nn.Parameter.
                    root._parameters[f"optimizer_only{len(root._parameters)}"] = parameter
        return root

    def _generators(self) -> list[torch.Generator]:
        values = (value for module in self._root.modules() for value in vars(module).values())
        return [value for value in values if isinstance(value, torch.Generator)]

    def _group_names(self, root: nn.Module) -> list[list[str]]:
        names = {id(parameter): _bare(name) for name, parameter in root.named_parameters()}
        groups = self._components.optimizer.param_groups
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]

    def _changed_facts(self, facts: Mapping[str, Any]) -> list[str]:
        changed = [name for name, value in self._facts.items() if facts.get(name) != value]
        return [f"{name} was {facts.get(name)!r}, is {self._facts[name]!r}" for name in changed]

    def _differences(self, state: Mapping[str, Any], root: nn.Module) -> Iterator[str]:
        there, here = state["model"], {_bare(name): value for name, value in root.state_dict().items()}
        for name in {**there, **here}:
            was, now = _describe_tensor(there.get(name)), _describe_tensor(here.get(name))
            if was != now:
                yield f"{name} was {was}, is {now}"
        if there.keys() == here.keys() and state["groups"] != self._group_names(root):
            yield "the optimizer's parameter groups differ"

    def _changed_settings(self, first: list[dict[str, Any]], optimizer: Mapping[str, Any]) -> Iterator[str]:
        """Yield the settings that differ, except those that training itself has changed in a reused optimizer."""
        groups = self._components.optimizer.param_groups
        for old, current, new in zip(first, optimizer["param_groups"], groups, strict=True):
            for name in old:
                if name in new and repr(new[name]) not in (repr(old[name]), repr(current.get(name))):
                    yield f"{name} was {_short(old[name])}, is {_short(new[name])}"


def full_weights(components: TrainingComponents) -> dict[str, Any]:
    """Return the weights of the model as a `state_dict`; those of a sharded one whole, as all ranks call this."""
    weights = unwrap_model(components.model).state_dict()
    return {_bare(name): value for name, value in _whole(dict(weights)).items()}


def seed_training(seed: int, *numbers: int) -> None:
    """Seed all generators for the training with this seed, or for a part of it that has these numbers."""
    derived = derive_seed(seed, "training", *numbers)
    seed_generators(derived)
    torch.cuda.manual_seed_all(derived)


def _restore_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    saved, parameters = state["optimizer"], [tensor for group in optimizer.param_groups for tensor in group["params"]]
    names = [name for group in state["groups"] for name in group]
    divided = {
        index: {key: _part(value, parameters[index]) for key, value in saved["state"][name].items()}
        for index, name in enumerate(names)
        if name in saved["state"]
    }
    optimizer.load_state_dict({**saved, "state": divided})
    for index, values in divided.items():
        loaded = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, str):  # torch takes a string for a list,
                loaded[key] = value
            elif isinstance(value, Tensor) and loaded[key].dtype != value.dtype:  # and casts to the parameter's dtype.
                loaded[key] = value.to(loaded[key].device)


def _whole(state: Any) -> Any:
    """Return a nest of dicts with every sharded tensor gathered in the host memory of rank 0."""
    if isinstance(state, Tensor) and is_sharded(state):
        sharded: Any = state
        gathered = sharded.to(sharded.device_mesh.device_type).full_tensor()
        return gathered.cpu() if torch.distributed.get_rank() == 0 else gathered.new_empty(0, device="cpu")
    return {key: _whole(value) for key, value in state.items()} if isinstance(state, dict) else state


def _part(value: Any, like: Any) -> Any:
    """Return this rank's part of what is like a sharded tensor, and anything else as it is."""
    if not (is_sharded(like) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each rank has read the whole.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _bare(name: str) -> str:
    """Return a name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _can_be_saved(module: nn.Module) -> bool:
    """Return False for a module that is quantised or on the meta device, as a teacher may be."""
    tensors = (*module.parameters(), *module.buffers())
    return not any(tensor.is_meta or tensor.is_quantized for tensor in tensors)


def _schedule(scheduler: Any) -> Any:
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise UsageError(
            f"the {type(scheduler).__name__} has no state_dict and load_state_dict, so it cannot be saved",
            hint="define them, or train without a run folder",
        )
    return None if scheduler is None else scheduler.state_dict()


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _describe_tensor(value: Any) -> str:
    """Describe a tensor by dtype and shape: `float32 (2, 3)`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "missing" if value is None else "not a tensor"
