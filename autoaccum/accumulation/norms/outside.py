"""Normalising modules that a loss reaches and the model does not hold: no mode of BatchNorm reaches them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from autoaccum.accumulation.batchnorm import BATCHNORMS, INSTANCENORMS, listed
from autoaccum.accumulation.buffers import KeptStatistics
from autoaccum.accumulation.reach import find_held, find_reachable
from autoaccum.workload.weights import Objective


class OutsideNorms:
    """The running statistics of those in training mode, as they are before the parts of an update are run.

    Args:
        model: The model, whose hooks and unregistered attributes may hold such modules.
        objective: The loss, whose functions may.
        known: The modules that modes do reach.
    """

    def __init__(self, model: nn.Module, objective: Objective, known: Collection[nn.Module]) -> None:
        criterion = None if objective.criterion is None else objective.criterion.function
        reached, _ = find_reachable((objective.loss_function, criterion), find_held(model, None))
        within = {id(module) for module in known}
        within |= {id(buffer) for module in known for buffer in module.buffers(recurse=False)}  # TorchScript's.
        norms = {
            ".".join(filter(None, (path, name))) or type(module).__name__: module
            for path, root in reached.items()
            for name, module in root.named_modules()
            if isinstance(module, (*BATCHNORMS, *INSTANCENORMS))
            and not within & {id(module), id(module.running_mean)}
            and module.training
            and module.running_mean is not None
        }
        self._kept = KeptStatistics(norms, by_value=False)

    def warning(self) -> str | None:
        """One sentence on those that have run since, and the way out; None: none has."""
        names = self._kept.changed()
        if not names:
            return None
        return (
            f"{listed(names)} ran in training mode and is no part of the model: whatever batchnorm says, it normalises"
            " by the micro-batch and updates its running statistics once for each; make it a part of the model, or call"
            " eval() on it"
        )
