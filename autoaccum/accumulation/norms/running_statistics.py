"""Running statistics of BatchNorm and InstanceNorm over an update in parts, as if its batch had come at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS, INSTANCENORMS, STATISTICS
from autoaccum.accumulation.norms.moments import Averages, Moments


class RunningStatistics:
    """Watches normalising modules through the forwards and backwards of one update.

    While it is entered, calls leave running statistics as they are. Those within `part` count: the k-th call of a
    module in every part is the k-th call of the full batch. What is called again in backward (checkpointing) does not.
    `settle` then makes the update that the full batch would have made.

    A call's moments cost no pass over its input: with a momentum of 1, the running statistics it leaves behind are
    the mean and the unbiased variance of what it normalised (torch/nn/modules/batchnorm.py), or their averages over
    samples (instance_norm in ATen/native/Normalization.cpp).

    Args:
        modules: The modules that keep running statistics.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._watched = [_Watched(module) for module in modules]
        self._stack = ExitStack()

    def __enter__(self) -> RunningStatistics:
        with ExitStack() as stack:
            for watched in self._watched:
                stack.enter_context(watched)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around the forward of a part."""
        try:
            for watched in self._watched:
                watched.begin()
            yield
        finally:
            for watched in self._watched:
                watched.end()

    def settle(self) -> None:
        """Update the running statistics from all that counted."""
        for watched in self._watched:
            watched.settle()


@dataclass
class _Call:
    """The k-th call of a module in every part, as one.

    Attributes:
        momentum: Its momentum; None: the cumulative average.
        seen: What it normalised; None as long as no part had values for it.
    """

    momentum: float | None
    seen: Any = None

    def take(self, seen: Moments | Averages) -> None:
        """Take a part's in; torch leaves running statistics alone where there are no values."""
        if self.seen is None:
            self.seen = seen if seen.count else None
        elif seen.count:
            self.seen.add(seen)


class _Watched:
    """One module with running statistics, and what its calls have seen.

    Each call writes into buffers of its own: those of the module are saved for backward, which forbids to change them
    until then. They and the momentum are exchanged during a call only, so that code elsewhere finds the module's own,
    and may change its settings between calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._own = {name: module.get_buffer(name) for name in STATISTICS if getattr(module, name) is not None}
        self._calls: list[_Call] = []
        self._next: int | None = None
        self._put_aside: _Call | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        module = self._module
        self._hooks.append(module.register_forward_pre_hook(self._open, prepend=True))
        self._hooks.append(module.register_forward_hook(self._close, with_kwargs=True, always_call=True))

    def __exit__(self, *_: object) -> None:
        self._put_back()
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        self._next = 0

    def end(self) -> None:
        self._next = None

    @torch.no_grad()
    def settle(self) -> None:
        for call in self._calls:
            share: float | Tensor = 0.0 if call.momentum is None else call.momentum
            number = self._own.get("num_batches_tracked")
            # InstanceNorm counts nothing, and takes no momentum for one of 0.
            if number is not None and isinstance(self._module, BATCHNORMS):
                number.add_(1)
                if call.momentum is None and call.seen is not None:  # torch's cumulative average
                    share = 1.0 / number.to(call.seen.mean.dtype)
            if call.seen is not None:
                self._learn("running_mean", call.seen.mean, share)
                self._learn("running_var", call.seen.variance, share)

    def _learn(self, name: str, value: Tensor, share: float | Tensor) -> None:
        buffer = self._own[name]
        buffer.copy_(buffer.to(value.dtype) * (1.0 - share) + value * share)

    @torch.no_grad()
    def _open(self, module: nn.Module, _: Any) -> None:
        self._put_back()
        if self._updates():
            self._put_aside = _Call(self._module.momentum)
            self._module.momentum = 1.0
            module._buffers.update({name: buffer.clone() for name, buffer in self._own.items()})

    def _updates(self) -> bool:
        """Whether a call of the module, as it is set now, would update its running statistics."""
        module = self._module
        if isinstance(module, INSTANCENORMS):  # torch/nn/modules/instancenorm.py
            return bool(module.training or not module.track_running_stats)
        return bool(module.training and module.track_running_stats)

    @torch.no_grad()
    def _close(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Also called where forward has raised: `output` is None then, and nothing was seen."""
        if self._put_aside is not None and output is not None and self._next is not None:
            self._take(self._put_aside, args[0] if args else next(iter(kwargs.values())))
        self._put_back()

    def _take(self, call: _Call, inputs: Tensor) -> None:
        mean, variance = self._module.get_buffer("running_mean"), self._module.get_buffer("running_var")
        index = self._next or 0
        if index == len(self._calls):
            self._calls.append(call)
        self._next = index + 1
        if isinstance(self._module, INSTANCENORMS):
            samples = 1 if inputs.dim() == self._module._get_no_batch_dim() else len(inputs)
            self._calls[index].take(Averages.of(samples, mean, variance))
        else:
            self._calls[index].take(Moments.of(inputs.numel() // mean.numel(), mean, variance))

    def _put_back(self) -> None:
        if self._put_aside is not None:
            self._module.momentum = self._put_aside.momentum
            self._module._buffers.update(self._own)
            self._put_aside = None
