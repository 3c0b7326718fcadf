"""What is trained, as it was given: a live model, a Workload, or the workload that a reference names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.errors import UsageError
from autoaccum.planning.records import Plan
from autoaccum.training.request import FitRequest
from autoaccum.training.subjects.live_subject import LiveSubject
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.training.subjects.workload_subject import WorkloadSubject
from autoaccum.workload.batches import Batching
from autoaccum.workload.loading import load_workload
from autoaccum.workload.nests import kind
from autoaccum.workload.spec import Workload


class Subject(Protocol):
    """What is trained, before it is built.

    Attributes:
        name: What reports call it.
        data: What it is trained on.
        eval_data: What it is evaluated on; None: nothing.
        collate: How samples become a batch; None: torch's default_collate.
        evaluation_batch: The micro-batch evaluation begins with; None: that of training.
        batching: How its batches are counted and cut; None: by their rows.
        multiple_of: What its micro-batches are multiples of, where no plan knows better.
        digest: Of its source files; empty where there are none.
    """

    name: str
    data: Any
    eval_data: Any
    collate: Callable[[list[Any]], Any] | None
    evaluation_batch: int | None
    batching: Batching | None
    multiple_of: int
    digest: str

    @property
    def device(self) -> torch.device:
        """Where it will be trained."""

    def plan(self, planning_batch: Callable[..., Any], on_event: Callable[[Any], Any] | None) -> Plan:
        """Find the micro-batch by trials that leave no trace.

        Args:
            planning_batch: Gives `batch(size)` of the data, or one batch of it, for what has no `batch` of its own;
                `Source.planning_batch`.
            on_event: Told of the planner's steps.
        """

    def build(self, plan: Plan | None, learning_rate: float | None = None) -> Trainee:
        """What is trained, on its device; a workload's model is built now, from the random states as they are.

        Args:
            plan: What it was planned with.
            learning_rate: Of the first parameter group, the others keep their ratio to it; None: the optimizer's own.
        """

    def make_scheduler(self, optimizer: Optimizer) -> Any:
        """The schedule of the learning rate of `optimizer`, or what was given for one; None when there is none."""


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
