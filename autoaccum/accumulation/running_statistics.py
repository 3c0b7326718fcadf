"""Running statistics of BatchNorm over an update in parts, as if its batch had come at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.moments import Moments

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """Watches the BatchNorms of a model through the forwards and backwards of one update.

    While it is entered, calls leave running statistics as they are. Those within `part` count: the k-th call of a
    module in every part is the k-th call of the full batch. What is called again in backward (checkpointing) does not.
    `settle` then makes the update that the full batch would have made.

    A call's moments cost no pass over its input: with a momentum of 1, the running statistics it leaves behind are
    the mean and the unbiased variance of what it normalised (torch/nn/modules/batchnorm.py).

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = [
            _Watched(module)
            for module in find_batchnorms(model)
            if module.running_mean is not None and module.track_running_stats  # else training leaves them alone
        ]
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


class _Watched:
    """One BatchNorm with running statistics, and what its calls have seen.

    Each call writes into buffers of its own: those of the module are saved for backward, which forbids to change them
    until then. They and the momentum are exchanged during a call only, so that code elsewhere finds the module's own.
    """

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        self._momentum = module.momentum
        self._own = {name: module.get_buffer(name) for name in _STATISTICS if getattr(module, name) is not None}
        self._calls: list[Moments] = []
        self._next: int | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        module, opens, closes = self._module, _uncompiled(self._open), _uncompiled(self._close)
        self._hooks.append(module.register_forward_pre_hook(opens, prepend=True))
        self._hooks.append(module.register_forward_hook(closes, with_kwargs=True, always_call=True))

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
        mean, variance = self._own["running_mean"], self._own["running_var"]
        for seen in self._calls:
            share: float | Tensor = 0.0 if self._momentum is None else self._momentum
            if (number := self._own.get("num_batches_tracked")) is not None:
                number.add_(1)
                if self._momentum is None:  # torch's cumulative average
                    share = 1.0 / number.to(seen.mean.dtype)
            for buffer, value in ((mean, seen.mean), (variance, seen.variance)):
                buffer.copy_(buffer.to(value.dtype) * (1.0 - share) + value * share)

    @torch.no_grad()
    def _open(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self._module.momentum = 1.0
            module._buffers.update({name: buffer.clone() for name, buffer in self._own.items()})

    @torch.no_grad()
    def _close(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Also called where forward has raised: `output` is None then, and nothing was seen."""
        mean, variance = module.get_buffer("running_mean"), module.get_buffer("running_var")
        if output is not None and self._next is not None and module.training:
            inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
            self._take(Moments.of(inputs.numel() // mean.numel(), mean, variance))
        self._put_back()

    def _take(self, seen: Moments) -> None:
        index = self._next or 0
        if index == len(self._calls):
            self._calls.append(seen)
        else:
            self._calls[index].add(seen)
        self._next = index + 1

    def _put_back(self) -> None:
        self._module.momentum = self._momentum
        self._module._buffers.update(self._own)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, which torch.compile does not look into: what it counts would have the model compiled for every part."""
    if "torch._dynamo" not in sys.modules:  # Importing it takes a second, and only torch.compile needs it.
        return hook
    return cast("Callable[..., None]", torch.compiler.disable(hook))  # type: ignore[no-untyped-call]
