"""The cheap experiment on coupled samples, as a plan and a training make it: two pairs of samples, on a copy."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.calls import Call, following
from autoaccum.accumulation.company import Coupling
from autoaccum.accumulation.coupling import find_coupling
from autoaccum.workload.batches import move_batch
from autoaccum.workload.experiments import (
    cast_batch,
    copy_model,
    is_large,
    make_copy,
    own_randomness,
    prepare,
    widened,
)
from autoaccum.workload.sampling import take_small_batch
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import Objective

SAMPLES = 4
_PARTS = (2, 2)
"""Not of one sample, which BatchNorm and contrastive losses cannot do."""

_MOST_SECONDS = 0.8
"""Of one forward; there are about a dozen, in float64 where one takes a quarter of this."""

_LARGE = Coupling(reason="the model is too large for an experiment beside it")
_FIXED = Coupling(reason="the model cannot be copied")


def check_workload(workload: Workload, model: nn.Module) -> Coupling:
    """Find out whether the workload's samples are coupled.

    Args:
        workload: The workload; its model is built once more.
        model: One that was built of it, to tell its size by.

    Raises:
        WorkloadError: `model` or `batch` raises. What else goes wrong is the reason of what is returned.
    """
    if is_large(model):
        return _LARGE
    with own_randomness():
        own, copied = make_copy(workload)
        batch = take_small_batch(workload, SAMPLES)
        return _check(own, workload.objective, batch, workload.batchnorm) if copied else _FIXED


def check_live(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    """Find out whether the samples of a model that is to be trained are coupled; nothing of it is changed.

    Args:
        model: The model.
        objective: Its loss.
        batch: Four samples.
        batchnorm: The mode of its BatchNorms (`workload.modes.BatchNormMode`).
    """
    if is_large(model):
        return _LARGE
    try:
        with own_randomness():
            own, copied = copy_model(model)
            if not copied:
                return _FIXED
            prepare(own)
            return _check(own, objective, batch, batchnorm)
    except Exception as error:
        return Coupling(reason=f"{type(error).__name__}: {error}".partition("\n")[0])


def _check(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    if batchnorm == "frozen":
        for module in find_batchnorms(model):
            module.eval()
    device = model_device(model)
    narrow = move_batch(cast_batch(batch, None), device)
    fresh = _copier(model, objective)
    seconds = _time(fresh, narrow)
    if seconds is None:
        return Coupling(reason="a forward of the model takes too long for an experiment")
    if seconds < _MOST_SECONDS / 4:
        wide = move_batch(cast_batch(batch, torch.float64), device)
        found = find_coupling(_copier(copy.deepcopy(model).double(), widened(objective)), wide, _PARTS)
        if found.reason is None:
            return found  # Whatever does not work in float64 may work as it is.
    return find_coupling(fresh, narrow, _PARTS)


class _TooLong(BaseException):
    """Ends a forward, whatever the user's code catches."""


class _Deadline:
    """Follows a forward and ends it where it takes too long: on a CPU, that of a language model may take a minute."""

    def __init__(self) -> None:
        self._began = time.thread_time()  # What else the machine does must not decide what a plan says.

    @property
    def seconds(self) -> float:
        return time.thread_time() - self._began

    def entered(self, call: Call, arguments: Any) -> Any:
        if self.seconds > _MOST_SECONDS:
            raise _TooLong
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        return output


def _time(fresh: Callable[[], tuple[nn.Module, Objective]], batch: Any) -> float | None:
    """Seconds of one forward, None where they are too many; what it raises is told by the experiment."""
    model, objective = fresh()
    deadline = _Deadline()
    try:
        with suppress(Exception), torch.no_grad(), following(model, deadline):
            objective.terms(model, cast_batch(batch, None))
    except _TooLong:
        return None
    return deadline.seconds if deadline.seconds <= _MOST_SECONDS else None


def _copier(model: nn.Module, objective: Objective) -> Callable[[], tuple[nn.Module, Objective]]:
    """What makes equal copies of both: a criterion may keep state, too. Parameters are shared."""

    def fresh() -> tuple[nn.Module, Objective]:
        own = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        criterion = objective.criterion
        if criterion is None or not isinstance(criterion.function, nn.Module):
            return own, objective
        used = dataclasses.replace(criterion, function=copy.deepcopy(criterion.function))
        return own, dataclasses.replace(objective, criterion=used)

    return fresh
