"""What is trained, as it was given: a live model, a Workload, or the workload that a reference names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.planned import choose_objective, choose_recorded
from autoaccum.accumulation.reach import find_beside, find_named
from autoaccum.accumulation.validation import check_model, check_optimizer
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import read_accumulate_in
from autoaccum.planning.planner import plan as make_plan
from autoaccum.planning.records import Plan
from autoaccum.planning.request import LOOKED_AT
from autoaccum.training.events import Printed
from autoaccum.training.request import FitRequest
from autoaccum.training.trainee import Trainee, find_device, make_trainee
from autoaccum.workload.batches import read_batching
from autoaccum.workload.loading import load_workload
from autoaccum.workload.nests import kind
from autoaccum.workload.optimizers import make_optimizer, set_rate
from autoaccum.workload.samples import replace_given
from autoaccum.workload.spec import Workload, no_batch


class WorkloadSubject:
    """A workload, from a file or made in code: its model is built when training begins.

    Attributes:
        name: What reports call it.
        data: What it is trained on.
        eval_data: What it is evaluated on; None: nothing.
        collate: How samples become a batch; None: torch's default_collate.
        evaluation_batch: The micro-batch evaluation begins with; None: that of training.
        batching: How its batches are counted and cut; None: by their rows.
        multiple_of: What its micro-batches are multiples of, where no plan knows better.
        digest: Of its source files; empty where there are none.
        device: Where it will be trained.

    Raises:
        UsageError: It comes with what belongs to another model.
        WorkloadError: It has no data, or an argument in place of its own cannot be used.
    """

    def __init__(self, workload: Workload, request: FitRequest, *, reference: str | None = None) -> None:
        self.device = find_device(request.options.device)
        self._request, self._reference = request, reference
        live = {"optimizer": (request.options.optimizer, Optimizer), "scheduler": (request.scheduler, LRScheduler)}
        for name, (given, bound) in live.items():
            if isinstance(given, bound):
                raise UsageError(
                    f"a workload is given, and a live {name}, which belongs to another model",
                    hint=f"give a function that makes the {name}",
                )
        own = {name: getattr(request, name) for name in ("split", "size", "scheduler", "collate", "evaluate")}
        workload = self._workload = replace_given(workload, **request.options.overrides, **own)
        self.data = _samples(workload.dataset) if request.data is None else request.data
        if self.data is None:
            raise WorkloadError(
                f"{workload.name} has no dataset to train on", hint="define dataset = ... in it, or give data"
            )
        self.eval_data = _samples(workload.evaluation_dataset) if request.eval_data is None else request.eval_data
        self.name, self.digest = workload.name, workload.digest
        self.batching = workload.batching
        self.multiple_of = workload.multiple_of or 1
        self.collate, self.evaluation_batch = workload.collate, workload.evaluation_batch

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """Find the micro-batch by trials: in processes of their own for a file whose code all of it is, else in place.

        Args:
            planning_batch: `Source.planning_batch`: gives `batch(size)` of the data, for what has none of its own.
            on_event: Told of the planner's steps.
        """
        request, workload, options = self._request, self._workload, self._request.options
        in_code = (request.collate, request.evaluate, request.data, request.split)
        is_file = all(value is None for value in in_code) and isinstance(options.optimizer, (str, type(None)))
        asked: dict[str, Any] = {name: getattr(options, name) for name in ("device", "memory", "reserve")}
        if self._reference is not None and is_file:
            worst_of = options.worst_of or (LOOKED_AT if workload.batch is no_batch else None)
            return make_plan(
                self._reference,
                target_batch=request.target_batch,
                on_event=on_event,
                on_output=None if on_event is None else lambda line: on_event(Printed(line)),
                **asked,
                **options.overrides,
                worst_of=worst_of,
            )
        if workload.batch is no_batch or options.worst_of is not None:
            batches = make_batches(planning_batch(options.worst_of))
            workload = replace_given(workload, batch=batches, worst_of=options.worst_of)
        return make_plan(workload, target_batch=request.target_batch, on_event=on_event, **asked)

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> Trainee:
        """A new model, on the device, and what goes with it, from the random states as they are.

        Args:
            plan: What it was planned with.
            learning_rate: Of the first parameter group, the others keep their ratio to it, and a schedule is made of
                an optimizer with that rate; None: the optimizer's own.
        """
        workload = self._workload
        model = workload.build_model().to(self.device)
        for module in find_beside(workload).values():
            module.to(self.device)
        optimizer = workload.build_optimizer(model)
        if learning_rate is not None:
            set_rate(optimizer, learning_rate)
        return make_trainee(
            self._request,
            model,
            workload.objective,
            optimizer,
            scheduler=workload.build_scheduler(optimizer),
            precision=self._planned("precision", "fp32", plan),
            batchnorm=self._planned("batchnorm", "micro", plan),
            evaluate=workload.evaluate,
            accumulate_in=self._planned("accumulate_in", "fp32", plan),
            keeps=workload.keeps,
        )

    def _planned(self, name: str, default: str, plan: Plan | None) -> str:
        """The workload's own setting, or what the plan that was given for the very same files has for a default."""
        own: str = getattr(self._workload, name)
        is_asked = getattr(self._request.options, name) is not None
        if plan is None or self._request.plan is None or is_asked or own != default:
            return own
        return str(plan.workload.get(name) or own) if plan.workload.get("digest", "") == self.digest else own


