"""The objects of trials in place: the live objects of a training, or a Workload made in code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import check_model, check_optimizer, check_unsharded
from autoaccum.accumulation.reachable_objects import find_python_attributes, find_reachable
from autoaccum.accumulation.rng_state import Generator, module_generators
from autoaccum.checks import check_alone
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.errors import UsageError
from autoaccum.options import WORKLOAD_OPTIONS, Options
from autoaccum.workload.objective import Objective
from autoaccum.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class LiveObjects:
    """The live objects of a training, for trials in place.

    Attributes:
        model: The model, on its device.
        batch: A function `batch(size)`; or one batch, from which others are made by repeating its samples.
        objective: The loss.
        options: Options that replace attributes of a workload; `optimizer` is this model's live one, or makes one for
            each trial.
        evaluate: As `Workload.evaluate`.
        name: The name in reports.
        modules: As `Workload.modules`.
        worst_of: As `Workload.worst_of`.

    Raises:
        UsageError: Trials of the model are not possible in place, or the optimizer is not the model's.
        WorkloadError: `batch` is neither a function nor a batch.
    """

    model: nn.Module
    batch: Any
    objective: Objective
    options: Options = Options()
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    name: str = "model"
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    worst_of: int | None = None

    @classmethod
    def of_workload(cls, workload: Workload, options: Options) -> LiveObjects:
        """Return the live objects of a Workload whose `model()` shares its tensors with a live model.

        Options that are not given are the Workload's own.
        """
        own = {name: getattr(workload, name) for name in WORKLOAD_OPTIONS if getattr(options, name) is None}
        return cls(
            model=workload.make_model(),
            batch=workload.batch,
            objective=workload.objective,
            options=dataclasses.replace(options, worst_of=None, **own),
            evaluate=workload.evaluate,
            name=workload.name,
            modules=workload.modules,
            worst_of=workload.worst_of,
        )

    def __post_init__(self) -> None:
        check_unsharded(check_model(self.model))
        if isinstance(self.model, nn.DataParallel):
            raise UsageError("the model is wrapped in DataParallel", hint="give the module in it: model=wrapped.module")
        if self.live_optimizer is not None:
            check_optimizer(self.live_optimizer, self.model)
        self.as_workload()

    @property
    def live_optimizer(self) -> Optimizer | None:
        """The optimizer, if it is a live one."""
        return self.options.optimizer if isinstance(self.options.optimizer, Optimizer) else None

    def as_workload(self) -> Workload:
        """Return a Workload whose functions return these objects; raise WorkloadError if they do not fit together."""
        criterion, batching, live = self.objective.criterion, self.objective.batching, self.live_optimizer
        given = {name: value for name, value in self.options.overrides.items() if value is not None}
        given.setdefault("coupled", self.objective.coupled)
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
            modules=self.modules,
            worst_of=self.worst_of,
            split=getattr(batching, "split", None),
            size=getattr(batching, "size", None),
            name=self.name,
            **given,
        )


class _LiveWorkload(Workload):
    """A Workload of a live model, which keeps its mode (train or eval)."""

    def build_model(self) -> nn.Module:
        return self.make_model()


@dataclass(frozen=True, kw_only=True)
class TrialTarget:
    """The workload of trials in place, and all that a trial may change.

    Attributes:
        workload: The workload that a trial builds and runs.
        device: The device of the trials.
        roots: Every module that a trial may change, by the prefix of its names.
        generators: Every random generator that is reachable from the modules and the user's functions.
        optimizer: The live optimizer; None: each trial makes one.
        is_live: Whether trials run on the live model itself.
    """

    workload: Workload
    device: torch.device
    roots: dict[str, nn.Module]
    generators: list[Generator]
    optimizer: Optimizer | None
    is_live: bool


def prepare(given: Workload | LiveObjects, device: str) -> TrialTarget:
    """Find the device and all that a trial may change; raise UsageError for another device, or one of several ranks."""
    check_alone("a trial in this process", "plan a file, or start it once, without torchrun")
    model: Any
    functions: tuple[Any, ...]
    if isinstance(given, LiveObjects):
        workload, on = given.as_workload(), find_device(given.model)
        if device not in ("auto", on.type, str(on)):
            raise UsageError(
                f"the model is on {on}, and the device is to be {device}", hint="move the model there first"
            )
        model, functions = given.model, (given.batch, given.options.optimizer, given.evaluate)
        optimizer = given.live_optimizer
    else:
        workload, on, optimizer = given, _choose_device(device), None
        model, functions = given.model, (given.batch, given.optimizer, given.model, given.evaluate)
    roots, generators = _find_roots(model, optimizer, workload.objective, functions, workload.modules)
    live = isinstance(given, LiveObjects)
    return TrialTarget(
        workload=workload, device=on, roots=roots, generators=generators, optimizer=optimizer, is_live=live
    )


def find_device(model: nn.Module) -> torch.device:
    """Return the device of all of `model`; raise UsageError for several, or one where trials cannot be measured."""
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


def _choose_device(requested: str) -> torch.device:
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = requested.partition(":")
    if not index:  # If CUDA does not start, the trials' device reports it.
        index = str(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return torch.device("cuda", int(index))


def _find_roots(
    model: Any,
    optimizer: Optimizer | None,
    objective: Objective,
    functions: tuple[Any, ...],
    listed: Mapping[str, nn.Module],
) -> tuple[dict[str, nn.Module], list[Generator]]:
    """Find the model, the criterion, and modules that the user's functions and hooks refer to, such as a teacher."""
    roots: dict[str, nn.Module] = {"": model} if isinstance(model, nn.Module) else {}
    known = {id(module) for root in roots.values() for module in root.modules()}
    criterion = None if objective.criterion is None else objective.criterion.function
    used: tuple[Callable[..., Any] | None, ...] = (objective.loss_function, objective.weight_function, criterion)
    held = find_python_attributes(model, optimizer) if isinstance(model, nn.Module) else ()
    modules, generators = find_reachable([*used, *functions], held)
    for name, module in (modules | dict(listed)).items():
        if id(module) not in known:
            roots[f"<{name}>"] = module
            known.update(id(inner) for inner in module.modules())
    own = module_generators(module for root in roots.values() for module in root.modules())
    return roots, list({id(one): one for one in (*own, *generators)}.values())
