"""What is to be trained, as it was given (a live model, a Workload, the file of one), and what is made of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from autoaccum.accumulation.argument_checks import check_model, check_optimizer, check_precision, check_scheduler
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm_modes import checked_batchnorm
from autoaccum.accumulation.gradients import choose_scaler
from autoaccum.accumulation.plan_check import choose_objective, unwrap_model
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, find_used_modules
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.checks import describe_type
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.devices.loop_memory import EMA_DECAY, EmaModel
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import AccumulateIn, BatchNormMode, Options, read_accumulate_in
from autoaccum.planning.device_choice import card_index, check_device
from autoaccum.planning.plan import Plan
from autoaccum.planning.plan_request import DEFAULT_WORST_OF, PlanRequest
from autoaccum.planning.planner import make_plan
from autoaccum.training.fit_events import WorkloadOutput
from autoaccum.training.fit_request import FitRequest
from autoaccum.workload.batches import read_batching
from autoaccum.workload.loading import load_workload
from autoaccum.workload.objective import Objective
from autoaccum.workload.optimizers import make_optimizer, set_learning_rate
from autoaccum.workload.samples import replace_fields
from autoaccum.workload.spec import Workload, no_batch


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """What is trained, in place on its device.

    Attributes:
        model: The model.
        objective: The loss.
        optimizer: Its optimizer.
        scheduler: The schedule of its learning rate; None when there is none.
        scaler: The loss scaler of fp16; None otherwise.
        precision: `fp32`, `bf16` or `fp16`.
        batchnorm: `micro`, `running` or `frozen`.
        accumulate_in: `fp32` or `parameters`.
        evaluate: The workload's own `evaluate(model, batch)`; None: the loss is evaluated.
        averages: The average of its weights; None: none is kept.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    scheduler: Any
    scaler: GradScaler | None
    precision: str
    batchnorm: BatchNormMode
    accumulate_in: AccumulateIn
    evaluate: Callable[..., Any] | None
    averages: EmaModel | None = None

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return model_device(self.model)

    @property
    def devices(self) -> list[torch.device]:
        """Every device that parameters or buffers are on: a model may be on two cards."""
        return list(dict.fromkeys(tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())))

    @property
    def beside(self) -> list[nn.Module]:
        """The criterion, where it is a module, and other modules that the loss names."""
        named = find_used_modules(self.objective, unwrap_model(self.model)).values()
        criterion = self.objective.criterion_module
        return [*named] if criterion is None else [criterion, *named]


def find_device(asked: str) -> torch.device:
    """The device called `auto` (the first card, where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: There is none of that name here.
    """
    check_device(asked)
    index = card_index(asked)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


