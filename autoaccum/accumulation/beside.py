"""Modules beside the model: what the loss names (a teacher, DPO's reference), or the workload's `modules` list.

They are not trained. They go to the device with the model, and take their bytes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from autoaccum.accumulation.reach import find_reachable

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload
    from autoaccum.workload.weights import Objective


def find_named(objective: Objective, model: nn.Module | None, *functions: object) -> dict[str, nn.Module]:
    """The modules that the loss and other functions of the user's name, by name: no part of the model or criterion.

    Those without parameters and buffers, as a loss without class weights, have nothing to place.
    """
    criterion = objective.criterion
    used = [None if objective.own_loss is not None else objective.loss_function, *functions]
    used += [criterion.function] if criterion is not None and objective.criterion_module is None else []
    modules, _ = find_reachable([function for function in used if function is not None])
    roots = [root for root in (model, objective.criterion_module) if root is not None]
    own = {id(module) for root in roots for module in root.modules()}
    return {name: module for name, module in modules.items() if id(module) not in own and _holds_tensors(module)}


def find_beside(workload: Workload) -> dict[str, nn.Module]:
    """The modules of a workload beside its model, by name: those it lists, and those its functions name."""
    model = workload.model if isinstance(workload.model, nn.Module) else None
    named = find_named(workload.objective, model, workload.evaluate)
    listed = {id(module) for module in workload.modules.values()}
    return {**workload.modules, **{name: module for name, module in named.items() if id(module) not in listed}}


@contextmanager
def placed(modules: Iterable[nn.Module], device: torch.device | None) -> Iterator[None]:
    """Have `modules` on a card, and put them back as they lay; on the CPU they stay where they are."""
    if device is None or device.type == "cpu":
        yield
        return
    roots = list(modules)
    inner = {id(module): module for root in roots for module in root.modules()}.values()
    tables = [(table, dict(table)) for module in inner for table in (module._parameters, module._buffers)]
    data = [(value, value.data) for _, before in tables for value in before.values() if isinstance(value, nn.Parameter)]
    try:
        for root in roots:
            root.to(device)
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        for parameter, values in data:
            parameter.data = values


def _holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
