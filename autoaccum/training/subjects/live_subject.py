"""A live model to be trained where it is, or on the card that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.planned import choose_accumulation, choose_objective
from autoaccum.accumulation.reach import find_named
from autoaccum.accumulation.validation import check_model, check_optimizer
from autoaccum.errors import UsageError
from autoaccum.planning.planner import plan
from autoaccum.planning.records import Plan
from autoaccum.training.request import FitRequest
from autoaccum.training.subjects.trainee import Trainee, choose_ema_decay, find_device, make_trainee
from autoaccum.workload.batches import read_batching
from autoaccum.workload.learning_rates import set_rate
from autoaccum.workload.optimizers import make_optimizer


class LiveSubject:
    """A model that is there already; the optimizer may be, too. See `subjects.Subject`.

    Raises:
        UsageError: What goes with it is missing or cannot be used.
        WorkloadError: Its loss cannot.
    """

    digest = ""

    def __init__(self, request: FitRequest) -> None:
        model = request.subject
        check_model(model)
        if request.data is None:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        self._request = request
        self._model: nn.Module = model
        self._objective = choose_objective(
            request.loss,
            criterion=request.criterion,
            weight=request.weight,
            reduction=None if request.reduction == "mean" else request.reduction,
            plan=None,
            model=model,
        )
        self.batching = read_batching(request.split, request.size)
        self._objective = dataclasses.replace(self._objective, batching=self.batching)
        if isinstance(request.optimizer, Optimizer):
            check_optimizer(request.optimizer, model)
        self.name = type(model).__name__
        self.data, self.eval_data = request.data, request.eval_data
        self.multiple_of = request.multiple_of or 1
        self.collate, self.evaluation_batch = request.collate, request.evaluation_batch
        if request.learning_rate is not None:
            _check_follows(request.scheduler, request.learning_rate)
        self._place()
        if not model.training:  # As it will be trained (`make_trainee`), and so is planned.
            model.train()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return model_device(self._model)

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """By trials in place: everything is put back after each."""
        request = self._request
        return plan(
            target_batch=request.target_batch,
            model=self._model,
            batch=planning_batch(request.worst_of),
            loss=request.loss,
            criterion=request.criterion,
            weight=request.weight,
            split=request.split,
            size=request.size,
            reduction=None if request.reduction == "mean" else request.reduction,
            optimizer=request.optimizer,
            precision=request.precision,
            batchnorm=request.batchnorm,
            keeps=request.keeps,
            multiple_of=request.multiple_of,
            accumulate_in=request.accumulate_in,
            memory=request.memory,
            reserve=request.reserve,
            on_event=on_event,
        )

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> Trainee:
        """The model as it is, with the optimizer given, or one made of what was given."""
        request = self._request
        planned = {} if plan is None else plan.workload
        optimizer = request.optimizer
        if not isinstance(optimizer, Optimizer):
            optimizer = make_optimizer(optimizer, self._model)
        if learning_rate is not None:
            _check_follows(request.scheduler, learning_rate)
            set_rate(optimizer, learning_rate)
        return make_trainee(
            self._model,
            self._objective,
            optimizer,
            scheduler=self.make_scheduler(optimizer),
            precision=request.precision or planned.get("precision") or "fp32",
            batchnorm=request.batchnorm or planned.get("batchnorm") or "micro",
            evaluate=request.evaluate,
            accumulate_in=choose_accumulation(plan, request.accumulate_in),
            ema_decay=choose_ema_decay(request, request.keeps or ()),
        )

    def make_scheduler(self, optimizer: Optimizer) -> Any:
        """What was given: a function makes one of it."""
        given = self._request.scheduler
        if not callable(given):
            return given
        made = given(optimizer)
        if made is None:
            raise UsageError("scheduler(optimizer) returned None", hint="return the scheduler it makes")
        return made

    def _place(self) -> None:
        """On the card that is asked for; an optimizer that is there already has its state where the model is."""
        asked, here = self._request.device, model_device(self._model)
        wanted = here if asked == "auto" and here.type != "cpu" else find_device(asked)
        if wanted == here:
            return
        if isinstance(self._request.optimizer, Optimizer):
            if asked == "auto":
                return
            raise UsageError(
                f"the model is on {here}, the device is to be {wanted}, and its optimizer is there already",
                hint="move the model first, then make the optimizer",
            )
        self._model.to(wanted)
        for module in find_named(self._objective, self._model, self._request.evaluate).values():
            module.to(wanted)


def _check_follows(scheduler: Any, learning_rate: float) -> None:
    if scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"the learning rate is to be {learning_rate:g}, and the {type(scheduler).__name__} was made before it",
            hint="give scheduler as a function that makes it of the optimizer",
        )
