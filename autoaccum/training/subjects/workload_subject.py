"""A workload to be trained: its model is built when training begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from autoaccum.accumulation.reach import find_beside
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.planner import plan
from autoaccum.planning.records import Plan
from autoaccum.planning.request import LOOKED_AT
from autoaccum.training.events import Printed
from autoaccum.training.request import FitRequest
from autoaccum.training.subjects.trainee import Trainee, choose_ema_decay, find_device, make_trainee
from autoaccum.workload.adaptation import replace_given
from autoaccum.workload.learning_rates import set_rate
from autoaccum.workload.spec import Workload, no_batch


class WorkloadSubject:
    """A workload, from a file or made in code. See `subjects.Subject`.

    Raises:
        UsageError: It comes with what belongs to another model.
        WorkloadError: It has no data, or an argument in place of its own cannot be used.
    """

    def __init__(self, workload: Workload, request: FitRequest, *, reference: str | None = None) -> None:
        self._device = find_device(request.device)
        self._request, self._reference = request, reference
        for name, bound in (("optimizer", Optimizer), ("scheduler", LRScheduler)):
            if isinstance(getattr(request, name), bound):
                raise UsageError(
                    f"a workload is given, and a live {name}, which belongs to another model",
                    hint=f"give a function that makes the {name}",
                )
        workload = replace_given(
            workload,
            precision=request.precision,
            batchnorm=request.batchnorm,
            multiple_of=request.multiple_of,
            accumulate_in=request.accumulate_in,
            split=request.split,
            size=request.size,
            optimizer=request.optimizer,
            scheduler=request.scheduler,
            collate=request.collate,
            evaluate=request.evaluate,
            evaluation_batch=request.evaluation_batch,
            keeps=request.keeps,
        )
        self._workload = workload
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

    @property
    def device(self) -> torch.device:
        """What was asked for; `auto` is the first card, where there is one."""
        return self._device

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """In processes of their own for a file whose code all of it is, in place otherwise."""
        request, workload = self._request, self._workload
        in_code = (request.collate, request.evaluate, request.data, request.split)
        is_file = all(value is None for value in in_code) and isinstance(request.optimizer, (str, type(None)))
        asked: dict[str, Any] = {"device": request.device, "memory": request.memory, "reserve": request.reserve}
        if self._reference is not None and is_file:
            asked |= {
                "precision": request.precision,
                "batchnorm": request.batchnorm,
                "multiple_of": request.multiple_of,
                "accumulate_in": request.accumulate_in,
                "optimizer": request.optimizer,
                "evaluation_batch": request.evaluation_batch,
                "keeps": request.keeps,
                "worst_of": request.worst_of or (LOOKED_AT if workload.batch is no_batch else None),
            }
            on_output = None if on_event is None else lambda line: on_event(Printed(line))
            return plan(
                self._reference,
                target_batch=request.target_batch,
                on_event=on_event,
                on_output=on_output,
                **asked,
            )
        if workload.batch is no_batch or request.worst_of is not None:
            batches = make_batches(planning_batch(request.worst_of))
            workload = replace_given(workload, batch=batches, worst_of=request.worst_of)
        return plan(workload, target_batch=request.target_batch, on_event=on_event, **asked)

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> Trainee:
        """A new model, on the device, and what goes with it; the schedule is made of an optimizer with that rate."""
        workload = self._workload
        model = workload.build_model().to(self._device)
        for module in find_beside(workload).values():
            module.to(self._device)
        optimizer = workload.build_optimizer(model)
        if learning_rate is not None:
            set_rate(optimizer, learning_rate)
        return make_trainee(
            model,
            workload.objective,
            optimizer,
            scheduler=self.make_scheduler(optimizer),
            precision=self._planned("precision", "fp32", plan),
            batchnorm=self._planned("batchnorm", "micro", plan),
            evaluate=workload.evaluate,
            accumulate_in=self._planned("accumulate_in", "fp32", plan),
            ema_decay=choose_ema_decay(self._request, workload.keeps),
        )

    def make_scheduler(self, optimizer: Optimizer) -> Any:
        """That of the workload, or what was given instead."""
        return self._workload.build_scheduler(optimizer)

    def _planned(self, name: str, default: str, plan: Plan | None) -> str:
        """The workload's own setting, or what the plan that was given for the very same files has for a default."""
        own: str = getattr(self._workload, name)
        if plan is None or self._request.plan is None or getattr(self._request, name) is not None or own != default:
            return own
        return str(plan.workload.get(name) or own) if plan.workload.get("digest", "") == self.digest else own


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
