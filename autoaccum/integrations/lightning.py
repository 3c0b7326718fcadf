"""Within the loop of a Lightning Trainer: exact accumulation.

trainer = Trainer(accumulate_grad_batches=13, callbacks=[ExactAccumulation()])

It is for `lightning.pytorch` and `pytorch_lightning`: import the one that you train with first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autoaccum.errors import UsageError
from autoaccum.sources.batches import batch_size
from autoaccum.sources.objective import read_weight

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Return the Callback of the packages that are imported, since each Trainer takes its own; else of lightning."""
    names = [name for name in _PACKAGES if name in sys.modules] or _PACKAGES[:1]
    return tuple(import_module(name).Callback for name in names)


class ExactAccumulation(*_callback_classes()):  # type: ignore[misc]  # Its bases are known where it is imported.
    """Makes the accumulated update of automatic optimisation that of the full batch.

    A Trainer divides the loss of every micro-batch by `accumulate_grad_batches`. That is the full batch's mean only if
    all have as many samples, or tokens, and if there are so many: the last update of an epoch may have fewer. Here each
    counts by its weight, over all ranks. Clipping follows, as the Trainer does it.

    Args:
        weight: `weight(batch)`: the number that the mean in `training_step` divides by; the number of samples when
            None. It is read for each micro-batch, so that a count on a card waits for it.
    """

    def __init__(self, weight: Callable[[Any], Any] | None = None) -> None:
        self._weigh = batch_size if weight is None else weight
        self._unit: float | None = None
        self._weight = self._total = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise UsageError where the loop does not accumulate by itself."""
        if not pl_module.automatic_optimization:
            raise UsageError(
                "ExactAccumulation is for automatic optimisation, and the module optimises by hand",
                hint="use an Accumulator in training_step, as examples/lightning_manual.py does",
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise UsageError(
                f"{type(trainer.strategy).__name__} accumulates by itself, where no callback can weigh micro-batches",
                hint="give every micro-batch as many samples, and drop those that are left (drop_last=True)",
            )
        self._unit = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Weigh a micro-batch; the first one's weight is the unit, so that gradients keep their magnitude in fp16."""
        self._weight = read_weight(self._weigh(batch), "weight(batch)")
        if self._unit is None:
            self._unit = float(trainer.strategy.broadcast(self._weight)) or 1.0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin a new update."""
        self._total = 0.0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Multiply the gradient of the loss by the micro-batch's weight."""
        assert self._unit is not None
        factor = self._weight / self._unit
        self._total += factor
        loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Divide the gradients by the weight of all micro-batches and ranks, in place of the Trainer's number."""
        total, ranks = self._total, trainer.world_size
        if ranks > 1:
            given = torch.tensor(total, dtype=torch.float64, device=pl_module.device)
            total = float(trainer.strategy.reduce(given, reduce_op="sum"))
        factor = trainer.accumulate_grad_batches * ranks / total if total else 1.0
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
