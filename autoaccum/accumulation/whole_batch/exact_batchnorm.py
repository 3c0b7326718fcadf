"""BatchNorm over all samples of an update that runs in parts: the exact moments, forward and backward.

Forward, each part computes the moments of its input and waits; the parts' moments give those of the whole batch, by
which each part then normalises. Backward, each part adds its two sums to the whole batch's and keeps its gradient on
the host, until all sums are known and the gradients of the inputs follow from them (Ioffe and Szegedy, "Batch
Normalization", 2015, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.batchnorm import BATCHNORMS, update_statistics
from autoaccum.accumulation.host_storage import HostStorage
from autoaccum.accumulation.whole_batch.lockstep import Lockstep, RankRows
from autoaccum.errors import WorkloadError

_EPS = 2.0**-20
"""Beside a variance of one, since torch 2.11 refuses zero: `1 - _EPS + _EPS` is one, without rounding.

Below 1e-5, PyTorch's own kernel runs, not cuDNN's (`_select_batch_norm_backend` in ATen/native/Normalization.cpp).
"""


class _Part:
    """One part's input of one call of a BatchNorm, and its output's gradient, in host memory.

    Attributes:
        mean, inverse, scale: The whole batch's mean, one over its standard deviation, and the weight over it.
        count: The number of values of each channel in the whole batch.
        gradient: The gradient of the output, once backward has it.
    """

    scale: Tensor
    mean: Tensor
    inverse: Tensor
    count: int
    present: Tensor
    gradient: Any = None

    def __init__(self, inputs: Tensor, storage: HostStorage, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.storage, self.version = storage, inputs._version
        stored = storage.store(inputs)
        self.inputs = stored.detach() if isinstance(stored, Tensor) else stored
        self.dims = [0, *range(2, inputs.ndim)]
        self.shape = [1, -1] + [1] * (inputs.ndim - 2)

    def shifted(self, scale: Tensor, shift: Tensor) -> Tensor:
        """Return the input minus the mean, times `scale`, plus `shift`, in the precision of the moments."""
        # A BatchNorm in eval mode does so in one kernel.
        inputs = self.loaded()
        if not inputs.numel():
            return torch.zeros_like(inputs)
        variance = torch.full_like(self.mean, 1 - _EPS)
        return F.batch_norm(inputs, self.mean, variance, scale, shift, False, 0.0, _EPS)

    def loaded(self) -> Tensor:
        """Return the input in the precision of the moments."""
        if isinstance(self.inputs, Tensor) and self.inputs._version != self.version:
            raise RuntimeError("the input of a BatchNorm was changed in place after the call, and backward needs it")
        return self.storage.load(self.inputs).to(self.mean.dtype)


class _Moments(torch.autograd.Function):
    """Mean and sum of squared deviations of each channel of a part's input.

    Its backward takes the whole batch's two sums, not the gradients of these moments, and returns the gradient of the
    part's input.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        ctx.part, ctx.dtype = part, inputs.dtype
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        if not inputs.numel():
            return wide.new_zeros(inputs.shape[1]), wide.new_zeros(inputs.shape[1])
        if wide.device.type == "cpu":  # Several times as fast as var_mean there.
            mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
        else:
            variance, mean = torch.var_mean(wide, part.dims, correction=0)
        return mean, variance.mul_(inputs.numel() // inputs.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sum_gradient: Tensor, sum_product: Tensor) -> Any:
        part: _Part = ctx.part
        gradient = part.shifted(part.inverse * sum_product / -part.count, sum_gradient / -part.count)
        if part.gradient is not None:  # It is None where the loss does not use this part's output.
            gradient += part.storage.load(part.gradient)
        return gradient.mul_(part.scale.view(part.shape)).to(ctx.dtype), None


class _Combined(torch.autograd.Function):
    """Moments of the whole batch from those of its parts; its backward hands each part the sums over all parts.

    With `as_part` they are moments as those of a part: the second is not divided by the number of values.
    """

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], as_part: bool, *moments: Tensor) -> tuple[Tensor, Tensor]:
        wide = [moment.double() if moment.device.type != "mps" else moment for moment in moments]
        means, squares, total = wide[::2], wide[1::2], sum(counts) or 1
        mean, variance = torch.zeros_like(means[0]), torch.zeros_like(means[0])
        for part_mean, count in zip(means, counts, strict=True):
            mean += part_mean * (count / total)
        for part_squares, part_mean, count in zip(squares, means, counts, strict=True):
            variance += part_squares + count * (part_mean - mean).square()
        return mean.to(moments[0].dtype), (variance if as_part else variance / total).to(moments[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sum_gradient: Tensor, sum_product: Tensor) -> Any:
        count = (len(ctx.needs_input_grad) - 2) // 2
        return None, None, *(sum_gradient, sum_product) * count


class _Normalised(torch.autograd.Function):
    """A part's input, normalised by the moments of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, part: _Part, eps: float
    ) -> Tensor:
        inputs = part.present
        del part.present  # Its copy in host memory is enough from here on.
        part.mean, part.inverse = mean.detach(), (variance + eps).rsqrt()
        part.scale = part.inverse if weight is None else part.inverse * weight.to(mean.dtype)
        ctx.part = part
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        if not inputs.numel():
            return inputs.clone()
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        return F.batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part: _Part = ctx.part
        part.lockstep.check_backward("BatchNorm")
        wide = gradient.to(part.mean.dtype)
        if wide.device.type == "cpu" and wide.numel():
            moments, outputs = (part.mean, part.inverse), [False, True, True]
            _, product, total = torch.ops.aten.native_batch_norm_backward(
                wide, part.loaded(), None, None, None, *moments, True, 0.0, outputs
            )
        else:
            product = part.shifted(part.inverse, torch.zeros_like(part.mean)).mul_(wide).sum(part.dims)
            total = wide.sum(part.dims)
        if ctx.needs_input_grad[0]:
            part.gradient = part.storage.store(gradient)
        weight, bias = ctx.dtypes
        return (
            *(total, product),
            None if weight is None else product.to(weight),
            None if bias is None else total.to(bias),
            *(None, None),
        )


class ExactBatchNorm:
    """Replaces `torch.nn.functional.batch_norm`, which all BatchNorms call, while an update runs in lock step."""

    def __init__(self, lockstep: Lockstep, storage: HostStorage) -> None:
        self._lockstep, self._storage = lockstep, storage
        self._modules: dict[str, Any] = {}
        self._counts: dict[str, Tensor] = {}
        self._places: dict[int, str] = {}
        lockstep.follow = self._follow

    @contextmanager
    def replacing(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Normalise by the whole batch within, in training mode; `modules` tell BatchNorms by their tensors."""
        self._modules = {f"BatchNorm {name}": one for name, one in modules.items() if isinstance(one, BATCHNORMS)}
        tracked = {place: module for place, module in self._modules.items() if module.num_batches_tracked is not None}
        self._counts = {place: module.num_batches_tracked.clone() for place, module in tracked.items()}
        for place, module in self._modules.items():
            self._places |= {id(tensor): place for tensor in (module.running_mean, module.weight) if tensor is not None}
        synced = [module for module in self._modules.values() if isinstance(module, nn.SyncBatchNorm)]
        plain, F.batch_norm = F.batch_norm, self._batch_norm
        self._plain: Callable[..., Tensor] = plain
        try:
            for module in synced:  # Its own forward would wait for the other ranks.
                vars(module)["forward"] = partial(_BatchNorm.forward, module)
            yield
        finally:
            F.batch_norm = plain
            for module in synced:
                vars(module).pop("forward", None)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return self._plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        place = self._places.get(id(running_mean)) or self._places.get(id(weight), "a BatchNorm")
        if self._lockstep.part is None:
            raise WorkloadError(
                f"{place} runs within backward (activation checkpointing), where it cannot wait for the other parts",
                hint='leave out the checkpointing, or take batchnorm="running"',
            )
        part = _Part(input, self._storage, self._lockstep)
        count = input.numel() // input.shape[1] if input.shape[1] else 0
        moments = _Moments.apply(input, part)  # type: ignore[no-untyped-call]
        mean, variance, part.count = self._lockstep.meet(
            place, (count, *moments), lambda values: [self._join(place, values)] * len(values)
        )
        part.present = input.detach()
        output: Tensor = _Normalised.apply(mean, variance, weight, bias, part, eps)  # type: ignore[no-untyped-call]
        return output

    def _join(self, place: str, values: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor, int]:
        counts = [count for count, _, _ in values]
        moments = [moment for _, *pair in values for moment in pair]
        ranks = self._lockstep.ranks
        if ranks is None:
            return self._combine(place, counts, moments)
        own = _Combined.apply(counts, True, *moments)  # type: ignore[no-untyped-call]
        return self._combine_rows(place, ranks.meet(place, sum(counts), own)[1])

    def _follow(self, place: str, rows: RankRows) -> None:
        """Update the running statistics of a BatchNorm that other ranks have called."""
        if place in self._modules:
            self._combine_rows(place, rows)

    def _combine_rows(self, place: str, rows: RankRows) -> tuple[Tensor, Tensor, int]:
        return self._combine(place, [count for count, _ in rows], [moment for _, pair in rows for moment in pair])

    def _combine(self, place: str, counts: Sequence[int], moments: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
        """Return mean and variance of all parts, and the number of values; update the running statistics once."""
        total = sum(counts)
        if total <= 1:
            raise WorkloadError(
                f"the whole batch has {total} value per channel, and BatchNorm needs more", hint="take more samples"
            )
        mean, variance = _Combined.apply(counts, False, *moments)  # type: ignore[no-untyped-call]
        module = self._modules.get(place)
        if module is not None and module.training and module.track_running_stats:
            if place in self._counts:  # Each part has raised it.
                with torch.no_grad():
                    module.num_batches_tracked.copy_(self._counts[place])
                    self._counts[place].add_(1)
            update_statistics(module, mean.detach(), variance.detach() * (total / (total - 1)))
        return mean, variance, total
