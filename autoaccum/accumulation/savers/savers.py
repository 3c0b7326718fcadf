"""The savers of an Accumulator: which there are, how they combine, and where in an update each acts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.gradients import GradientBuffers, needs_buffers
from autoaccum.accumulation.savers.activation_checkpointing import Recompute, trained_blocks
from autoaccum.accumulation.savers.offloaded_optimizer import OffloadedOptimizer
from autoaccum.accumulation.sharded_tensors import is_sharded_model
from autoaccum.accumulation.step_result import StepPhase
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.accumulation.whole_batch.host_storage import OffloadedActivations
from autoaccum.errors import UsageError
from autoaccum.options import OFFLOADS, RECOMPUTE, read_savers


class Savers:
    """Lets an Accumulator take less memory of the device.

    Attributes:
        words: The ways, as `options.read_savers` returns them.

    Args:
        words: The ways, as `options.read_savers` returns them.
        model: The model.
        optimizer: Its optimizer.
        exact_batchnorm: Whether BatchNorm normalises by the whole batch.

    Raises:
        UsageError: The model has no blocks to recompute, or fewer; or it is sharded, and something is to be offloaded.
    """

    def __init__(self, words: Sequence[str], model: nn.Module, optimizer: Optimizer, *, exact_batchnorm: bool) -> None:
        self.words: tuple[str, ...] = ()
        self._model, self._optimizer, self._exact_batchnorm = model, optimizer, exact_batchnorm
        self._recompute: Recompute | None = None
        self._offloaded: OffloadedOptimizer | None = None
        self._activation_bytes = self._gradient_bytes = 0
        for word in words:
            self.add(word)

    def add(self, word: str) -> None:
        """Save memory in one more way, between two attempts of an update.

        Raises:
            UsageError: The model cannot; everything stays as it is.
        """
        if word in OFFLOADS and is_sharded_model(self._model):
            raise UsageError(
                "FSDP2 shards the model, and a saver is to offload what it holds",
                hint="give fully_shard offload_policy=CPUOffloadPolicy(); recompute goes with sharded models",
            )
        if word.startswith(RECOMPUTE):
            blocks = int(word.partition("=")[2] or 0)
            self._recompute = Recompute(self._model, blocks, exact_batchnorm=self._exact_batchnorm)
        elif word == "offload-optimizer" and self._offloaded is None:
            self._offloaded = OffloadedOptimizer(self._optimizer)
        self.words = read_savers([*self.words, word], UsageError)

    def add_next(self, phase: StepPhase, among: Collection[str] = (RECOMPUTE, *OFFLOADS)) -> str | None:
        """Add the next saver, after memory ran out in `phase` with the least samples; return its word, or None.

        All blocks are recomputed first, and the offloads follow; an update takes less by the last one only. On the CPU
        these save nothing: host memory is what ran out. Ranks that call this alike choose alike.
        """
        useful = (RECOMPUTE, *OFFLOADS) if phase != "update" else OFFLOADS[-1:]
        for word in useful if model_device(self._model).type != "cpu" else useful[: phase != "update"]:
            if word not in among or word in self.words or (word == RECOMPUTE and self._recomputes_all()):
                continue
            if word == "offload-optimizer" and needs_buffers(optimizer_parameters(self._optimizer)):
                continue  # Checkpoints would have its weights in float32 rounded.
            try:
                self.add(word)
            except UsageError:
                continue
            return word
        return None

    @property
    def host_bytes(self) -> int:
        """The bytes that the last update kept in memory of the host at most; 0 where that is the device's."""
        if model_device(self._model).type == "cpu":
            return 0
        state_bytes, update_bytes = (0, 0) if self._offloaded is None else self._offloaded.held_bytes
        return state_bytes + max(self._activation_bytes + self._gradient_bytes, update_bytes)

    def _recomputes_all(self) -> bool:
        return self._recompute is not None and len(self._recompute.names) == len(trained_blocks(self._model))

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Save memory while the parts of an update run forward and backward."""
        with ExitStack() as stack:
            if self._recompute is not None:
                stack.enter_context(self._recompute.running())
            storage = None
            if "offload-activations" in self.words:
                storage = OffloadedActivations([*self._model.parameters(), *self._model.buffers()])
                stack.enter_context(storage.saving())
            yield
            self._activation_bytes = 0 if storage is None else storage.peak_bytes

    def buffers(self, parameters: Sequence[Tensor], *, in_fp32: bool) -> GradientBuffers | None:
        """Return buffers in host memory that sum the gradients; None if they are summed on the device."""
        return GradientBuffers(parameters, in_fp32=in_fp32, on_host=True) if "offload-gradients" in self.words else None

    def around_update(self, buffers: GradientBuffers | None, *, is_scaled: bool) -> AbstractContextManager[Any]:
        """Return the context in which gradients are clipped and the optimizer updates; it yields the buffers left."""
        if "offload-gradients" in self.words and buffers is not None:
            self._gradient_bytes = sum(total.nbytes for total in buffers.sums.values())
        if self._offloaded is not None:
            return self._offloaded.on_host(buffers)
        if "offload-gradients" in self.words and is_scaled and buffers is not None:  # A scaler unscales `.grad`.
            buffers.write_gradients()
            return nullcontext()
        return nullcontext(buffers)

    def write_back(self) -> None:
        """Write to the device what was updated in host memory."""
        if self._offloaded is not None:
            self._offloaded.write_back()
