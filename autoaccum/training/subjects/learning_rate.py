"""Which learning rate a training begins with: the one given, that of its plan, or the optimizer's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from autoaccum.planning.records import Plan
from autoaccum.training.events import Noted
from autoaccum.training.request import FitRequest
from autoaccum.training.subjects.trainee import Trainee

_ROUNDING = 1e-6
"""Of a rate that is a tensor in float32."""


def choose_learning_rate(request: FitRequest, plan: Plan | None, tell: Callable[[Any], Any]) -> float | None:
    """What was given, else what the plan was tuned with, which is told; None: the optimizer's own."""
    if request.learning_rate is not None or plan is None or plan.learning_rate is None:
        return request.learning_rate
    tell(Noted(f"the learning rate is {plan.learning_rate:.6g}: the plan was tuned with it", warns=False))
    return plan.learning_rate


def tell_of_schedule(learning_rate: float | None, trainee: Trainee, tell: Callable[[Any], Any]) -> None:
    """Say so where a schedule, such as `OneCycleLR(max_lr=...)`, begins with a rate of its own instead."""
    if learning_rate is None or trainee.scheduler is None:
        return
    begins = float(trainee.optimizer.param_groups[0].get("initial_lr", learning_rate))
    if not math.isclose(begins, learning_rate, rel_tol=_ROUNDING):
        name = type(trainee.scheduler).__name__
        tell(Noted(f"the learning rate was to be {learning_rate:.6g}, and {name} begins with {begins:.6g} of its own"))
