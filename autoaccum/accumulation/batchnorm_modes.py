"""The parts of an update, run by what BatchNorm is to see and to remember of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord
from autoaccum.accumulation.batchnorm import (
    BATCHNORMS,
    STATISTICS,
    check_frozen,
    frozen_warning,
    is_scripted,
    named_modules,
    uncompiled,
)
from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.errors import UsageError
from autoaccum.options import BatchNormMode
from autoaccum.workload.objective import Weights


class _Call:
    """The k-th call of a module in every part, as one: the first two moments of what it normalised.

    Attributes:
        momentum: Its momentum; None: the cumulative average.
        count: Values of each channel.
        mean: Their mean, in the widest precision their device has.
        squares: The sum of their squared deviations from it.
    """

    mean: Tensor
    squares: Tensor

    def __init__(self, momentum: float | None) -> None:
        self.momentum, self.count = momentum, 0

    def take(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Take a part's in; torch leaves running statistics alone where there are no values.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        Stanford CS-TR-79-773, 1979.
        """
        if not count:
            return
        dtype = torch.float32 if mean.device.type == "mps" else torch.float64
        own, squares = mean.to(dtype, copy=True), variance.to(dtype, copy=True).mul_(count - 1)
        if self.count:
            self._add(count, own, squares)
        else:
            self.count, self.mean, self.squares = count, own, squares

    def _add(self, count: int, mean: Tensor, squares: Tensor) -> None:
        both, apart = self.count + count, mean - self.mean
        self.mean.add_(apart, alpha=count / both)
        self.squares.add_(squares).add_(apart.square_(), alpha=self.count * count / both)
        self.count = both


