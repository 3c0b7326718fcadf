"""The savers of an Accumulator: which there are, how they combine, and where in an update each acts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.savers.offloaded_activations import OffloadedActivations
from autoaccum.accumulation.savers.offloaded_optimizer import OffloadedOptimizer
from autoaccum.accumulation.savers.recompute import Recompute
from autoaccum.accumulation.sharded_tensors import is_sharded_model
from autoaccum.errors import UsageError
from autoaccum.options import OFFLOADS, RECOMPUTE


class Savers:
    """Lets an Accumulator take less memory of the device.

    Args:
        words: The ways, as `options.read_savers` returns them.
        model: The model.
        optimizer: Its optimizer.
        exact_batchnorm: Whether BatchNorm normalises by the whole batch.

    Raises:
        UsageError: The model has no blocks to recompute, or fewer; or it is sharded, and something is to be offloaded.
    """

    def __init__(self, words: Sequence[str], model: nn.Module, optimizer: Optimizer, *, exact_batchnorm: bool) -> None:
        self._offloads = set(OFFLOADS) & set(words)
        if self._offloads and is_sharded_model(model):
            raise UsageError(
                "FSDP2 shards the model, and a saver is to offload what it holds",
                hint="give fully_shard offload_policy=CPUOffloadPolicy(); recompute goes with sharded models",
            )
        blocks = [word.partition("=")[2] for word in words if word.startswith(RECOMPUTE)]
        self._recompute = Recompute(model, int(blocks[0] or 0), exact_batchnorm=exact_batchnorm) if blocks else None
        self._optimizer = OffloadedOptimizer(optimizer) if "offload-optimizer" in words else None
        self._model = model

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Save memory while the parts of an update run forward and backward."""
        with ExitStack() as stack:
            if self._recompute is not None:
                stack.enter_context(self._recompute.running())
            if "offload-activations" in self._offloads:
                kept = [*self._model.parameters(), *self._model.buffers()]
                stack.enter_context(OffloadedActivations(kept).saving())
            yield

    def buffers(self, parameters: Sequence[Tensor], *, in_fp32: bool) -> GradientBuffers | None:
        """Return buffers in host memory that sum the gradients; None if they are summed on the device."""
        return (
            GradientBuffers(parameters, in_fp32=in_fp32, on_host=True)
            if "offload-gradients" in self._offloads
            else None
        )

    def around_update(self, buffers: GradientBuffers | None, *, is_scaled: bool) -> AbstractContextManager[Any]:
        """Return the context in which gradients are clipped and the optimizer updates; it yields the buffers left."""
        if self._optimizer is not None:
            return self._optimizer.on_host(buffers)
        if "offload-gradients" in self._offloads and is_scaled and buffers is not None:  # A scaler unscales `.grad`.
            buffers.write_gradients()
            return nullcontext()
        return nullcontext(buffers)

    def write_back(self) -> None:
        """Write to the device what was updated in host memory."""
        if self._optimizer is not None:
            self._optimizer.write_back()
