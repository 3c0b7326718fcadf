"""`whole_batch(x)`: a tensor of all samples of the update, for models and losses that need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoaccum.accumulation.whole_batch.lockstep import Lockstep
from autoaccum.accumulation.whole_batch.rank_meetings import RankMeetings
from autoaccum.errors import WorkloadError

IN_SEQUENCE = object()
_PLACE = "whole_batch(x)"
_running: Any = None
"""How the parts of the present update run: in a `Lockstep`, one after the other, or None outside of one."""


class NeedsWholeBatch(BaseException):
    """Raised by `whole_batch` where parts run one after the other: the update has to run in lock step."""


class OnePart:
    """A part that runs alone, as in an evaluation: `whole_batch(x)` is `x`, and `calls` counts how often."""

    calls = 0


@contextmanager
def parts_run(how: Any) -> Iterator[None]:
    """Let `whole_batch` join parts that run in the `Lockstep` given; raise NeedsWholeBatch for parts IN_SEQUENCE.

    In `OnePart` it joins nothing.
    """
    global _running
    before, _running = _running, how
    try:
        yield
    finally:
        _running = before


def whole_batch(x: Tensor) -> Tensor:
    """Return `x` of all samples of the effective batch, for use within a model or a loss.

    Within an update in micro-batches, the `x` of all micro-batches, those of other ranks too, is joined along the first
    dimension; it is differentiable, so that each sample's gradient is that of all uses. Elsewhere `x` itself is
    returned.

    A model that balances the load of experts over the whole batch:

        share = autoaccum.whole_batch(gates).mean(0)
        balance = experts * (share * share).sum()

    Where a micro-batch waits for this, others run. What it has set on a module it finds again; what it has written
    elsewhere, such as into a dict of one's own, may be another's.

    Each micro-batch's loss counts by its share of the update, so a term that all compute alike counts once. In a loss
    with `reduction="sum"` it would count once for each micro-batch, so that is refused.

    Args:
        x: A tensor whose first dimension is the sample, or a number of rows for each sample.

    Raises:
        WorkloadError: `x` is no such tensor, the micro-batches' tensors cannot be joined, or their losses are added up.
    """
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise WorkloadError("whole_batch(x) needs a tensor whose first dimension is the sample")
    running = _running
    if running is IN_SEQUENCE:
        raise NeedsWholeBatch
    if running is None or isinstance(running, OnePart):
        if running is not None:
            running.calls += 1
        return x if torch.is_grad_enabled() else x.detach()
    if running.part is None:
        raise WorkloadError(
            "whole_batch(x) runs within backward (activation checkpointing), where it cannot wait for the other parts",
            hint="leave out the checkpointing, or call whole_batch outside of the checkpointed part",
        )
    if running.adds_up:
        raise WorkloadError(
            "the loss is a sum, and whole_batch(x) is called: a term that all micro-batches compute alike would count"
            " once for each of them",
            hint='make the loss a mean (reduction="mean"), or compute it of all outputs in coupled_loss',
        )
    # The joined tensor and its gradients wait in host memory for the other parts.
    joined: Tensor = running.meet(_PLACE, x.cpu(), partial(join_rows, ranks=running.ranks))
    return joined.to(x.device, copy=True)  # Else, on the CPU, a part that changes it in place changes all parts'.


def join_rows(values: Sequence[Tensor], ranks: RankMeetings | None = None) -> list[Tensor]:
    """Return, for each part, the tensors of all parts, of all ranks, joined along the first dimension."""
    joined = _join_rows(values)
    if ranks is not None:
        joined = _join_rows([rows for _, (rows,) in ranks.meet(_PLACE, None, [joined])[1]])
    return [joined] * len(values)


def _join_rows(values: Sequence[Tensor]) -> Tensor:
    shapes = {(value.shape[1:], value.dtype) for value in values}
    if len(shapes) > 1:
        raise WorkloadError(
            f"whole_batch(x) got tensors of different shapes or dtypes: {', '.join(map(_describe, values))}",
            hint="make all but the first dimension equal, as by padding to one length",
        )
    joined: Tensor = _Joined.apply(*values)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    """`torch.cat`; autograd adds up the gradients of all parts before its backward splits them."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.lengths = [len(value) for value in values]
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if isinstance(_running, Lockstep):
            _running.check_backward("whole_batch(x)")
        return torch.split(gradient, ctx.lengths)


def _describe(value: Tensor) -> str:
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
