"""The savers of an Accumulator: which there are, how they combine, and where in an update each acts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.activation_checkpointing import checkpointed, choose_blocks, trained_blocks
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.gradients import HALF_DTYPES, GradientBuffers, needs_buffers
from autoaccum.accumulation.host_storage import OffloadedActivations
from autoaccum.accumulation.step_result import StepPhase
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.errors import UsageError
from autoaccum.sharded_tensors import is_sharded_model
from autoaccum.spec import OFFLOADS, RECOMPUTE, read_savers


class Savers:
    """Lets an Accumulator take less memory of the device.

    Args:
        words: The ways, as `spec.read_savers` returns them; the attribute has those added since, too.
        model: The model.
        optimizer: Its optimizer.
        exact_batchnorm: Whether BatchNorm normalises by the whole batch.

    Raises:
        UsageError: The model has no blocks to recompute, or fewer; or it is sharded, and something is to be offloaded.
    """

    def __init__(self, words: Sequence[str], model: nn.Module, optimizer: Optimizer, *, exact_batchnorm: bool) -> None:
        self.words: tuple[str, ...] = ()
        self._model, self._optimizer, self._exact_batchnorm = model, optimizer, exact_batchnorm
        self._recomputed: list[str] = []
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
            self._recomputed = choose_blocks(self._model, blocks, exact_batchnorm=self._exact_batchnorm)
        elif word == "offload-optimizer" and self._offloaded is None:
            self._offloaded = OffloadedOptimizer(self._optimizer)
        self.words = read_savers([*self.words, word], UsageError)

    def add_next(self, phase: StepPhase, among: Collection[str] = (RECOMPUTE, *OFFLOADS)) -> str | None:
        """Add the next saver, after memory ran out in `phase` with the least samples; return its word, or None.

        All blocks are recomputed first, and the offloads follow; an update takes less by the last one only. On the CPU
        these save nothing: host memory is what ran out. Ranks that call this alike choose alike.
        """
        useful = (RECOMPUTE, *OFFLOADS) if phase != "update" else OFFLOADS[-1:]
        recomputes_all = len(self._recomputed) == len(trained_blocks(self._model))
        for word in useful if model_device(self._model).type != "cpu" else useful[: phase != "update"]:
            if word not in among or word in self.words or (word == RECOMPUTE and recomputes_all):
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

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Save memory while the parts of an update run forward and backward."""
        with ExitStack() as stack:
            stack.enter_context(checkpointed(self._model, self._recomputed))
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


class OffloadedOptimizer:
    """Lets an optimizer update copies of its parameters in host memory, and writes them back in place.

    Between updates the optimizer has its own parameters, so that its `state_dict` is as usual. Parameters of half
    precision are copies in float32, rounded: what an update adds is not lost, however small.

    Attributes:
        held_bytes: Of copies and state, and of the gradients of the last update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self.held_bytes = 0, 0

    @contextmanager
    def on_host(self, buffers: GradientBuffers | None) -> Iterator[None]:
        """Give the optimizer its parameters and gradients in host memory.

        Gradients are those in `buffers`, if any, or `.grad`, which is freed. A rollback that is to restore what the
        optimizer did in here comes before the end.
        """
        groups = [group["params"] for group in self._optimizer.param_groups]
        originals = [list(parameters) for parameters in groups]
        copies = {parameter: self._copy(parameter) for parameters in originals for parameter in parameters}
        sums = {} if buffers is None else buffers.sums
        for parameter, copy in copies.items():
            gradient, parameter.grad = sums.pop(parameter, parameter.grad), None
            copy.grad = None if gradient is None else gradient.to("cpu", copy.dtype)
            del gradient
        try:
            for parameters in groups:  # In place: an optimizer may hold the list itself.
                parameters[:] = [copies[parameter] for parameter in parameters]
            self._rename(copies)
            yield
            states = [value for copy in copies.values() for value in self._optimizer.state.get(copy, {}).values()]
            kept = [*copies.values(), *(value for value in states if isinstance(value, Tensor))]
            gradients = [copy.grad for copy in copies.values() if copy.grad is not None]
            self.held_bytes = sum(tensor.nbytes for tensor in kept), sum(gradient.nbytes for gradient in gradients)
        finally:
            for parameters, before in zip(groups, originals, strict=True):
                parameters[:] = before
            self._rename({copy: parameter for parameter, copy in copies.items()})
            for copy in copies.values():
                copy.grad = None

    def write_back(self) -> None:
        """Write the parameters that have been updated to the device."""
        with torch.no_grad():
            for parameter, copy in self._copies.values():
                if copy.grad is not None:
                    parameter.copy_(copy)

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        """Return the copy of a parameter, with the values that it has now."""
        now = parameter.detach().to("cpu")
        original, copy = self._copies.get(id(parameter), (None, None))
        if copy is None or original is not parameter:
            dtype = torch.float32 if now.dtype in HALF_DTYPES else now.dtype
            copy = nn.Parameter(now.to(dtype, copy=True), requires_grad=parameter.requires_grad)
            self._copies[id(parameter)] = parameter, copy
            return copy
        with torch.no_grad():
            # What was changed meanwhile, as by loading a checkpoint; the rest keeps what rounding would take away.
            copy.copy_(torch.where(copy.to(now.dtype) == now, copy, now.to(copy.dtype)))
        return copy

    def _rename(self, names: Mapping[Tensor, Tensor]) -> None:
        """Let each parameter's state be that of its copy, in host memory; or the other way round."""
        state = self._optimizer.state
        for before, after in names.items():
            if before in state:
                entry = state[after] = state.pop(before)
                for name, value in entry.items():
                    if isinstance(value, Tensor) and value.device.type != "cpu":
                        entry[name] = value.to("cpu")
