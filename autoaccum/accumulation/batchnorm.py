"""BatchNorm under accumulation: find it, and its modes `micro`, `running`, `frozen` and `exact`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import reduce
from itertools import zip_longest
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.backpropagation import Backpropagation, named_modules
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.checks import join_words, list_names
from autoaccum.errors import UsageError
from autoaccum.messages import Message, message
from autoaccum.spec import BatchNormMode

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
    if mode in ("exact", "frozen") or not any(
        isinstance(module, nn.SyncBatchNorm) and module.training for module in modules
    ):
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
    return torch.compiler.set_stance("force_eager") if "torch._dynamo.eval_frame" in sys.modules else nullcontext()


def is_scripted(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm compiled by TorchScript."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(module, "original_name", "") in [kind.__name__ for kind in BATCHNORMS]


_Moments: TypeAlias = "tuple[int, Tensor, Tensor]"
"""The count, the mean and the squared deviations of the values of each channel, in the widest precision there is."""


def _merge(one: _Moments | None, other: _Moments | None) -> _Moments | None:
    """Return the moments of two sets of values together; None stands for no values.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", Stanford
    CS-TR-79-773, 1979.
    """
    if one is None or other is None:
        return other if one is None else one
    (count, mean, squares), (more, other_mean, other_squares) = one, other
    total, difference = count + more, other_mean - mean
    squares = squares + other_squares + difference.square() * (count * more / total)
    return total, mean + difference * (more / total), squares


@torch.no_grad()
def update_statistics(module: Any, mean: Tensor | None, variance: Tensor | None) -> None:
    """Update running statistics as one call does whose input has this mean and unbiased variance; None: no values.

    Source: torch/nn/modules/batchnorm.py.
    """
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if module.running_mean is None or mean is None or variance is None:
        return
    momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        running.copy_(running.to(value.dtype) * (1.0 - momentum) + value.to(running.device) * momentum)


class _StatisticsRecorder:
    """Records what one BatchNorm normalises during an update, and then updates its running statistics once.

    While it is entered, calls of the module leave its running statistics as they are. The k-th calls of all parts'
    forwards together stand for the full batch's k-th call. Calls during backward (checkpointing) do not count.

    Recording needs no pass over the input: with a momentum of 1, a call leaves the mean and the unbiased variance of
    its input in the running statistics (torch/nn/modules/batchnorm.py). Each call writes into buffers of its own,
    since autograd saves the module's for backward and forbids to change them until then. Buffers and momentum are
    replaced during a call only, so that other code finds the module's own.

    Attributes:
        calls: The moments of the k-th calls.
        next: The index of the next call in a part's forward; None outside of forwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._buffers = {name: module.get_buffer(name) for name in STATISTICS if getattr(module, name) is not None}
        self._replaced: list[float | None] = []
        self._hooks: list[Any] = []
        self.calls: list[_Moments | None] = []
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

    def update_statistics(self, calls_of_ranks: Sequence[Sequence[_Moments | None]]) -> None:
        """Update the running statistics as the full batch would have done; all ranks' k-th calls count as one."""
        for calls in zip_longest(*calls_of_ranks):
            moments = reduce(_merge, calls)
            mean, variance = (None, None) if moments is None else (moments[1], moments[2] / (moments[0] - 1))
            update_statistics(self._module, mean, variance)

    @torch.no_grad()
    def _begin(self, module: nn.Module, _: Any) -> None:
        self._restore()
        if self._module.training and self._module.track_running_stats:
            self._replaced = [self._module.momentum]
            self._module.momentum = 1.0
            module._buffers.update({name: buffer.clone() for name, buffer in self._buffers.items()})

    @torch.no_grad()
    def _end(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Add the call's moments. PyTorch also calls this when forward raised, with None as `output`."""
        if self._replaced and output is not None and self.next is not None:
            if self.next == len(self.calls):
                self.calls.append(None)
            inputs, mean = args[0] if args else next(iter(kwargs.values())), module.get_buffer("running_mean")
            if count := inputs.numel() // mean.numel():
                dtype = torch.float32 if mean.device.type == "mps" else torch.float64
                squares = module.get_buffer("running_var").to(dtype) * (count - 1)
                self.calls[self.next] = _merge(self.calls[self.next], (count, mean.to(dtype, copy=True), squares))
            self.next += 1
        self._restore()

    def _restore(self) -> None:
        if self._replaced:
            self._module.momentum = self._replaced.pop()
            self._module._buffers.update(self._buffers)


class MicroBackpropagation(Backpropagation):
    """Normalises each part by itself, as PyTorch does."""

    _mode: str = "micro"

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[Message]:
        """Return a warning that names the BatchNorms, if the step `accumulates` several parts."""
        is_concerned = accumulates and any(map(normalises_by_batch, modules))
        names = batchnorm_names(self.model, self.criterion) if is_concerned else []
        return [message("batchnorm_of_parts", modules=names, mode=self._mode)] if names else []


class RunningBackpropagation(MicroBackpropagation):
    """Normalises each part by itself, and updates running statistics once, as the full batch would.

    Parts of all ranks count, but not those without weight, which are not run: the only difference from the full batch's
    statistics. torch.compile is off meanwhile: code compiled before ignores hooks that were registered later.
    """

    _mode = "running"
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
        rows = self.ranks.gather([recorder.calls for recorder in self._recorders])
        for recorder, *calls in zip(self._recorders, *rows, strict=True):
            recorder.update_statistics(calls)

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

    _frozen: Sequence[nn.Module]
    _is_first = True

    @contextmanager
    def _around_parts(self) -> Iterator[None]:
        """Let parts put BatchNorm modules into eval mode; raise UsageError if one has no running statistics."""
        check_frozen(self.model, self.criterion)
        norms = find_batchnorms(self.model, self.criterion)
        self._frozen = [module for module in norms if module.training]
        try:
            yield
        finally:
            for module in self._frozen:
                module.training = True
        self._is_first = False

    def warnings(self, modules: Iterable[nn.Module], *, accumulates: bool) -> list[Message]:
        """Return a warning if the running statistics were never estimated; they are read at the first step only."""
        norms: list[Any] = list(find_batchnorms(self.model, self.criterion)) if self._is_first else []
        norms = [norm for norm in norms if norm.running_mean is not None and is_plain_tensor(norm.running_mean)]
        read = [norm for norm in norms if not norm.running_mean.is_meta]
        if not read or any(bool(norm.running_mean.any() or (norm.running_var != 1).any()) for norm in read):
            return []
        return [message("statistics_unset")]

    def _forward(self, function: Callable[[nn.Module, Any], Any], part: Any) -> Any:
        for module in self._frozen:
            module.training = False  # Not eval(), which would reach modules within it (an activation, a dropout).
        return super()._forward(function, part)


BACKPROPAGATIONS: Final[Mapping[BatchNormMode, type[Backpropagation]]] = {
    "micro": MicroBackpropagation,
    "running": RunningBackpropagation,
    "frozen": FrozenBackpropagation,
    "exact": Backpropagation,  # Its parts run in lock step (`whole_batch.exact_batchnorm`).
}


def check_batchnorm(mode: BatchNormMode, model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Raise UsageError if `mode` is impossible with `model` or its criterion."""
    scripted = [name for name, module in named_modules(model, criterion) if is_scripted(module)]
    if scripted and mode != "micro":
        raise UsageError(
            f'batchnorm is "{mode}", and {list_names(scripted)} are TorchScript\'s, on which no hooks run',
            hint='script the model after training, or use batchnorm="micro"',
        )
    if mode == "frozen":
        check_frozen(model, criterion)