class TrainingSetup:
    """What is to be trained: a workload, whose model is built when training begins, or a model that is there already.

    A live model is trained where it is or on the card that is asked for.

    Attributes:
        name: What reports call it.
        data: What it is trained on.
        eval_data: What it is evaluated on; None: nothing.
        collate: How samples become a batch; None: torch's default_collate.
        evaluation_batch: The micro-batch evaluation begins with; None: that of training.
        objective: The loss.
        multiple_of: What its micro-batches are multiples of, where no plan knows better.
        digest: Of its source files; empty where there are none.
        device: Where it will be trained.

    Raises:
        UsageError: The request's subject is none of these, or comes with what belongs to another.
        WorkloadError: It has no data, or cannot be used.
    """

    def __init__(self, request: FitRequest) -> None:
        self._request = request
        given = request.subject
        self._workload = own = None if isinstance(given, nn.Module) else _read_workload(request)
        self.data, self.eval_data = request.data, request.eval_data
        if own is None:
            self.name, self.digest = type(given).__name__, ""
            self.objective = self._check_model(given)
            self.collate, self._evaluate = request.collate, request.evaluate
            self.multiple_of = request.options.multiple_of or 1
            self.evaluation_batch = request.options.evaluation_batch
            self._keeps: Sequence[str] = request.options.keeps or ()
            self.device = self._place(given)
            return
        self.name, self.digest, self.objective = own.name, own.digest, own.objective
        self.data = _samples(own.dataset) if self.data is None else self.data
        if self.data is None:
            raise WorkloadError(
                f"{own.name} has no dataset to train on", hint="define dataset = ... in it, or give data"
            )
        self.eval_data = _samples(own.evaluation_dataset) if self.eval_data is None else self.eval_data
        self.collate, self._evaluate, self.multiple_of = own.collate, own.evaluate, own.multiple_of or 1
        self.evaluation_batch, self._keeps = own.evaluation_batch, own.keeps
        self.device = find_device(request.options.device)

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """Find the micro-batch by trials: in processes of their own for a file whose code all of it is, else in place.

        Args:
            planning_batch: `Source.planning_batch`: gives `batch(size)` of the data, for what has none of its own.
            on_event: Told of the planner's steps.
        """
        request, options, workload = self._request, self._request.options, self._workload
        limits: dict[str, Any] = {"memory": options.memory, "reserve": options.reserve}
        if workload is None:
            live = {name: getattr(request, name) for name in ("loss", "criterion", "weight", "split", "size")}
            live |= {"model": request.subject, "batch": planning_batch(options.worst_of)}
            live["reduction"] = _reduction(request)
            limits |= {**options.overrides, "evaluation_batch": None}  # It has no batch of the evaluation's data.
            return make_plan(None, PlanRequest(request.target_batch, Options(**limits)), live=live, on_event=on_event)
        limits["device"] = options.device
        in_code = (request.collate, request.evaluate, request.data, request.split)
        is_file = not isinstance(request.subject, Workload) and isinstance(options.optimizer, (str, type(None)))
        if is_file and all(value is None for value in in_code):
            worst_of = options.worst_of or (DEFAULT_WORST_OF if workload.batch is no_batch else None)
            asked = PlanRequest(request.target_batch, Options(**limits, **options.overrides, worst_of=worst_of))
            said = None if on_event is None else lambda line: on_event(WorkloadOutput(line))
            return make_plan(os.fspath(request.subject), asked, on_event=on_event, on_output=said)
        if workload.batch is no_batch or options.worst_of is not None:
            batches = make_batches(planning_batch(options.worst_of))
            workload = replace_fields(workload, batch=batches, worst_of=options.worst_of)
        return make_plan(workload, PlanRequest(request.target_batch, Options(**limits)), on_event=on_event)

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> TrainingComponents:
        """The model and what goes with it, from the random states as they are.

        Args:
            plan: What it was planned with.
            learning_rate: Of the first parameter group, the others keep their ratio to it, and a schedule is made of
                an optimizer with that rate; None: the optimizer's own.

        Raises:
            UsageError: The scheduler, the precision or the mode of BatchNorm cannot be used.
            WorkloadError: The model cannot be copied for an average.
        """
        if self._workload is None:
            _check_follows(self._request.scheduler, learning_rate)
        model, optimizer = self._make()
        if learning_rate is not None:
            set_learning_rate(optimizer, learning_rate)
        scheduler = self._make_scheduler(optimizer)
        check_scheduler(scheduler, optimizer)
        precision = self._setting("precision", "fp32", plan)
        check_precision(precision)
        device = model_device(model)
        self.objective.move_criterion(device)
        _check_criterion(self.objective, optimizer)
        ema_decay = _choose_ema_decay(self._request.ema_decay, self._keeps)
        if not model.training:  # As `from_pretrained` leaves it; single modules that are at rest stay so otherwise.
            model.train()
        return TrainingComponents(
            model=model,
            objective=self.objective,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=choose_scaler(precision, None, device, optimizer_parameters(optimizer)),
            precision=precision,
            batchnorm=checked_batchnorm(self._setting("batchnorm", "micro", plan), model),
            accumulate_in=read_accumulate_in(self._setting("accumulate_in", "fp32", plan), UsageError),
            evaluate=self._evaluate,
            averages=None if ema_decay is None else EmaModel(model, ema_decay),
        )

    def _setting(self, name: str, default: str, plan: Plan | None) -> str:
        """What is asked for, or the workload's own, or what a plan that was given for the very same files has."""
        asked, own = getattr(self._request.options, name), self._workload
        chosen: str = asked or (default if own is None else getattr(own, name))
        if asked is not None or chosen != default or plan is None:
            return chosen
        if own is not None and (self._request.plan is None or plan.workload.get("digest", "") != self.digest):
            return chosen
        return str(plan.workload.get(name) or chosen)

    def _make(self) -> tuple[nn.Module, Optimizer]:
        own, optimizer = self._workload, self._request.options.optimizer
        if own is None:
            model: nn.Module = self._request.subject
            return model, optimizer if isinstance(optimizer, Optimizer) else make_optimizer(optimizer, model)
        model = own.build_model().to(self.device)
        for module in find_auxiliary_modules(own).values():
            module.to(self.device)
        return model, own.build_optimizer(model)

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        if self._workload is not None:
            return self._workload.build_scheduler(optimizer)
        scheduler = self._request.scheduler
        made = scheduler(optimizer) if callable(scheduler) else scheduler
        if made is None and scheduler is not None:
            raise UsageError("scheduler(optimizer) returned None", hint="return the scheduler it makes")
        return made

    def _check_model(self, model: nn.Module) -> Objective:
        """The loss of a live model that has all that goes with it."""
        request = self._request
        check_model(model)
        if request.data is None:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        given = {name: getattr(request, name) for name in ("criterion", "weight")}
        objective = choose_objective(request.loss, **given, reduction=_reduction(request), plan=None, model=model)
        if isinstance(request.options.optimizer, Optimizer):
            check_optimizer(request.options.optimizer, model)
        _check_follows(request.scheduler, request.learning_rate)
        if not model.training:  # As it will be trained, and so is planned.
            model.train()
        return dataclasses.replace(objective, batching=read_batching(request.split, request.size))

    def _place(self, model: nn.Module) -> torch.device:
        """Where a live model is put: an optimizer that is there already has its state where the model is."""
        asked, here = self._request.options.device, model_device(model)
        wanted = here if asked == "auto" and here.type != "cpu" else find_device(asked)
        if wanted == here:
            return here
        if isinstance(self._request.options.optimizer, Optimizer):
            if asked == "auto":
                return here
            raise UsageError(
                f"the model is on {here}, the device is to be {wanted}, and its optimizer is there already",
                hint="move the model first, then make the optimizer",
            )
        model.to(wanted)
        for module in find_used_modules(self.objective, model, self._request.evaluate).values():
            module.to(wanted)
        return model_device(model)


