"""What is tried in place: live objects, or a Workload made in code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import check_group, check_model, check_optimizer
from autoaccum.accumulation.reachable_objects import find_python_attributes, find_reachable
from autoaccum.accumulation.rng_state import Generator, module_generators
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.workload.objective import Objective
from autoaccum.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class LiveObjects:
    """The very objects of a training, to be tried where they are.

    Attributes:
        model: The model, in place on its device.
        batch: `batch(size)`, any kind of function; or one batch, from which others are made by repeating its samples.
        objective: The loss.
        options: What stands in for attributes of a workload; `optimizer` is the live one of this very model, or what
            each trial makes one of its own from.
        evaluate: As a Workload has it.
        name: What reports call it.

    Raises:
        UsageError: The model cannot be tried in place, or the optimizer is not one of its own.
        WorkloadError: `batch` is neither a function nor a batch.
    """

    model: nn.Module
    batch: Any
    objective: Objective
    options: Options = Options()
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    name: str = "model"

    def __post_init__(self) -> None:
        check_model(self.model)
        if isinstance(self.model, nn.DataParallel):
            raise UsageError("the model is wrapped in DataParallel", hint="give the module in it: model=wrapped.module")
        if self.live_optimizer is not None:
            check_optimizer(self.live_optimizer, self.model)
        self.as_workload()

    @property
    def live_optimizer(self) -> Optimizer | None:
        """The optimizer, where it is a live one."""
        return self.options.optimizer if isinstance(self.options.optimizer, Optimizer) else None

    def as_workload(self) -> Workload:
        """A Workload whose functions return these very objects.

        Raises:
            WorkloadError: They do not go together.
        """
        criterion, batching, live = self.objective.criterion, self.objective.batching, self.live_optimizer
        given = {name: value for name, value in self.options.overrides.items() if value is not None}
        if live is not None:
            given["optimizer"] = lambda params: live
        return _LiveWorkload(
            model=lambda: self.model,
            batch=make_batches(self.batch, batching),
            loss=self.objective.loss_function,
            criterion=None if criterion is None else criterion.function,
            weight=self.objective.weight_function,
            reduction=self.objective.reduction,
            evaluate=self.evaluate,
            split=None if batching is None else batching.split,
            size=None if batching is None else batching.size,
            name=self.name,
            **given,
        )


class _LiveWorkload(Workload):
    """A Workload whose model is there already, in the mode its owner trains it in."""

    def build_model(self) -> nn.Module:
        """The model in that mode."""
        return self.make_model()


@dataclass(frozen=True, kw_only=True)
class TrialTarget:
    """A subject as trials take it.

    Attributes:
        workload: What a trial builds and runs, on `device`.
        device: Where.
        roots: Every module that a trial may change, by the prefix of its names.
        generators: Every generator that can be found from there.
        optimizer: The live optimizer; None where each trial makes its own.
        is_live: Whether the very model trains.
    """

    workload: Workload
    device: torch.device
    roots: dict[str, nn.Module]
    generators: list[Generator]
    optimizer: Optimizer | None
    is_live: bool


def prepare(subject: Workload | LiveObjects, device: str) -> TrialTarget:
    """Find out where `subject` is tried, and what a trial of it may change.

    Raises:
        UsageError: Live objects are elsewhere, or this process is one of several ranks.
    """
    check_group()
    model: Any
    functions: tuple[Any, ...]
    if isinstance(subject, LiveObjects):
        workload, place = subject.as_workload(), find_device(subject.model)
        if device not in ("auto", place.type, str(place)):
            raise UsageError(
                f"the model is on {place}, and the device is to be {device}", hint="move the model there first"
            )
        model, functions = subject.model, (subject.batch, subject.options.optimizer, subject.evaluate)
        optimizer = subject.live_optimizer
    else:
        place = _choose_device(device)
        workload = subject
        model, functions = subject.model, (subject.batch, subject.optimizer, subject.model, subject.evaluate)
        optimizer = None
    roots, generators = _find_roots(model, optimizer, workload.objective, functions)
    live = isinstance(subject, LiveObjects)
    return TrialTarget(
        workload=workload, device=place, roots=roots, generators=generators, optimizer=optimizer, is_live=live
    )


def find_device(model: nn.Module) -> torch.device:
    """The one device all of `model` is on.

    Raises:
        UsageError: It is on several, or on one where nothing can be measured.
    """
    tensors = [*model.parameters(), *model.buffers()]
    devices = {str(tensor.device): tensor.device for tensor in tensors} or {"cpu": torch.device("cpu")}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on {' and '.join(sorted(devices))}, trials measure one device",
            hint="move it there: model.to(device)",
        )
    (device,) = devices.values()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device}, where no trial can be measured", hint="move it: model.to('cuda')")
    return device


def _choose_device(asked: str) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = asked.partition(":")
    if not index:  # Where CUDA does not start, the device itself tells.
        index = str(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return torch.device("cuda", int(index))


def _find_roots(
    model: Any, optimizer: Optimizer | None, objective: Objective, functions: tuple[Any, ...]
) -> tuple[dict[str, nn.Module], list[Generator]]:
    """The model, the criterion, and modules that the user's functions and hooks hold or name, such as a teacher."""
    roots: dict[str, nn.Module] = {"": model} if isinstance(model, nn.Module) else {}
    known = {id(module) for root in roots.values() for module in root.modules()}
    criterion = None if objective.criterion is None else objective.criterion.function
    used: tuple[Callable[..., Any] | None, ...] = (objective.loss_function, objective.weight_function, criterion)
    held = find_python_attributes(model, optimizer) if isinstance(model, nn.Module) else ()
    modules, generators = find_reachable([*used, *functions], held)
    for name, module in modules.items():
        if id(module) not in known:
            roots[f"<{name}>"] = module
            known.update(id(inner) for inner in module.modules())
    own = module_generators(module for root in roots.values() for module in root.modules())
    return roots, list({id(one): one for one in (*own, *generators)}.values())
