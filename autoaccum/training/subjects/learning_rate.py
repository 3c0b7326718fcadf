"""Which learning rate a training begins with: the one given, that of its plan, or the optimizer's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autoaccum.planning.records import Plan
from autoaccum.training.events import Noted
from autoaccum.training.request import FitRequest
from autoaccum.training.subjects.subject import Subject
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.workload.learning_rates import rate_is_followed

_ROUNDING = 1e-6
"""Of a rate that is a tensor in float32."""


def choose_learning_rate(request: FitRequest, plan: Plan | None, tell: Callable[[Any], Any]) -> float | None:
    """What was given, else what the plan was tuned with, which is told; None: the optimizer's own."""
    if request.learning_rate is not None or plan is None or plan.learning_rate is None:
        return request.learning_rate
    tell(Noted(f"the learning rate is {plan.learning_rate:.6g}: the plan was tuned with it", warns=False))
    return plan.learning_rate


def tell_of_schedule(
    learning_rate: float | None, subject: Subject, trainee: Trainee, tell: Callable[[Any], Any]
) -> None:
    """Say so where a schedule, such as `OneCycleLR(max_lr=1.0)`, has rates of its own instead."""
    if learning_rate is None or trainee.scheduler is None:
        return
    begins = float(trainee.optimizer.param_groups[0].get("initial_lr", learning_rate))
    if math.isclose(begins, learning_rate, rel_tol=_ROUNDING):
        return
    with suppress(Exception):  # A function that makes a schedule once only is no reason to end here.
        if not rate_is_followed(lambda: _stand_in(trainee.optimizer), subject.make_scheduler):
            name = type(trainee.scheduler).__name__
            tell(
                Noted(f"the learning rate is to be {learning_rate:.6g}, and {name} has its own: {begins:.6g} to begin")
            )


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and groups, which has never been scheduled, and can be without a trace."""
    other = copy.copy(optimizer)
    other.param_groups = [_copied(group) for group in optimizer.param_groups]
    return other


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group, less what schedules begin with: `CyclicLR` would take that for its own."""
    kept = {key: value for key, value in group.items() if key != "initial_lr"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}
