"""The parts of an update, run by what BatchNorm is to see and to remember of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord
from autoaccum.accumulation.batchnorm import (
    BATCHNORMS,
    batchnorm_names,
    check_frozen,
    check_watchable,
    frozen_warning,
    is_compiled,
    named_modules,
    running_warning,
)
from autoaccum.accumulation.cautions import KeptStatistics
from autoaccum.accumulation.coupling import listed
from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.running_statistics import RunningStatistics
from autoaccum.errors import UsageError
from autoaccum.options import BatchNormMode
from autoaccum.workload.weights import Weights


class RunningBackpropagation(Backpropagation):
    """Each part is normalised by itself; running statistics become what the full batch's update makes of them.

    Parts without weight are not run, so that they do not count: only there do these differ from the full batch's.
    What torch.compile has compiled before would not notice that it is watched, and runs as it was written.
    """

    _statistics: RunningStatistics
    _is_first = True

    def run(
        self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None, scale: float
    ) -> LossRecord:
        """As every Backpropagation; the statistics begin anew, also when a step is repeated.

        Raises:
            UsageError: Running statistics were changed by what could not be watched.
        """
        norms = {
            name: module
            for name, module in named_modules(self._model, self._criterion)
            if isinstance(module, BATCHNORMS) and module.running_mean is not None
        }
        kept = KeptStatistics(norms, by_value=self._is_first)
        with RunningStatistics(list(norms.values())) as self._statistics, _uncompiled(norms):
            record = super().run(parts, shares, buffers, scale)
        if names := kept.changed():
            raise UsageError(
                f'batchnorm is "running", and the running statistics of {listed(names)} were changed unseen: by a call'
                " of forward itself, or of a function",
                hint='call the module, as in self.norm(x), or take batchnorm="micro"',
            )
        self._is_first = False
        self._statistics.settle()
        return record

    def cautions(self, *, accumulates: bool) -> list[str]:
        """That the gradient is still not the full batch's."""
        names = batchnorm_names(self._model, self._criterion) if accumulates else []
        without = batchnorm_names(self._model, self._criterion, without_statistics=True)
        said = [running_warning(names, without)] if names else []
        return said + self._instancenorm_cautions(accumulates=accumulates)

    def _terms(self, part: Any) -> Mapping[str, Tensor]:
        with self._statistics.part():
            return super()._terms(part)


class FrozenBackpropagation(Backpropagation):
    """BatchNorm is at rest: running statistics normalise and stay as they are, weight and bias train."""

    _resting: Mapping[str, nn.Module]
    _is_first = _is_new = True

    def run(
        self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None, scale: float
    ) -> LossRecord:
        """As every Backpropagation.

        Raises:
            UsageError: A BatchNorm keeps no running statistics, or the loss woke it up.
        """
        check_frozen(self._model, self._criterion)
        self._resting = {
            name: module
            for name, module in named_modules(self._model, self._criterion)
            if isinstance(module, BATCHNORMS) and module.training
        }
        kept = KeptStatistics(self._resting, by_value=self._is_new)
        # For where the loss calls train(); compiled code would break its graph, or not see them.
        watched = () if is_compiled(self._model) else self._resting.values()
        hooks = [module.register_forward_pre_hook(_put_to_rest) for module in watched]
        try:
            record = super().run(parts, shares, buffers, scale)
        finally:
            for hook in hooks:
                hook.remove()
            for module in self._resting.values():
                module.training = True
        if names := kept.changed():
            raise UsageError(
                f'batchnorm is "frozen", and within the loss {listed(names)} ran in training mode, by train() there or'
                " a function, and changed running statistics",
                hint='leave the mode of these modules alone within the loss, or take batchnorm="micro"',
            )
        self._is_new = False
        return record

    def cautions(self, *, accumulates: bool) -> list[str]:
        """That the statistics mean nothing yet, where that is so; they are read once only."""
        warning = frozen_warning(self._model, self._criterion) if self._is_first else None
        self._is_first = False
        return [*([] if warning is None else [warning]), *self._instancenorm_cautions(accumulates=accumulates)]

    def _terms(self, part: Any) -> Mapping[str, Tensor]:
        for module in self._resting.values():
            _put_to_rest(module)
        return super()._terms(part)


BACKPROPAGATIONS: Final[Mapping[BatchNormMode, type[Backpropagation]]] = {
    "micro": Backpropagation,
    "running": RunningBackpropagation,
    "frozen": FrozenBackpropagation,
}


def checked_batchnorm(mode: Any, model: nn.Module, criterion: nn.Module | None = None) -> BatchNormMode:
    """`mode`, which is known and can be had with `model`, and with its criterion where that is a module.

    Raises:
        UsageError: It is not.
    """
    if mode not in BACKPROPAGATIONS:
        known = ", ".join(f'"{known}"' for known in BACKPROPAGATIONS)
        raise UsageError(f"there is no batchnorm mode {mode!r}", hint=f"take one of {known}")
    if mode != "micro":
        check_watchable(mode, model, criterion)
    if mode == "frozen":
        check_frozen(model, criterion)
    return cast("BatchNormMode", mode)


def _put_to_rest(module: nn.Module, _: Any = None) -> None:
    module.training = False  # It alone: what it has within (an activation, a dropout) trains.


def _uncompiled(watched: Mapping[str, nn.Module]) -> AbstractContextManager[Any]:
    """Within it torch.compile does nothing: compiled code looks for no hooks that came later."""
    if not watched or "torch._dynamo" not in sys.modules:  # Importing it takes a second.
        return nullcontext()
    return cast("AbstractContextManager[Any]", torch.compiler.set_stance("force_eager"))