def _read_workload(request: FitRequest) -> Workload:
    """The workload that is to be trained, with what the request has in place of its own."""
    subject = request.subject
    if not isinstance(subject, (str, os.PathLike, Workload)):
        raise UsageError(
            f"what is to be trained is {describe_type(subject)}", hint="give an nn.Module, a Workload, or a file"
        )
    given = [name for name in ("loss", "criterion", "weight") if getattr(request, name) is not None]
    given += [] if _reduction(request) is None else ["reduction"]
    if given:
        raise UsageError(f"a workload is given, and {given[0]} too", hint="write it into the workload")
    live = {"optimizer": (request.options.optimizer, Optimizer), "scheduler": (request.scheduler, LRScheduler)}
    for name, (value, bound) in live.items():
        if isinstance(value, bound):
            raise UsageError(
                f"a workload is given, and a live {name}, which belongs to another model",
                hint=f"give a function that makes the {name}",
            )
    workload = subject if isinstance(subject, Workload) else load_workload(os.fspath(subject))
    own = {name: getattr(request, name) for name in ("split", "size", "scheduler", "collate", "evaluate")}
    return replace_fields(workload, **request.options.overrides, **own)


def _reduction(request: FitRequest) -> str | None:
    return None if request.reduction == "mean" else request.reduction


def _check_follows(scheduler: Any, learning_rate: float | None) -> None:
    if learning_rate is not None and scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"the learning rate is to be {learning_rate:g}, and the {type(scheduler).__name__} was made before it",
            hint="give scheduler as a function that makes it of the optimizer",
        )


def _choose_ema_decay(decay: float | None, keeps: Sequence[str]) -> float | None:
    """The decay of the average of the weights that is asked for; None: none is kept."""
    if "ema" in keeps:
        return EMA_DECAY if decay is None else decay
    if decay is not None:
        raise UsageError(
            f"ema_decay is {decay:g}, and no average of the weights is kept",
            hint='ask for one: keeps="ema" (--keeps ema)',
        )
    return None


def _check_criterion(objective: Objective, optimizer: Optimizer) -> None:
    criterion = objective.criterion_module
    updated = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    trainable = () if criterion is None else criterion.parameters()
    if any(parameter.requires_grad and id(parameter) not in updated for parameter in trainable):
        raise UsageError(
            f"{type(criterion).__name__} has trainable parameters that the optimizer does not hold",
            hint="give an optimizer of both, make it a part of the model, or set requires_grad to False",
        )


def _samples(dataset: Any) -> Any:
    """A workload's dataset; a list or tuple there is one of samples."""
    return Subset(cast("Dataset[Any]", dataset), range(len(dataset))) if isinstance(dataset, (list, tuple)) else dataset
