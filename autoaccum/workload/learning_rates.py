"""The learning rate of an optimizer: read, set, and whether its schedule takes any notice of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoaccum.errors import WorkloadError
from autoaccum.workload.nests import type_name

_LOOKED_AT = 8
"""Steps of a schedule that are looked at: one that warms up from 0 shows its rate from the second on."""


def own_rate(optimizer: Optimizer) -> float:
    """The learning rate of the first parameter group.

    Raises:
        WorkloadError: It has none, or it is no number above 0, to which others could keep a ratio.
    """
    rate = _rates(optimizer)[0]
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(
            f"the learning rate of the first parameter group of {type_name(optimizer)} is {rate:g}",
            hint="begin with a group whose lr is above 0: the others keep their ratio to it",
        )
    return rate


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give the first parameter group this learning rate; the others keep their ratio to it.

    A rate that is a tensor, as compiled and captured updates need it, is filled in place. A schedule that is made
    afterwards begins here, whatever one before it had kept in the groups. A schedule that is there already does not
    follow.

    Raises:
        WorkloadError: As of `own_rate`; nothing is changed.
    """
    factor = rate / own_rate(optimizer)
    wanted = [each * factor for each in _rates(optimizer)]
    wanted[0] = rate
    for group, each in zip(optimizer.param_groups, wanted, strict=True):
        for key in ("lr", "initial_lr"):
            if isinstance(group.get(key), Tensor):
                with torch.no_grad():
                    group[key].fill_(each)
            elif key in group:
                group[key] = each


def rate_is_followed(make_optimizer: Callable[[], Optimizer], make_scheduler: Callable[[Optimizer], Any]) -> bool:
    """Whether a schedule begins with the learning rate that its optimizer has, or goes on from it.

    `OneCycleLR` and `CyclicLR` do not: they have rates of their own, and write them over the optimizer's. Found out by
    two optimizers with different rates, of which no update is made.

    Args:
        make_optimizer: Makes an optimizer, each time a new one.
        make_scheduler: Makes its schedule, or None.

    Raises:
        WorkloadError: As of `own_rate`.
    """
    first, second = make_optimizer(), make_optimizer()
    set_rate(second, own_rate(first) / 2)
    return list(_course(first, make_scheduler)) != list(_course(second, make_scheduler))


def _course(optimizer: Optimizer, make_scheduler: Callable[[Optimizer], Any]) -> Iterator[list[float]]:
    """The rates of all groups, step for step."""
    scheduler = make_scheduler(optimizer)
    yield _rates(optimizer)
    if scheduler is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a schedule that is stepped and an optimizer that is not.
        for _ in range(_LOOKED_AT):
            try:
                scheduler.step()
            except Exception:
                return  # It is over, or waits for a metric: training will say so.
            yield _rates(optimizer)


def _rates(optimizer: Optimizer) -> list[float]:
    return [_rate(optimizer, number) for number in range(len(optimizer.param_groups))]


def _rate(optimizer: Optimizer, number: int) -> float:
    rate = optimizer.param_groups[number].get("lr")
    try:
        return float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        seen = f"has lr={rate!r}" if "lr" in optimizer.param_groups[number] else "has no lr"
        raise WorkloadError(
            f"parameter group {number} of {type_name(optimizer)} {seen}, so that no learning rate can be set",
            hint="take an optimizer whose groups have a number as lr",
        ) from None
