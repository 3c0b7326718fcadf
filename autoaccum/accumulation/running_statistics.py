"""Running statistics of BatchNorm over an update in parts, as if its batch had come at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import STATISTICS


@dataclass
class Moments:
    """The first two moments of what was seen of some channels, in the widest precision their device has.

    Attributes:
        count: Values of each channel.
        mean: Their mean; of shape [channels], like the next.
        squares: The sum of their squared deviations from it.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, count: int, mean: Tensor, variance: Tensor) -> Moments:
        """From a mean and an unbiased variance, which may change afterwards."""
        dtype = torch.float32 if mean.device.type == "mps" else torch.float64
        return cls(count, mean.to(dtype, copy=True), variance.to(dtype, copy=True).mul_(count - 1))

    def add(self, other: Moments) -> None:
        """Take in what `other` has seen, in place.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        Stanford CS-TR-79-773, 1979.
        """
        both = self.count + other.count
        apart = other.mean - self.mean
        self.mean.add_(apart, alpha=other.count / both)
        self.squares.add_(other.squares).add_(apart.square_(), alpha=self.count * other.count / both)
        self.count = both

    @property
    def variance(self) -> Tensor:
        """Unbiased; there are two values of each channel at least."""
        return self.squares / (self.count - 1)


class RunningStatistics:
    """Watches BatchNorms through the forwards and backwards of one update.

    While it is entered, calls leave running statistics as they are. Those within `part` count: the k-th call of a
    module in every part is the k-th call of the full batch. What is called again in backward (checkpointing) does not.
    `settle` then makes the update that the full batch would have made.

    A call's moments cost no pass over its input: with a momentum of 1, the running statistics it leaves behind are
    the mean and the unbiased variance of what it normalised (torch/nn/modules/batchnorm.py).

    Args:
        modules: The modules that keep running statistics.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._watched = [_Watched(module) for module in modules]

    def __enter__(self) -> RunningStatistics:
        for watched in self._watched:
            watched.open()
        return self

    def __exit__(self, *_: object) -> None:
        for watched in self._watched:
            watched.close()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around the forward of a part."""
        try:
            for watched in self._watched:
                watched.next = 0
            yield
        finally:
            for watched in self._watched:
                watched.next = None

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
    seen: Moments | None = None

    def take(self, seen: Moments) -> None:
        """Take a part's in; torch leaves running statistics alone where there are no values."""
        if self.seen is None:
            self.seen = seen if seen.count else None
        elif seen.count:
            self.seen.add(seen)


class _Watched:
    """One BatchNorm, and what its calls have seen.

    Each call writes into buffers of its own: those of the module are saved for backward, which forbids to change them
    until then. They and the momentum are exchanged during a call only, so that code elsewhere finds the module's own,
    and may change its settings between calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._own = {name: module.get_buffer(name) for name in STATISTICS if getattr(module, name) is not None}
        self._calls: list[_Call] = []
        self._put_aside: _Call | None = None
        self._hooks: list[Any] = []
        self.next: int | None = None

    def open(self) -> None:
        self._hooks = [
            self._module.register_forward_pre_hook(self._begin, prepend=True),
            self._module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        self._put_back()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def settle(self) -> None:
        for call in self._calls:
            share: float | Tensor = 0.0 if call.momentum is None else call.momentum
            number = self._own.get("num_batches_tracked")
            if number is not None:
                number.add_(1)
                if call.momentum is None and call.seen is not None:  # torch's cumulative average
                    share = 1.0 / number.to(call.seen.mean.dtype)
            if call.seen is not None:
                for name, value in (("running_mean", call.seen.mean), ("running_var", call.seen.variance)):
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
            self._calls[self.next].take(Moments.of(inputs.numel() // mean.numel(), mean, variance))
            self.next += 1
        self._put_back()

    def _put_back(self) -> None:
        if self._put_aside is not None:
            self._module.momentum = self._put_aside.momentum
            self._module._buffers.update(self._own)
            self._put_aside = None
