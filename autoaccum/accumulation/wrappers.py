"""Optimizers that a framework has wrapped: which one is inside, and what the wrapper would do once more."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from autoaccum.errors import UsageError

_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning")


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that accelerate (`AcceleratedOptimizer`) or Lightning (`LightningOptimizer`) was given."""
    while _is_wrapper(optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_wrapper(optimizer: Optimizer) -> None:
    """Refuse a framework's wrapper that would leave out updates or scale gradients: neither says so.

    The `step` of accelerate's does nothing but once in `gradient_accumulation_steps`, and with fp16 both wrappers
    unscale gradients of a loss that was never scaled (accelerate/optimizer.py, lightning's plugins/precision/amp.py).

    Raises:
        UsageError: It would.
    """
    if not _is_wrapper(optimizer):
        return
    steps = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if steps != 1:
        raise UsageError(
            f"accelerate's optimizer makes one update in {steps} steps",
            hint="leave gradient_accumulation_steps away: the Accumulator accumulates",
        )
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    if _scaler(optimizer) is not None or _scaler(plugin) is not None:
        raise UsageError(
            "the framework's optimizer scales gradients for fp16, and so would the Accumulator",
            hint='leave mixed precision to the Accumulator: precision="fp16" here, none there',
        )


def _is_wrapper(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS


def _scaler(owner: Any) -> Any:
    return getattr(owner, "scaler", None)
