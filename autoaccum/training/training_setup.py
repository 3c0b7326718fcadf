"""What is trained, and the objects built from it.

A live model is read as a Workload at once, so that all that follows knows one kind of source.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from autoaccum.accumulation.argument_checks import (
    check_optimizer,
    check_scheduler,
    unwrap_model,
)
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.gradients import choose_scaler, needs_buffers
from autoaccum.accumulation.ranks.group import join_ranks, world_size
from autoaccum.accumulation.ranks.launch import choose_parallel, shard_model
from autoaccum.accumulation.ranks.replicated import copy_from_first
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, find_used_modules
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.checks import describe_type
from autoaccum.devices.device_choice import card_index, check_device
from autoaccum.devices.live_objects import workload_of_objects
from autoaccum.devices.loop_memory import EMA_DECAY, EmaModel
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.options import check_mesh, resolve_spec
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_setup import refuse_overrides
from autoaccum.sharded_tensors import is_sharded_model
from autoaccum.sources.objective import Objective, with_coupling
from autoaccum.sources.optimizers import make_optimizer, set_learning_rate
from autoaccum.sources.samples import replace_fields
from autoaccum.sources.source import find_source
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.spec import TrainingSpec
from autoaccum.training.fit_events import Notice
from autoaccum.training.fit_request import FitRequest, load_plan

_OF_THE_LOSS = ("loss", "criterion", "outputs", "coupled_loss", "weight")


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """The model on its device, and everything that goes with it.

    Attributes:
        scheduler: The learning-rate scheduler; None without one.
        scaler: The loss scaler of fp16; None otherwise.
        spec: How updates are run.
        averages: The averaged weights (EMA); None without them.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    scheduler: Any = None
    scaler: GradScaler | None = None
    spec: TrainingSpec = TrainingSpec()
    averages: EmaModel | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return model_device(self.model)

    @property
    def devices(self) -> list[torch.device]:
        """All devices of parameters and buffers: a model may be on two GPUs."""
        return list(dict.fromkeys(tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())))

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the model only."""
        return is_sharded_model(self.model)

    @property
    def loss_modules(self) -> list[nn.Module]:
        """The criterion, if it is a module, and other modules that the loss uses."""
        used = find_used_modules(self.objective, unwrap_model(self.model)).values()
        criterion = self.objective.criterion_module
        return [*used] if criterion is None else [criterion, *used]


class TrainingSetup:
    """What a request says to train, as a workload.

    A live model is trained where it is, or on the GPU that is requested.

    Attributes:
        workload: The workload, with the request's values in place of its own. A live model is its `model`.
        data: The training data.
        eval_data: The evaluation data, or None.
        device: Where the model is trained.

    Raises:
        UsageError: The request has neither a model nor a workload, or an argument that does not go with it.
        WorkloadError: The workload has no data, or cannot be used.
    """

    def __init__(self, request: FitRequest) -> None:
        self.request, self.is_live = request, isinstance(request.model_or_workload, nn.Module)
        if not isinstance(request.model_or_workload, (str, os.PathLike)):
            refuse_overrides(request.options)
        self.workload = workload = _read_live_model(request) if self.is_live else _read_workload(request)
        self.objective = workload.objective
        self.data = _as_samples(workload.dataset) if request.data is None else request.data
        if self.data is None and self.is_live:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        if self.data is None:
            raise WorkloadError(
                f"{workload.name} has no dataset to train on", hint="define dataset in it, or give data"
            )
        self.eval_data = _as_samples(workload.evaluation_dataset) if request.eval_data is None else request.eval_data
        self.device = self._move_live_model() if self.is_live else find_device(request.options.device)

    def build(self, plan: Plan | None) -> TrainingComponents:
        """Build the model and its components from the current random states.

        The learning rate that was given, or that a plan was tuned with, is the rate of the first parameter group; other
        groups keep their ratio to it, and the scheduler is built after it is set.

        Raises:
            UsageError: The scheduler, a saver or a coupled loss cannot be used.
            WorkloadError: The model cannot be copied for an average.
        """
        request, scheduler = self.request, self.request.scheduler
        learning_rate = request.learning_rate or (None if plan is None else plan.learning_rate)
        if learning_rate is not None and scheduler is not None and not callable(scheduler):
            raise UsageError(
                f"learning_rate is {learning_rate:g}, but the {type(scheduler).__name__} already exists",
                hint="give scheduler as a function of the optimizer",
            )
        options = request.options
        given = {"coupled": self.workload.coupled or None, **options.spec}
        if options.chooses_savers:
            del given["savers"]
        spec = resolve_spec(given, None if plan is None else plan.spec, self.workload)
        model = self._build_model(plan)
        optimizer = spec.optimizer if isinstance(spec.optimizer, Optimizer) else make_optimizer(spec.optimizer, model)
        if learning_rate is not None:
            set_learning_rate(optimizer, learning_rate)
        if scheduler is None or callable(scheduler):
            scheduler = self.workload.build_scheduler(optimizer)
        check_scheduler(scheduler, optimizer)
        device, trained = model_device(model), optimizer_parameters(optimizer)
        if "offload-optimizer" in spec.savers and needs_buffers(trained):
            raise UsageError(
                "offload-optimizer keeps half-precision weights in float32, and checkpoints would have them rounded",
                hint="keep the parameters in float32 (precision bf16 runs them under autocast), or train by the"
                " Accumulator",
            )
        ema_decay = request.ema_decay or (EMA_DECAY if self.workload.ema else None)
        if not model.training:  # `from_pretrained` leaves it in eval mode. Submodules in eval mode stay so otherwise.
            model.train()
        return TrainingComponents(
            model=model,
            objective=with_coupling(self.objective, spec.coupled, UsageError),
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=choose_scaler(spec.precision, None, device, trained),
            spec=spec,
            averages=None if ema_decay is None else EmaModel(model, ema_decay),
        )

    def notes_on_plan(self, plan: Plan, components: TrainingComponents) -> list[Notice]:
        """Return what a user should know about a training by this plan."""
        notes = list[Notice]()
        if plan.learning_rate is not None and self.request.learning_rate is None:
            notes.append(Notice(message("tuned_rate", rate=plan.learning_rate), warns=False))
        if plan.coupling is not None and plan.iter_size > 1:
            # The Accumulator itself warns of BatchNorm layers; exact ones are those of the whole window.
            already_warned = () if components.spec.batchnorm == "frozen" else batchnorm_names(components.model)
            is_joint = bool(components.objective.coupled)
            notes += map(Notice, plan.coupling.warnings(already_warned, is_joint=is_joint))
        return notes

    def _build_model(self, plan: Plan | None) -> nn.Module:
        if self.is_live:
            live: nn.Module = self.request.model_or_workload
            return live
        model = self.workload.build_model()
        self.objective = self.workload.objective  # The divisor of a loss that the model computes is known now.
        for module in find_auxiliary_modules(self.workload).values():
            module.to(self.device)
        if world_size() == 1 or not self.chooses_fsdp2(plan):
            return model.to(self.device)
        mesh = self.request.options.mesh or (None if plan is None else plan.mesh) or (world_size(),)
        check_mesh(mesh, world_size())
        # On the host, since a card may not have room for a whole model.
        copy_from_first(join_ranks(), (*model.named_parameters(), *model.named_buffers()))
        return shard_model(model, self.device, mesh, self.workload.parallelize)

    def chooses_fsdp2(self, plan: Plan | None) -> bool:
        """Return whether ranks shard the workload's model, as requested or planned."""
        parallel = self.request.options.parallel or (None if plan is None else plan.parallel)
        return choose_parallel(parallel, self.workload.parallelize) == "fsdp2"

    def _move_live_model(self) -> torch.device:
        """Move a live model to the requested device and return that, unless a live optimizer keeps it where it is."""
        model, requested = self.request.model_or_workload, self.request.options.device
        here = model_device(model)
        target = here if requested == "auto" and here.type != "cpu" else find_device(requested)
        if target == here:
            return here
        if isinstance(self.request.options.spec.get("optimizer"), Optimizer):
            if requested == "auto":
                return here
            raise UsageError(
                f"the model is on {here}, {target} is requested, and the optimizer already exists",
                hint="move the model first, then create the optimizer",
            )
        model.to(target)
        for module in find_used_modules(self.objective, model, self.request.evaluate).values():
            module.to(target)
        return model_device(model)


