"""BatchNorm under accumulation: find it, and its modes `micro`, `running`, `frozen` and `exact`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.backpropagation import Backpropagation, named_modules
from autoaccum.accumulation.coupling import NOT_FULL, list_names
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.checks import join_words
from autoaccum.errors import UsageError
from autoaccum.options import BatchNormMode

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_batchnorms(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[_BatchNorm]:
    """Yield every BatchNorm module of the model and the criterion, in training mode or not."""
    return (module for _, module in named_modules(model, criterion) if isinstance(module, BATCHNORMS))


def batchnorm_names(model: nn.Module, criterion: nn.Module | None = None) -> list[str]:
    """Return the names of the BatchNorm modules (also SyncBatchNorm and scripted ones) that now normalise by the batch.

    Those are the ones in training mode, and those without running statistics.
    """
    return [name for name, module in named_modules(model, criterion) if normalises_by_batch(module)]


def normalises_by_batch(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm that now normalises by the batch (see `batchnorm_names`)."""
    is_batchnorm = isinstance(module, BATCHNORMS) or is_scripted(module)
    return is_batchnorm and (getattr(module, "running_mean", None) is None or module.training)


def frozen_warning(model: nn.Module, criterion: nn.Module | None = None) -> str | None:
    """Return a warning if `batchnorm="frozen"` would normalise by running statistics that were never estimated."""
    norms = [norm for norm in find_batchnorms(model, criterion) if is_readable(norm.running_mean)]
    trained = [one.get_buffer("running_mean").any() or (one.get_buffer("running_var") != 1).any() for one in norms]
    if not norms or any(trained):
        return None
    return (
        'batchnorm="frozen" normalises by running statistics, and these were never estimated (mean 0, variance 1):'
        " load trained weights, or begin with another mode"
    )


