"""The cheap experiment on coupled samples, as a plan and a training make it: two pairs of samples, on a copy."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.company.allotment import TOO_LONG, Allotment, TooLong
from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.module_calls import following
from autoaccum.accumulation.coupling import Fresh, find_coupling, reason_of
from autoaccum.workload.batches import move_batch, split_batch
from autoaccum.workload.copies import copy_module
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
_PART = 2
"""Not of one sample, which BatchNorm and contrastive losses cannot do."""

_SECONDS = 1.5
_MOST_SECONDS = 0.25
_MOST_WIDE_SECONDS = 0.1
"""Of the whole experiment, and of one forward: about ten follow. In float64 a convolution may be far slower."""

_FIRST_SECONDS = 0.8
"""Of the very first, which may load more than it runs."""

_LARGE = Coupling(reason="the model is too large for an experiment beside it")
_LONG = Coupling(reason=TOO_LONG)
_FIXED = Coupling(reason="the model cannot be copied")


def check_workload(workload: Workload, model: nn.Module) -> Coupling:
    """Find out whether the workload's samples are coupled; whatever goes wrong is the reason of what is returned.

    Args:
        workload: The workload; its model is built once more.
        model: One that was built of it, to tell its size by.
    """

    def look() -> Coupling:
        own, copied = make_copy(workload)
        each = workload.multiple_of or 1
        part = -(-_PART // each) * each
        batch = take_small_batch(workload, 2 * part)
        return _check(own, workload.objective, batch, workload.batchnorm, part) if copied else _FIXED

    return _guarded(model, look)


def check_live(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    """Find out whether the samples of a model that is to be trained are coupled; nothing of it is changed.

    Args:
        model: The model.
        objective: Its loss.
        batch: Four samples.
        batchnorm: The mode of its BatchNorms (`workload.modes.BatchNormMode`).
    """

    def look() -> Coupling:
        own, copied = copy_model(model)
        if not copied:
            return _FIXED
        prepare(own)
        return _check(own, objective, batch, batchnorm)

    return _guarded(model, look)


def _guarded(model: nn.Module, look: Callable[[], Coupling]) -> Coupling:
    """What `look` finds out; the user's code that fails within it must not end what can be done without."""
    if is_large(model):
        return _LARGE
    try:
        with own_randomness():
            return look()
    except TooLong:
        return _LONG
    except (Exception, SystemExit) as error:
        return Coupling(reason=reason_of(error))


def _check(model: nn.Module, objective: Objective, batch: Any, batchnorm: str, part: int = _PART) -> Coupling:
    parts = (part, part)
    if batchnorm == "frozen":
        objective = _with_own_criterion(objective)
        for module in find_batchnorms(model, objective.criterion_module):
            module.eval()
    device = model_device(model)
    narrow = move_batch(cast_batch(batch, None), device)
    fresh = _copier(model, objective)
    if not _is_quick(fresh, narrow, _MOST_SECONDS):
        return _LONG
    _is_quick(fresh, split_batch(narrow, parts)[0], _MOST_SECONDS)  # What the user caches has the training's type.
    importlib.import_module("torch._dynamo")  # The first dispatch mode loads it: a second, and not the model's.
    allotted = Allotment(_SECONDS)
    with suppress(Exception, SystemExit):  # Whatever does not work in float64 may work as it is.
        wide = move_batch(cast_batch(batch, torch.float64), device)
        widen = _copier(copy_module(model).double(), widened(objective))
        if _is_quick(widen, wide, _MOST_WIDE_SECONDS):
            found = find_coupling(_within(allotted, widen), wide, parts)
            if found.reason is None or found.found:
                return found
    return find_coupling(_within(allotted, fresh), narrow, parts)


def _is_quick(fresh: Fresh, batch: Any, most_seconds: float) -> bool:
    """Whether a forward takes no longer than that: the first, which may load more than it runs, or one more."""
    return any(_ends(fresh, batch, seconds, most_seconds) for seconds in (_FIRST_SECONDS, most_seconds))


def _ends(fresh: Fresh, batch: Any, seconds: float, most_seconds: float) -> bool:
    """Whether a forward, ended after `seconds`, took at most the other; what it raises is told by the experiment."""
    model, objective = fresh()
    allotted = Allotment(seconds)
    with suppress(Exception, SystemExit, TooLong), torch.no_grad(), following(model, allotted):
        objective.terms(model, cast_batch(batch, None))
    return allotted.used <= most_seconds


def _within(allotted: Allotment, fresh: Fresh) -> Fresh:
    """The same, as long as there is time for another run."""

    def timed() -> tuple[nn.Module, Objective]:
        allotted.begin_run()
        return fresh()

    return timed


def _copier(model: nn.Module, objective: Objective) -> Fresh:
    """What makes equal copies of both: a criterion may keep state, too. Parameters are shared."""

    def fresh() -> tuple[nn.Module, Objective]:
        own = copy_module(model, {id(parameter): parameter for parameter in model.parameters()})
        return own, _with_own_criterion(objective)

    return fresh


def _with_own_criterion(objective: Objective) -> Objective:
    if objective.criterion is None or objective.criterion_module is None:
        return objective
    used = dataclasses.replace(objective.criterion, function=copy.deepcopy(objective.criterion_module))
    return dataclasses.replace(objective, criterion=used)
