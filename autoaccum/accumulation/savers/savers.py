"""The savers of an Accumulator: which there are, how they combine, and where in an update each acts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.savers.offloaded_activations import OffloadedActivations
from autoaccum.accumulation.savers.offloaded_optimizer import OffloadedOptimizer
from autoaccum.accumulation.savers.recompute import Recompute
from autoaccum.accumulation.sharded_tensors import is_sharded
from autoaccum.errors import UsageError

RECOMPUTE: Final = "recompute"
OFFLOADS: Final = ("offload-activations", "offload-gradients", "offload-optimizer")
_HINT = f"take {RECOMPUTE} (all repeated blocks), {RECOMPUTE}=N (N of them), {', '.join(OFFLOADS)}"


@dataclass(frozen=True)
class Choice:
    """Savers that were chosen.

    Attributes:
        recompute: How many of the model's repeated blocks run again in backward: `"all"` of them, or a number.
        activations: Whether what backward needs waits in host memory.
        gradients: Whether gradients are summed in host memory.
        optimizer: Whether the optimizer's state and update are in host memory.
    """

    recompute: int | str = 0
    activations: bool = False
    gradients: bool = False
    optimizer: bool = False

    @classmethod
    def read(cls, words: str | Iterable[str]) -> Choice:
        """Return the savers of `words`, such as `recompute=6` and `offload-optimizer`.

        >>> Choice.read(["recompute=6", "offload-optimizer"]).words
        ('recompute=6', 'offload-optimizer')

        Raises:
            UsageError: A word is unknown, or the number of blocks is none.
        """
        given = [words] if isinstance(words, str) else list(words)
        blocks: int | str = 0
        for word in given:
            name, has_number, number = word.partition("=") if isinstance(word, str) else (word, "", "")
            if name == RECOMPUTE and not has_number:
                blocks = "all"
            elif name == RECOMPUTE and number.isdecimal() and int(number):
                blocks = int(number)
            elif word not in OFFLOADS:
                raise UsageError(f"{word!r} is no saver", hint=_HINT)
        return cls(blocks, *(name in given for name in OFFLOADS))

    @property
    def words(self) -> tuple[str, ...]:
        """The savers in words, as `read` takes them."""
        recompute = RECOMPUTE if self.recompute == "all" else f"{RECOMPUTE}={self.recompute}"
        flags = (self.activations, self.gradients, self.optimizer)
        return (
            *([recompute] if self.recompute else []),
            *(name for name, on in zip(OFFLOADS, flags, strict=True) if on),
        )


class Savers:
    """Lets an Accumulator take less memory of the device, in the ways that were chosen.

    Raises:
        UsageError: The model has no blocks to recompute, or fewer; or it is sharded, and something is to be offloaded.
    """

    def __init__(self, choice: Choice, model: nn.Module, optimizer: Optimizer, *, exact_batchnorm: bool) -> None:
        self.choice = choice
        if (choice.activations or choice.gradients or choice.optimizer) and any(map(is_sharded, model.parameters())):
            raise UsageError(
                "FSDP2 shards the model, and a saver is to offload what it holds",
                hint="give fully_shard offload_policy=CPUOffloadPolicy(); recompute goes with sharded models",
            )
        blocks = choice.recompute
        self._recompute = Recompute(model, blocks, exact_batchnorm=exact_batchnorm) if blocks else None
        self._optimizer = OffloadedOptimizer(optimizer) if choice.optimizer else None
        self._model = model

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Save memory while the parts of an update run forward and backward."""
        with ExitStack() as stack:
            if self._recompute is not None:
                stack.enter_context(self._recompute.running())
            if self.choice.activations:
                kept = [*self._model.parameters(), *self._model.buffers()]
                stack.enter_context(OffloadedActivations(kept).saving())
            yield

    def buffers(self, parameters: Sequence[Tensor], *, in_fp32: bool) -> GradientBuffers | None:
        """Return buffers in host memory that sum the gradients; None if they are summed on the device."""
        return GradientBuffers(parameters, in_fp32=in_fp32, on_host=True) if self.choice.gradients else None

    def around_update(self, buffers: GradientBuffers | None, *, is_scaled: bool) -> AbstractContextManager[Any]:
        """Return the context in which gradients are clipped and the optimizer updates; it yields the buffers left."""
        if self._optimizer is not None:
            return self._optimizer.on_host(buffers)
        if self.choice.gradients and is_scaled and buffers is not None:  # A scaler unscales `.grad`.
            buffers.write_gradients()
            return nullcontext()
        return nullcontext(buffers)

    def write_back(self) -> None:
        """Write to the device what was updated in host memory."""
        if self._optimizer is not None:
            self._optimizer.write_back()