class LiveSubject:
    """A model that is there already, trained where it is or on the card that is asked for; as `WorkloadSubject`.

    Raises:
        UsageError: What goes with it is missing or cannot be used.
        WorkloadError: Its loss cannot.
    """

    digest = ""

    def __init__(self, request: FitRequest) -> None:
        model: nn.Module = request.subject
        check_model(model)
        if request.data is None:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        self._request, self._model = request, model
        self._reduction = None if request.reduction == "mean" else request.reduction
        self.batching = read_batching(request.split, request.size)
        objective = choose_objective(
            request.loss,
            criterion=request.criterion,
            weight=request.weight,
            reduction=self._reduction,
            plan=None,
            model=model,
        )
        self._objective = dataclasses.replace(objective, batching=self.batching)
        if isinstance(request.options.optimizer, Optimizer):
            check_optimizer(request.options.optimizer, model)
        self.name = type(model).__name__
        self.data, self.eval_data, self.collate = request.data, request.eval_data, request.collate
        self.multiple_of = request.options.multiple_of or 1
        self.evaluation_batch = request.options.evaluation_batch
        self._check_follows(request.learning_rate)
        self._place()
        if not model.training:  # As it will be trained (`make_trainee`), and so is planned.
            model.train()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return model_device(self._model)

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """Find the micro-batch by trials in place: everything is put back after each."""
        request, options = self._request, self._request.options
        asked: dict[str, Any] = {**options.overrides, "memory": options.memory, "reserve": options.reserve}
        del asked["evaluation_batch"]  # It has no batch of the evaluation's data.
        return make_plan(
            target_batch=request.target_batch,
            model=self._model,
            batch=planning_batch(options.worst_of),
            loss=request.loss,
            criterion=request.criterion,
            weight=request.weight,
            split=request.split,
            size=request.size,
            reduction=self._reduction,
            on_event=on_event,
            **asked,
        )

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> Trainee:
        """The model as it is, with the optimizer given, or one made of what was given."""
        request, options = self._request, self._request.options
        planned = {} if plan is None else plan.workload
        optimizer = options.optimizer
        if not isinstance(optimizer, Optimizer):
            optimizer = make_optimizer(optimizer, self._model)
        if learning_rate is not None:
            self._check_follows(learning_rate)
            set_rate(optimizer, learning_rate)
        scheduler = request.scheduler(optimizer) if callable(request.scheduler) else request.scheduler
        if scheduler is None and request.scheduler is not None:
            raise UsageError("scheduler(optimizer) returned None", hint="return the scheduler it makes")
        return make_trainee(
            request,
            self._model,
            self._objective,
            optimizer,
            scheduler=scheduler,
            precision=options.precision or planned.get("precision") or "fp32",
            batchnorm=options.batchnorm or planned.get("batchnorm") or "micro",
            evaluate=request.evaluate,
            accumulate_in=read_accumulate_in(
                choose_recorded(plan, "accumulate_in", options.accumulate_in, "fp32"), UsageError
            ),
            keeps=options.keeps or (),
        )

    def _check_follows(self, learning_rate: float | None) -> None:
        scheduler = self._request.scheduler
        if learning_rate is not None and scheduler is not None and not callable(scheduler):
            raise UsageError(
                f"the learning rate is to be {learning_rate:g}, and the {type(scheduler).__name__} was made before it",
                hint="give scheduler as a function that makes it of the optimizer",
            )

    def _place(self) -> None:
        """On the card that is asked for; an optimizer that is there already has its state where the model is."""
        asked, here = self._request.options.device, model_device(self._model)
        wanted = here if asked == "auto" and here.type != "cpu" else find_device(asked)
        if wanted == here:
            return
        if isinstance(self._request.options.optimizer, Optimizer):
            if asked == "auto":
                return
            raise UsageError(
                f"the model is on {here}, the device is to be {wanted}, and its optimizer is there already",
                hint="move the model first, then make the optimizer",
            )
        self._model.to(wanted)
        for module in find_named(self._objective, self._model, self._request.evaluate).values():
            module.to(wanted)


Subject: TypeAlias = "WorkloadSubject | LiveSubject"


def find_subject(request: FitRequest) -> Subject:
    """The subject of a request.

    Raises:
        UsageError: It is none of these, or comes with arguments that belong to another.
        WorkloadError: The workload is not usable.
    """
    subject = request.subject
    if isinstance(subject, nn.Module):
        return LiveSubject(request)
    if not isinstance(subject, (str, os.PathLike, Workload)):
        raise UsageError(f"what is to be trained is {kind(subject)}", hint="give an nn.Module, a Workload, or a file")
    given = [name for name in ("loss", "criterion", "weight") if getattr(request, name) is not None]
    given += ["reduction"] if request.reduction != "mean" else []
    if given:
        raise UsageError(f"a workload is given, and {given[0]} too", hint="write it into the workload")
    if isinstance(subject, Workload):
        return WorkloadSubject(subject, request)
    reference = os.fspath(subject)
    return WorkloadSubject(load_workload(reference), request, reference=reference)


class _ListedSamples(Dataset[Any]):
    """A list of samples, which elsewhere would count as one of batches."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def _samples(dataset: Any) -> Any:
    """A workload's dataset; a list or tuple there is one of samples."""
    return _ListedSamples(dataset) if isinstance(dataset, (list, tuple)) else dataset
