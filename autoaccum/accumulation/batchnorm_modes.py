"""What runs the parts of an update, by what BatchNorm is to see and to remember of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from torch import Tensor, nn

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord
from autoaccum.accumulation.batchnorm import (
    batchnorm_names,
    check_frozen,
    find_batchnorms,
    frozen_warning,
    running_warning,
)
from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.running_statistics import RunningStatistics
from autoaccum.errors import UsageError
from autoaccum.workload.modes import BatchNormMode
from autoaccum.workload.weights import Weights


class RunningBackpropagation(Backpropagation):
    """Each part is normalised by itself; running statistics become what the full batch's update makes of them.

    Parts without weight are not run, so that they do not count: only there do these differ from the full batch's.
    """

    _statistics: RunningStatistics

    def run(
        self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None, scale: float
    ) -> LossRecord:
        """As every Backpropagation; the statistics begin anew, also when a step is repeated."""
        with RunningStatistics(self._model) as self._statistics:
            record = super().run(parts, shares, buffers, scale)
        self._statistics.settle()
        return record

    def caution(self, *, accumulates: bool) -> str | None:
        """That the gradient is still not the full batch's."""
        names = batchnorm_names(self._model)
        if not accumulates or not names:
            return None
        return running_warning(names, batchnorm_names(self._model, without_statistics=True))

    def _terms(self, part: Any) -> Mapping[str, Tensor]:
        with self._statistics.part():
            return super()._terms(part)


class FrozenBackpropagation(Backpropagation):
    """BatchNorm is at rest: running statistics normalise and stay as they are, weight and bias train."""

    _is_first = True

    def run(
        self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None, scale: float
    ) -> LossRecord:
        """As every Backpropagation.

        Raises:
            UsageError: A BatchNorm keeps no running statistics.
        """
        check_frozen(self._model)
        resting = [module for module in find_batchnorms(self._model) if module.training]
        try:
            for module in resting:  # The module alone: what it has within (an activation, a dropout) trains.
                module.training = False
            return super().run(parts, shares, buffers, scale)
        finally:
            for module in resting:
                module.training = True

    def caution(self, *, accumulates: bool) -> str | None:
        """That the statistics mean nothing yet, where that is so; they are read once only."""
        is_first, self._is_first = self._is_first, False
        return frozen_warning(self._model) if is_first else None


BACKPROPAGATIONS: Final[Mapping[BatchNormMode, type[Backpropagation]]] = {
    "micro": Backpropagation,
    "running": RunningBackpropagation,
    "frozen": FrozenBackpropagation,
}


def checked_batchnorm(mode: Any, model: nn.Module) -> BatchNormMode:
    """`mode`, which is known and can be had with `model`.

    Raises:
        UsageError: It is not.
    """
    if mode not in BACKPROPAGATIONS:
        known = ", ".join(f'"{known}"' for known in BACKPROPAGATIONS)
        raise UsageError(f"there is no batchnorm mode {mode!r}", hint=f"take one of {known}")
    if mode == "frozen":
        check_frozen(model)
    return cast("BatchNormMode", mode)
