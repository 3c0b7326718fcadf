"""The objects to train: a live model, a Workload or its file, and the components built from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from autoaccum.accumulation.argument_checks import (
    check_model,
    check_optimizer,
    check_scheduler,
    check_unsharded,
    choose_objective,
    choose_option,
    unwrap_model,
)
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import checked_batchnorm
from autoaccum.accumulation.gradients import choose_scaler, needs_buffers
from autoaccum.accumulation.ranks.group import join_ranks, world_size
from autoaccum.accumulation.ranks.launch import choose_parallel, shard_model
from autoaccum.accumulation.ranks.replicated import copy_from_first
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, find_used_modules
from autoaccum.accumulation.sharded_tensors import is_sharded_model
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.checks import check_word, describe_type
from autoaccum.devices.device_choice import card_index, check_device
from autoaccum.devices.live_objects import make_batches
from autoaccum.devices.loop_memory import EMA_DECAY, EmaModel
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import (
    AccumulateIn,
    BatchNormMode,
    Options,
    Precision,
    check_mesh,
    read_accumulate_in,
    read_savers,
)
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_WORST_OF, PlanRequest
from autoaccum.planning.planner import make_plan
from autoaccum.sources.batches import read_batching
from autoaccum.sources.loading import load_workload
from autoaccum.sources.objective import Objective, read_coupled_loss, with_coupling
from autoaccum.sources.optimizers import make_optimizer, set_learning_rate
from autoaccum.sources.samples import replace_fields
from autoaccum.sources.spec import Workload, no_batch
from autoaccum.training.fit_events import WorkloadOutput
from autoaccum.training.fit_request import FitRequest

_OF_THE_LOSS = ("loss", "criterion", "outputs", "coupled_loss", "weight")


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """The model on its device, and everything that goes with it.

    Attributes:
        scheduler: The learning-rate scheduler; None without one.
        scaler: The loss scaler of fp16; None otherwise.
        precision: `fp32`, `bf16` or `fp16`.
        batchnorm: `micro`, `running`, `frozen` or `exact`.
        accumulate_in: `fp32` or `parameters`.
        savers: Ways to take less memory of the device.
        evaluate: The workload's `evaluate(model, batch)`; None: the loss is evaluated.
        averages: The averaged weights (EMA); None without them.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    scheduler: Any
    scaler: GradScaler | None
    precision: str
    batchnorm: BatchNormMode
    accumulate_in: AccumulateIn
    savers: tuple[str, ...]
    evaluate: Callable[..., Any] | None
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
        named = find_used_modules(self.objective, unwrap_model(self.model)).values()
        criterion = self.objective.criterion_module
        return [*named] if criterion is None else [criterion, *named]


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