class _Watched:
    """One BatchNorm, watched through the forwards and backwards of one update.

    While it is entered, calls leave its running statistics as they are. Those within a part's forward count: the k-th
    in every part is the k-th call of the full batch. What is called again in backward (checkpointing) does not.
    `settle` then makes the update that the full batch would have made.

    A call's moments cost no pass over its input: with a momentum of 1, the running statistics it leaves behind are
    the mean and the unbiased variance of what it normalised (torch/nn/modules/batchnorm.py). Each call writes into
    buffers of its own: those of the module are saved for backward, which forbids to change them until then. They and
    the momentum are exchanged during a call only, so that code elsewhere finds the module's own.

    Attributes:
        next: Which call of a part comes next; None outside of their forwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._own = {name: module.get_buffer(name) for name in STATISTICS if getattr(module, name) is not None}
        self._calls: list[_Call] = []
        self._put_aside: _Call | None = None
        self._hooks: list[Any] = []
        self.next: int | None = None

    def __enter__(self) -> None:
        self._hooks = [
            self._module.register_forward_pre_hook(self._begin, prepend=True),
            self._module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        self._put_back()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def settle(self) -> None:
        """Update the running statistics from all that counted."""
        for call in self._calls:
            share: float | Tensor = 0.0 if call.momentum is None else call.momentum
            number = self._own.get("num_batches_tracked")
            if number is not None:
                number.add_(1)
                if call.momentum is None and call.count:  # torch's cumulative average
                    share = 1.0 / number.to(call.mean.dtype)
            if call.count:
                for name, value in (("running_mean", call.mean), ("running_var", call.squares / (call.count - 1))):
                    self._own[name].copy_(self._own[name].to(value.dtype) * (1.0 - share) + value * share)

    @torch.no_grad()
    def _begin(self, module: nn.Module, _: Any) -> None:
        self._put_back()
        if self._module.training and self._module.track_running_stats:
            self._put_aside = _Call(self._module.momentum)
            self._module.momentum = 1.0
            module._buffers.update({name: buffer.clone() for name, buffer in self._own.items()})

    @torch.no_grad()
    def _end(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Also called where forward has raised: `output` is None then, and nothing was seen."""
        if self._put_aside is not None and output is not None and self.next is not None:
            if self.next == len(self._calls):
                self._calls.append(self._put_aside)
            inputs = args[0] if args else next(iter(kwargs.values()))
            mean, variance = module.get_buffer("running_mean"), module.get_buffer("running_var")
            self._calls[self.next].take(inputs.numel() // mean.numel(), mean, variance)
            self.next += 1
        self._put_back()

    def _put_back(self) -> None:
        if self._put_aside is not None:
            self._module.momentum = self._put_aside.momentum
            self._module._buffers.update(self._own)
            self._put_aside = None


class RunningBackpropagation(Backpropagation):
    """Each part is normalised by itself; running statistics become what the full batch's update makes of them.

    Parts without weight are not run, so that they do not count: only there do these differ from the full batch's.
    What torch.compile has compiled before would not notice that it is watched, and runs as it was written.
    """

    _caution = (
        'running statistics are the full batch\'s, the gradient is not (it is with batchnorm="frozen" or GroupNorm)'
    )
    _statistics: Sequence[_Watched]
    _is_first = True

    def run(self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None) -> LossRecord:
        """As every Backpropagation; the statistics begin anew, also when a step is repeated.

        Raises:
            UsageError: Running statistics were changed by what could not be watched.
        """
        norms = {
            name: module
            for name, module in named_modules(self._model, self._criterion)
            if isinstance(module, BATCHNORMS) and module.running_mean is not None
        }
        changed = _statistics_of(norms if self._is_first else {})
        self._statistics = [_Watched(module) for module in norms.values()]
        with ExitStack() as stack:
            if norms:  # Compiled code looks for no hooks that came later.
                stack.enter_context(uncompiled())
            for watched in self._statistics:
                stack.enter_context(watched)
            record = super().run(parts, shares, buffers)
        if names := changed():
            raise UsageError(
                f'batchnorm is "running", and the running statistics of {list_names(names)} were changed unseen: by a'
                " call of forward itself, or of a function",
                hint='call the module, as in self.norm(x), or take batchnorm="micro"',
            )
        self._is_first = False
        for watched in self._statistics:
            watched.settle()
        return record

    def _terms(self, part: Any) -> Mapping[str, Tensor]:
        try:
            for watched in self._statistics:
                watched.next = 0
            return super()._terms(part)
        finally:
            for watched in self._statistics:
                watched.next = None


class FrozenBackpropagation(Backpropagation):
    """BatchNorm is at rest: running statistics normalise and stay as they are, weight and bias train."""

    _resting: Mapping[str, nn.Module]
    _is_first = True

    def run(self, parts: Sequence[Any], shares: Sequence[Weights], buffers: GradientBuffers | None) -> LossRecord:
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
        changed = _statistics_of(self._resting if self._is_first else {})
        before = _training_calls(self._resting)
        try:
            record = super().run(parts, shares, buffers)
        finally:
            for module in self._resting.values():
                module.training = True
        after = _training_calls(self._resting)
        if names := changed() or [name for name in before if before[name] != after[name]]:
            raise UsageError(
                f'batchnorm is "frozen", and within the loss {list_names(names)} ran in training mode, by train() there'
                " or a function, and changed running statistics",
                hint='leave the mode of these modules alone within the loss, or take batchnorm="micro"',
            )
        self._is_first = False
        return record

    def cautions(self, *, accumulates: bool) -> list[str]:
        """That the statistics mean nothing yet, where that is so; they are read once only."""
        warning = frozen_warning(self._model, self._criterion) if self._is_first else None
        return [] if warning is None else [warning]

    def _terms(self, part: Any) -> Mapping[str, Tensor]:
        for module in self._resting.values():
            module.training = False  # It alone: what it has within (an activation, a dropout) trains.
        return super()._terms(part)


BACKPROPAGATIONS: Final[Mapping[BatchNormMode, type[Backpropagation]]] = {
    "micro": Backpropagation,
    "running": RunningBackpropagation,
    "frozen": FrozenBackpropagation,
}


def checked_batchnorm(mode: Any, model: nn.Module, criterion: nn.Module | None = None) -> BatchNormMode:
    """Refuse a mode that is unknown, or not to be had with `model` or its criterion; give the others back."""
    if mode not in BACKPROPAGATIONS:
        known = ", ".join(f'"{known}"' for known in BACKPROPAGATIONS)
        raise UsageError(f"there is no batchnorm mode {mode!r}", hint=f"take one of {known}")
    scripted = [name for name, module in named_modules(model, criterion) if is_scripted(module)]
    if scripted and mode != "micro":
        raise UsageError(
            f'batchnorm is "{mode}", and {list_names(scripted)} are TorchScript\'s, which cannot be watched',
            hint='script the model after training, or take batchnorm="micro"',
        )
    if mode == "frozen":
        check_frozen(model, criterion)
    return cast("BatchNormMode", mode)


def _training_calls(norms: Mapping[str, nn.Module]) -> dict[str, int]:
    """Versions of the buffers in which `norms` count their calls in training mode: told without waiting for a card."""
    counts = {name: getattr(module, "num_batches_tracked", None) for name, module in norms.items()}
    return {name: count._version for name, count in counts.items() if count is not None and not count.is_inference()}


def _statistics_of(norms: Mapping[str, nn.Module]) -> Callable[[], list[str]]:
    """What tells later which of `norms`, in training mode, have had their statistics written to: by their values.

    BatchNorm's kernels write to them without counting that as a version.
    """
    kept = [
        (called, module, buffer, buffer.clone())
        for called, module in norms.items()
        for buffer in (getattr(module, name) for name in STATISTICS)
        if buffer is not None and is_plain_tensor(buffer) and not buffer.is_meta
    ]

    def changed() -> list[str]:
        written = (name for name, module, now, before in kept if module.training and not torch.equal(now, before))
        return list(dict.fromkeys(written))

    return changed
