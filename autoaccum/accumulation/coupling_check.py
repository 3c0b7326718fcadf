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

_MOST_SECONDS = 0.4
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
    if seconds > _MOST_SECONDS:
        return Coupling(reason="a forward of the model takes too long for an experiment")
    if seconds < _MOST_SECONDS / 4:
        wide = move_batch(cast_batch(batch, torch.float64), device)
        found = find_coupling(_copier(copy.deepcopy(model).double(), widened(objective)), wide, _PARTS)
        if found.reason is None:
            return found  # Whatever does not work in float64 may work as it is.
    return find_coupling(fresh, narrow, _PARTS)


def _time(fresh: Callable[[], tuple[nn.Module, Objective]], batch: Any) -> float:
    """Seconds of one forward; what it raises is told by the experiment."""
    model, objective = fresh()
    began = time.perf_counter()
    with suppress(Exception), torch.no_grad():
        objective.terms(model, cast_batch(batch, None))
    return time.perf_counter() - began


def _copier(model: nn.Module, objective: Objective) -> Callable[[], tuple[nn.Module, Objective]]:
    """What makes equal copies of both: a criterion may keep state, too."""

    def fresh() -> tuple[nn.Module, Objective]:
        criterion = objective.criterion
        if criterion is None or not isinstance(criterion.function, nn.Module):
            return copy.deepcopy(model), objective
        own = dataclasses.replace(criterion, function=copy.deepcopy(criterion.function))
        return copy.deepcopy(model), dataclasses.replace(objective, criterion=own)

    return fresh