class TrainingSetup:
    """A workload, whose model is built when training begins, or a live model.

    A live model is trained where it is, or on the GPU that is requested.

    Attributes:
        name: The name in reports.
        data: The training data.
        collate: Builds a batch from samples; None: torch's default_collate.
        evaluation_batch: The first micro-batch of evaluations; None: that of training.
        multiple_of: The number that micro-batches are multiples of, if no plan says otherwise.
        digest: The digest of the source files; empty without any.

    Raises:
        UsageError: The request has neither a model nor a workload, or an argument that does not go with it.
        WorkloadError: The workload has no data, or cannot be used.
    """

    def __init__(self, request: FitRequest) -> None:
        self._request = request
        given = request.model_or_workload
        self._workload = own = None if isinstance(given, nn.Module) else _read_workload(request)
        self.data, self.eval_data = request.data, request.eval_data
        if own is None:
            self.name, self.digest = type(given).__name__, ""
            self.objective = self._check_model(given)
            self.collate, self._evaluate = request.collate, request.evaluate
            self.multiple_of = request.options.multiple_of or 1
            self.evaluation_batch = request.options.evaluation_batch
            self._keeps: Sequence[str] = request.options.keeps or ()
            self.device = self._move_model(given)
            return
        self.name, self.digest, self.objective = own.name, own.digest, own.objective
        self.data = _as_samples(own.dataset) if self.data is None else self.data
        if self.data is None:
            raise WorkloadError(f"{own.name} has no dataset to train on", hint="define dataset in it, or give data")
        self.eval_data = _as_samples(own.evaluation_dataset) if self.eval_data is None else self.eval_data
        self.collate, self._evaluate, self.multiple_of = own.collate, own.evaluate, own.multiple_of or 1
        self.evaluation_batch, self._keeps = own.evaluation_batch, own.keeps
        self.device = find_device(request.options.device)

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """Find the micro-batch by trials, of the file if that has all the code, else of the objects.

        Args:
            planning_batch: `Source.planning_batch`, which makes `batch(size)` from the data if the workload has none.
            on_event: Called with the planner's events.

        Raises:
            UsageError: Ranks shard the model, which no trial on a device of this machine does.
        """
        request, options, workload, ranks = self._request, self._request.options, self._workload, world_size()
        limits: dict[str, Any] = {name: getattr(options, name) for name in ("memory", "reserve", "parallel", "mesh")}
        limits["world_size"] = ranks
        chosen: dict[str, Any] = {"savers": options.savers} if options.chooses_savers else {}
        listeners: dict[str, Any] = {"on_event": on_event}
        if on_event is not None:
            listeners["on_output"] = lambda line: on_event(WorkloadOutput(line))
        in_code = (request.collate, request.evaluate, request.data, request.split)
        is_file = isinstance(request.model_or_workload, str | os.PathLike)
        is_file = is_file and isinstance(options.optimizer, str | None) and all(value is None for value in in_code)
        if ranks > 1 and workload is not None and choose_parallel(options.parallel, workload.parallelize) == "fsdp2":
            raise UsageError(
                "trials on a device of this machine run the whole model, and ranks shard it",
                hint=f"give the plan of a simulated card (autoaccum plan --gpu NAME --world-size {ranks})",
            )
        if workload is None:
            live = {name: getattr(request, name) for name in (*_OF_THE_LOSS, "split", "size")}
            live |= {"model": request.model_or_workload, "batch": planning_batch(options.worst_of)}
            live["reduction"] = _reduction(request)
            limits |= {**options.overrides, **chosen, "evaluation_batch": None}  # It has no batch of evaluation data.
            return make_plan(None, PlanRequest(request.target_batch, Options(**limits)), live=live, **listeners)
        limits["device"] = options.device
        if is_file:
            worst_of = options.worst_of or (DEFAULT_WORST_OF if workload.batch is no_batch else None)
            of_file = PlanRequest(
                request.target_batch, Options(**limits, **options.overrides | chosen, worst_of=worst_of)
            )
            return make_plan(os.fspath(request.model_or_workload), of_file, **listeners)
        if workload.batch is no_batch or options.worst_of is not None:
            batches = make_batches(planning_batch(options.worst_of))
            workload = replace_fields(workload, batch=batches, worst_of=options.worst_of)
        return make_plan(workload, PlanRequest(request.target_batch, Options(**limits, **chosen)), **listeners)

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> TrainingComponents:
        """Build the model and its components from the current random states.

        Args:
            plan: The plan.
            learning_rate: The rate of the first parameter group; other groups keep their ratio to it, and the scheduler
                is built after it is set. None: the optimizer's default.

        Raises:
            UsageError: The scheduler, the precision, the BatchNorm mode or a coupled loss cannot be used.
            WorkloadError: The model cannot be copied for an average.
        """
        _check_scheduler_function(self._request.scheduler, learning_rate)
        model, optimizer = self._build(plan)
        if learning_rate is not None:
            set_learning_rate(optimizer, learning_rate)
        scheduler = self._make_scheduler(optimizer)
        check_scheduler(scheduler, optimizer)
        precision = self._resolve_option("precision", "fp32", plan)
        check_word(precision, "precision", get_args(Precision))
        device = model_device(model)
        coupled = self._resolve_option("coupled", self.objective.coupled, plan)
        objective = with_coupling(self.objective, coupled, UsageError)
        objective.move_criterion(device)
        _check_criterion(objective, optimizer)
        ema_decay = self._request.ema_decay or (EMA_DECAY if "ema" in self._keeps else None)
        savers = read_savers(self._resolve_option("savers", (), plan), UsageError)
        if "offload-optimizer" in savers and needs_buffers(optimizer_parameters(optimizer)):
            raise UsageError(
                "offload-optimizer keeps half-precision weights in float32, and checkpoints would have them rounded",
                hint="keep the parameters in float32 (precision bf16 runs them under autocast), or train by the"
                " Accumulator",
            )
        if not model.training:  # `from_pretrained` leaves it in eval mode. Submodules in eval mode stay so otherwise.
            model.train()
        return TrainingComponents(
            model=model,
            objective=objective,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=choose_scaler(precision, None, device, optimizer_parameters(optimizer)),
            precision=precision,
            batchnorm=checked_batchnorm(self._resolve_option("batchnorm", "micro", plan), model),
            accumulate_in=read_accumulate_in(self._resolve_option("accumulate_in", "fp32", plan), UsageError),
            savers=savers,
            evaluate=self._evaluate,
            averages=None if ema_decay is None else EmaModel(model, ema_decay),
        )

    def _resolve_option(self, name: str, default: Any, plan: Plan | None) -> Any:
        """Return the value that was given, or else the plan's, the workload's, or `default`."""
        requested, own = getattr(self._request.options, name), self._workload
        if requested is not None and not (name == "savers" and self._request.options.chooses_savers):
            return requested
        return choose_option(plan, name, None, default if own is None else getattr(own, name))

    def _build(self, plan: Plan | None) -> tuple[nn.Module, Optimizer]:
        own, optimizer = self._workload, self._request.options.optimizer
        if own is None:
            model: nn.Module = self._request.model_or_workload
            return model, optimizer if isinstance(optimizer, Optimizer) else make_optimizer(optimizer, model)
        model, mesh = own.build_model(), self._choose_mesh(plan)
        check_unsharded(model)
        for module in find_auxiliary_modules(own).values():
            module.to(self.device)
        if mesh is not None:
            # On the host, since a card may not have room for a whole model.
            copy_from_first(join_ranks(), (*model.named_parameters(), *model.named_buffers()))
            model = shard_model(model, self.device, mesh, own.parallelize)
        else:
            model = model.to(self.device)
        return model, own.build_optimizer(model)

    def _choose_mesh(self, plan: Plan | None) -> tuple[int, ...] | None:
        """Return the mesh over which ranks shard the workload's model, as requested or planned; None: all hold it."""
        assert self._workload is not None
        options, ranks = self._request.options, world_size()
        planned = (None, None) if plan is None else (plan.parallel, plan.mesh)
        if ranks == 1 or choose_parallel(options.parallel or planned[0], self._workload.parallelize) == "ddp":
            return None
        mesh = options.mesh or planned[1] or (ranks,)
        check_mesh(mesh, ranks)
        return mesh

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        if self._workload is not None:
            return self._workload.build_scheduler(optimizer)
        scheduler = self._request.scheduler
        made = scheduler(optimizer) if callable(scheduler) else scheduler
        if made is None and scheduler is not None:
            raise UsageError("scheduler(optimizer) returned None", hint="return the scheduler")
        return made

    def _check_model(self, model: nn.Module) -> Objective:
        """Check a live model and its arguments, and return its loss."""
        request = self._request
        check_unsharded(check_model(model))
        if request.data is None:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        loss = read_coupled_loss(request.loss, request.outputs, request.coupled_loss)
        given = {"criterion": request.criterion, "weight": request.weight, "reduction": _reduction(request)}
        objective = choose_objective(loss, **given, plan=None, model=model)
        if isinstance(request.options.optimizer, Optimizer):
            check_optimizer(request.options.optimizer, model)
        if not model.training:  # Planning and training use train mode.
            model.train()
        coupled = objective.coupled if request.options.coupled is None else request.options.coupled
        objective = with_coupling(objective, coupled, UsageError)
        return dataclasses.replace(objective, batching=read_batching(request.split, request.size))

    def _move_model(self, model: nn.Module) -> torch.device:
        """Move a live model to the requested device and return that, unless a live optimizer keeps it where it is."""
        requested, here = self._request.options.device, model_device(model)
        target = here if requested == "auto" and here.type != "cpu" else find_device(requested)
        if target == here:
            return here
        if isinstance(self._request.options.optimizer, Optimizer):
            if requested == "auto":
                return here
            raise UsageError(
                f"the model is on {here}, {target} is requested, and the optimizer already exists",
                hint="move the model first, then create the optimizer",
            )
        model.to(target)
        for module in find_used_modules(self.objective, model, self._request.evaluate).values():
            module.to(target)
        return model_device(model)