def check_frozen(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Raise UsageError if a BatchNorm has no running statistics, and so cannot be frozen."""
    norms = [(name, module) for name, module in named_modules(model, criterion) if isinstance(module, BATCHNORMS)]
    if names := [name for name, module in norms if module.running_mean is None]:
        raise UsageError(
            f'batchnorm is "frozen", and {list_names(names)} have no running statistics (track_running_stats=False)',
            hint='use GroupNorm there, or batchnorm="micro"',
        )


def check_synchronised(mode: BatchNormMode, modules: Iterable[nn.Module], parts: Sequence[int]) -> None:
    """Raise UsageError if SyncBatchNorm cannot wait for the other ranks in each part; they run so many `parts`."""
    if mode in ("exact", "frozen") or not any(isinstance(one, nn.SyncBatchNorm) and one.training for one in modules):
        return
    if mode == "running":
        raise UsageError(
            'batchnorm is "running", and SyncBatchNorm normalises by the micro-batches of all ranks',
            hint='take batchnorm="exact", or BatchNorm without Sync',
        )
    if len(set(parts)) > 1:
        raise UsageError(
            f"the ranks run {join_words(map(str, parts))} micro-batches, and SyncBatchNorm waits for all ranks in each",
            hint='give all ranks as many samples, or take batchnorm="exact"',
        )


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which torch.compile does nothing. Does not load torch._dynamo, which takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_scripted(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm compiled by TorchScript."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(module, "original_name", "") in [kind.__name__ for kind in BATCHNORMS]


def is_readable(tensor: Tensor | None) -> bool:
    """Return whether the values of a running statistic can be read."""
    return tensor is not None and is_plain_tensor(tensor) and not tensor.is_meta


class _Moments:
    """The mean and squared deviations of the inputs of a module's k-th call, taken over all parts.

    Attributes:
        momentum: The module's momentum; None is the cumulative average.
        count: The number of values of each channel.
        mean: Their mean, in the widest precision of their device.
        squares: The sum of their squared deviations from the mean.
    """

    mean: Tensor
    squares: Tensor

    def __init__(self, momentum: float | None) -> None:
        self.momentum, self.count = momentum, 0

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Add the moments of one part; like PyTorch, leave the statistics alone where there are no values.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        Stanford CS-TR-79-773, 1979.
        """
        if not count:
            return
        dtype = torch.float32 if mean.device.type == "mps" else torch.float64
        part_mean, squares = mean.to(dtype, copy=True), variance.to(dtype, copy=True).mul_(count - 1)
        self.merge(count, part_mean, squares)

    def merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add the count, mean and squared deviations of other values."""
        if not self.count:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, difference = self.count + count, mean - self.mean
        self.mean.add_(difference, alpha=count / total)
        self.squares.add_(squares).add_(difference.square_(), alpha=self.count * count / total)
        self.count = total


class _StatisticsRecorder:
    """Records what one BatchNorm normalises during an update, and then updates its running statistics once.

    While it is entered, calls of the module leave its running statistics as they are. The k-th calls of all parts'
    forwards together stand for the full batch's k-th call. Calls during backward (checkpointing) do not count.

    Recording needs no pass over the input: with a momentum of 1, a call leaves the mean and the unbiased variance of
    its input in the running statistics (torch/nn/modules/batchnorm.py). Each call writes into buffers of its own,
    since autograd saves the module's for backward and forbids to change them until then. Buffers and momentum are
    replaced during a call only, so that other code finds the module's own.

    Attributes:
        next: The index of the next call in a part's forward; None outside of forwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._buffers = {name: module.get_buffer(name) for name in STATISTICS if getattr(module, name) is not None}
        self._calls: list[_Moments] = []
        self._current: _Moments | None = None
        self._hooks: list[Any] = []
        self.next: int | None = None

    def __enter__(self) -> None:
        self._hooks = [
            self._module.register_forward_pre_hook(self._begin, prepend=True),
            self._module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def calls(self) -> list[tuple[float | None, tuple[Any, ...]]]:
        """Return momentum, and count, mean and squared deviations in host memory, of each call."""
        moments = [(one.count, one.mean.cpu(), one.squares.cpu()) if one.count else () for one in self._calls]
        return [(one.momentum, each) for one, each in zip(self._calls, moments, strict=True)]

    def join_calls(self, calls_of_ranks: Sequence[Sequence[tuple[float | None, tuple[Any, ...]]]]) -> None:
        """Take the calls of all ranks, the k-th of each together, in place of this rank's."""
        self._calls = []
        for calls in zip_longest(*calls_of_ranks):
            joined = _Moments(next(one for one in calls if one is not None)[0])
            for _, (count, *moments) in (one for one in calls if one is not None and one[1]):
                joined.merge(count, *(moment.to(self._buffers["running_mean"].device) for moment in moments))
            self._calls.append(joined)

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Update the running statistics as the full batch would have done."""
        for call in self._calls:
            share: float | Tensor = 0.0 if call.momentum is None else call.momentum
            number = self._buffers.get("num_batches_tracked")
            if number is not None:
                number.add_(1)
                if call.momentum is None and call.count:  # the cumulative average
                    share = 1.0 / number.to(call.mean.dtype)
            if call.count:
                for name, value in (("running_mean", call.mean), ("running_var", call.squares / (call.count - 1))):
                    self._buffers[name].copy_(self._buffers[name].to(value.dtype) * (1.0 - share) + value * share)

    @torch.no_grad()
    def _begin(self, module: nn.Module, _: Any) -> None:
        self._restore()
        if self._module.training and self._module.track_running_stats:
            self._current = _Moments(self._module.momentum)
            self._module.momentum = 1.0
            module._buffers.update({name: buffer.clone() for name, buffer in self._buffers.items()})

    @torch.no_grad()
    def _end(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Add the call's moments. PyTorch also calls this when forward raised, with None as `output`."""
        if self._current is not None and output is not None and self.next is not None:
            if self.next == len(self._calls):
                self._calls.append(self._current)
            inputs = args[0] if args else next(iter(kwargs.values()))
            mean, variance = module.get_buffer("running_mean"), module.get_buffer("running_var")
            self._calls[self.next].add(inputs.numel() // mean.numel(), mean, variance)
            self.next += 1
        self._restore()

    def _restore(self) -> None:
        if self._current is not None:
            self._module.momentum = self._current.momentum
            self._module._buffers.update(self._buffers)
            self._current = None


class MicroBackpropagation(Backpropagation):
    """Normalises each part by itself, as PyTorch does."""

    _consequence = f'{NOT_FULL}; batchnorm="exact" corrects that, batchnorm="running" only the running statistics'

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[str]:
        """Return a warning that names the BatchNorms, if the step `accumulates` several parts."""
        is_concerned = accumulates and any(map(normalises_by_batch, modules))
        names = batchnorm_names(self.model, self.criterion) if is_concerned else []
        return [f"BatchNorm normalises by the micro-batch in {list_names(names)}: {self._consequence}"] if names else []


class RunningBackpropagation(MicroBackpropagation):
    """Normalises each part by itself, and updates running statistics once, as the full batch would.

    Parts of all ranks count, but not those without weight, which are not run: the only difference from the full batch's
    statistics. torch.compile is off meanwhile: code compiled before ignores hooks that were registered later.
    """

    _consequence = f'only running statistics are exact, {NOT_FULL}; batchnorm="exact" corrects that'
    _recorders: Sequence[_StatisticsRecorder]

    @contextmanager
    def _around_parts(self) -> Iterator[None]:
        """Collect statistics of all parts; each run, also a repeated one, collects its own."""
        norms = [norm for norm in find_batchnorms(self.model, self.criterion) if norm.running_mean is not None]
        self._recorders = [_StatisticsRecorder(module) for module in norms]
        with ExitStack() as stack:
            if norms:
                stack.enter_context(uncompiled())
            for recorder in self._recorders:
                stack.enter_context(recorder)
            yield
        if self.ranks.size > 1:
            rows = self.ranks.gather([recorder.calls() for recorder in self._recorders])
            for recorder, *calls in zip(self._recorders, *rows, strict=True):
                recorder.join_calls(calls)
        for recorder in self._recorders:
            recorder.update_statistics()

    def _forward(self, function: Callable[[nn.Module, Any], Any], part: Any) -> Any:
        try:
            for recorder in self._recorders:
                recorder.next = 0
            return super()._forward(function, part)
        finally:
            for recorder in self._recorders:
                recorder.next = None

    def uncounted_terms(self, part: Any) -> Mapping[str, Tensor]:
        """Run the forward of a part whose statistics do not count."""
        terms: Mapping[str, Tensor] = super()._forward(self.objective.terms, part)
        return terms


class FrozenBackpropagation(Backpropagation):
    """Normalises by the running statistics and leaves them as they are; BatchNorm's weight and bias train."""

    _frozen: Mapping[str, nn.Module]
    _is_first = True

    @contextmanager
    def _around_parts(self) -> Iterator[None]:
        """Let parts put BatchNorm modules into eval mode.

        Raises:
            UsageError: A BatchNorm has no running statistics, or the loss put it back into training mode.
        """
        check_frozen(self.model, self.criterion)
        self._frozen = {
            name: module
            for name, module in named_modules(self.model, self.criterion)
            if isinstance(module, BATCHNORMS) and module.training
        }
        before = _training_calls(self._frozen)
        try:
            yield
        finally:
            for module in self._frozen.values():
                module.training = True
        after = _training_calls(self._frozen)
        if names := [name for name in before if before[name] != after[name]]:
            raise UsageError(
                f'batchnorm is "frozen", and within the loss {list_names(names)} ran in training mode, by train()'
                " there, and changed running statistics",
                hint='do not change the mode of these modules within the loss, or use batchnorm="micro"',
            )
        self._is_first = False

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[str]:
        """Return a warning if the running statistics were never estimated; they are read at the first step only."""
        warning = frozen_warning(self.model, self.criterion) if self._is_first else None
        return [] if warning is None else [warning]

    def _forward(self, function: Callable[[nn.Module, Any], Any], part: Any) -> Any:
        for module in self._frozen.values():
            module.training = False  # Not eval(), which would reach modules within it (an activation, a dropout).
        return super()._forward(function, part)


BACKPROPAGATIONS: Final[Mapping[BatchNormMode, type[Backpropagation]]] = {
    "micro": MicroBackpropagation,
    "running": RunningBackpropagation,
    "frozen": FrozenBackpropagation,
    "exact": Backpropagation,  # Its parts run in lock step (`whole_batch.exact_batchnorm`).
}


def checked_batchnorm(mode: Any, model: nn.Module, criterion: nn.Module | None = None) -> BatchNormMode:
    """Return `mode`; raise UsageError if it is unknown, or impossible with `model` or its criterion."""
    if mode not in BACKPROPAGATIONS:
        modes = ", ".join(f'"{name}"' for name in BACKPROPAGATIONS)
        raise UsageError(f"there is no batchnorm mode {mode!r}", hint=f"take one of {modes}")
    scripted = [name for name, module in named_modules(model, criterion) if is_scripted(module)]
    if scripted and mode != "micro":
        raise UsageError(
            f'batchnorm is "{mode}", and {list_names(scripted)} are TorchScript\'s, on which no hooks run',
            hint='script the model after training, or use batchnorm="micro"',
        )
    if mode == "frozen":
        check_frozen(model, criterion)
    return cast("BatchNormMode", mode)


def _training_calls(norms: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the versions of the `num_batches_tracked` of `norms`, which every call in training mode increments.

    Reading a version does not synchronise with the GPU.
    """
    counts = {name: getattr(module, "num_batches_tracked", None) for name, module in norms.items()}
    return {name: count._version for name, count in counts.items() if count is not None and not count.is_inference()}