def find_device(name: str) -> torch.device:
    """Return the device for `auto` (the first GPU, or the CPU without one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: This machine has no such device.
    """
    check_device(name)
    index = card_index(name)
    if index is not None and world_size() > 1:
        if ":" in name:
            raise UsageError(f"the device is {name}, and each rank has a card of its own", hint="take cuda")
        index = torch.cuda.current_device()
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def live_objects(request: FitRequest) -> dict[str, Any]:
    """Return a live model and what goes with it, by the names of `autoaccum.plan`'s arguments."""
    live = {name: getattr(request, name) for name in (*_OF_THE_LOSS, "reduction", "split", "size")}
    return live | {"model": request.model_or_workload}


def _read_live_model(request: FitRequest) -> Workload:
    """Return the workload of a live model. Its batches come from the data, and its optimizer may be a live one."""
    optimizer = request.options.spec.get("optimizer")
    live = live_objects(request) | {"batch": no_batch, "evaluate": request.evaluate}
    workload = workload_of_objects(live, request.options.with_spec(optimizer=None))
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, request.model_or_workload)
    scheduler = request.scheduler if callable(request.scheduler) else None
    return replace_fields(workload, collate=request.collate, scheduler=scheduler)


def _read_workload(request: FitRequest) -> Workload:
    """Return the workload, with the request's values in place of its own."""
    source = request.model_or_workload
    if not isinstance(source, (str, os.PathLike, Workload)):
        raise UsageError(f"model_or_workload is {describe_type(source)}", hint="give a module, a Workload or a file")
    given = [name for name in _OF_THE_LOSS if getattr(request, name) is not None]
    given += [] if request.reduction == "mean" else ["reduction"]
    if given:
        raise UsageError(f"a workload is given, and {given[0]} too", hint="define it in the workload")
    if isinstance(source, Workload):
        workload = source
    else:
        planned = {} if request.plan is None else load_plan(request.plan).workload.overrides
        workload = find_source(source, request.options.overrides or planned).load()
    own = {name: getattr(request, name) for name in ("split", "size", "scheduler", "collate", "evaluate")}
    return replace_fields(workload, **{**request.options.spec, "longest_of": None}, **own)


def _as_samples(dataset: Any) -> Any:
    return Subset(cast("Dataset[Any]", dataset), range(len(dataset))) if isinstance(dataset, (list, tuple)) else dataset