def _read_workload(request: FitRequest) -> Workload:
    """Return the workload, with the request's values in place of its own."""
    source = request.model_or_workload
    if not isinstance(source, (str, os.PathLike, Workload)):
        raise UsageError(f"model_or_workload is {describe_type(source)}", hint="give a module, a Workload or a file")
    given = [name for name in _OF_THE_LOSS if getattr(request, name) is not None]
    given += [] if _reduction(request) is None else ["reduction"]
    if given:
        raise UsageError(f"a workload is given, and {given[0]} too", hint="define it in the workload")
    live = {"optimizer": (request.options.optimizer, Optimizer), "scheduler": (request.scheduler, LRScheduler)}
    for name, (value, bound) in live.items():
        if isinstance(value, bound):
            raise UsageError(
                f"a workload is given, and a live {name}, which belongs to another model",
                hint=f"give a function that creates the {name}",
            )
    workload = source if isinstance(source, Workload) else load_workload(os.fspath(source))
    own = {name: getattr(request, name) for name in ("split", "size", "scheduler", "collate", "evaluate")}
    return replace_fields(workload, **request.options.overrides, **own)


def _reduction(request: FitRequest) -> str | None:
    return None if request.reduction == "mean" else request.reduction


def _check_scheduler_function(scheduler: Any, learning_rate: float | None) -> None:
    if learning_rate is not None and scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"learning_rate is {learning_rate:g}, but the {type(scheduler).__name__} already exists",
            hint="give scheduler as a function of the optimizer",
        )


def _check_criterion(objective: Objective, optimizer: Optimizer) -> None:
    criterion = objective.criterion_module
    updated = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    trainable = () if criterion is None else criterion.parameters()
    if any(parameter.requires_grad and id(parameter) not in updated for parameter in trainable):
        raise UsageError(
            f"{type(criterion).__name__} has trainable parameters that the optimizer does not hold",
            hint="include them in the optimizer, make them part of the model, or set requires_grad to False",
        )


def _as_samples(dataset: Any) -> Any:
    return Subset(cast("Dataset[Any]", dataset), range(len(dataset))) if isinstance(dataset, (list, tuple)) else dataset
