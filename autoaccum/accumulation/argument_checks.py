"""Check the arguments of an Accumulator before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum.checks import check_group, read_count
from autoaccum.errors import UsageError
from autoaccum.workload.optimizers import needs_closure

PRECISIONS = ("fp32", "bf16", "fp16")

_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer within accelerate's `AcceleratedOptimizer` or Lightning's `LightningOptimizer`."""
    while _is_wrapper(optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_wrapper(optimizer: Optimizer) -> None:
    """Raise UsageError for a framework's optimizer wrapper that would silently skip updates or scale gradients.

    accelerate's `step` updates only once in `gradient_accumulation_steps` calls. With fp16 both wrappers unscale
    gradients of a loss that was never scaled (accelerate/optimizer.py, Lightning's plugins/precision/amp.py).
    """
    if not _is_wrapper(optimizer):
        return
    steps = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if steps != 1:
        raise UsageError(
            f"accelerate's optimizer makes one update in {steps} steps",
            hint="omit gradient_accumulation_steps: the Accumulator accumulates",
        )
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    if any(getattr(owner, "scaler", None) is not None for owner in (optimizer, plugin)):
        raise UsageError(
            "the framework's optimizer scales gradients for fp16, and so would the Accumulator",
            hint='give precision="fp16" to the Accumulator, and no mixed precision to the framework',
        )


def _is_wrapper(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS


def check_model(model: Any) -> None:
    """Raise UsageError unless `model` is a module with initialised parameters, in a process of its own."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}", hint="give an nn.Module")
    check_group()
    check_unsharded(model)
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise UsageError(f"parameter {lazy} is not initialised yet", hint="run the model on a sample batch first")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise UsageError unless `optimizer` is one optimizer of `model`, and its step only updates.

    It may leave out some of the model's trainable parameters, whose gradients are then computed and dropped.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}", hint="give one torch.optim.Optimizer")
    if needs_closure(type(optimizer)):
        raise UsageError(
            f"{type(optimizer).__name__} needs a closure, which would run the model again within the update",
            hint="use an optimizer whose step() needs none, such as AdamW",
        )
    check_wrapper(optimizer)
    trained = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"the {type(optimizer).__name__} holds no parameter of the model",
            hint="build it from model.parameters(), after the model is in place",
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise UsageError for a scheduler that cannot be stepped once per update."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric, and the loss of one update is too noisy for one",
            hint="omit scheduler, and call its step(validation_loss) yourself after each evaluation",
        )
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler is a {type(scheduler).__name__}", hint="give one of torch.optim.lr_scheduler")
    groups = getattr(getattr(scheduler, "optimizer", optimizer), "param_groups", optimizer.param_groups)
    if groups is not optimizer.param_groups:
        raise UsageError("the scheduler belongs to another optimizer", hint="build it from the optimizer given here")


def check_precision(precision: Any) -> None:
    """Raise UsageError for an unknown precision."""
    if precision not in PRECISIONS:
        raise UsageError(f"the precision is {precision!r}", hint=f"use one of {', '.join(PRECISIONS)}")


def check_clip_norm(clip_norm: Any) -> None:
    """Raise UsageError for a clipping norm that is not a positive number or None."""
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or math.isnan(clip_norm) or clip_norm <= 0:
        raise UsageError(
            f"clip_norm is {clip_norm!r}", hint='use a number above 0, float("inf") to measure only, or None'
        )


def checked_micro_batch(micro_batch: Any, multiple_of: int = 1, *, what: str = "micro_batch") -> int:
    """Return `micro_batch` as an integer; raise UsageError unless it is a whole number of at least `multiple_of`.

    `what` is its name in messages.
    """
    number = read_count(micro_batch, what)
    if number < multiple_of:
        raise UsageError(
            f"{what} is {number}, and micro-batches are to be multiples of {multiple_of}",
            hint=f"allow {multiple_of} or more",
        )
    return number


def check_unsharded(model: nn.Module) -> None:
    """Raise UsageError if the model or a module within it is distributed over ranks, even over a single one."""
    found = next(_distributed_parts(model), None)
    if found is not None:
        name, what = found
        where = f"{name} in the model" if name else "the model"
        raise UsageError(
            f"{where} is {what}, and several ranks are not built yet",
            hint="give the bare module, in one process: not wrapped, not sharded",
        )


def _distributed_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        wrappers = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS]
        if wrappers:
            yield name, "sharded by fully_shard" if wrappers[0] == "FSDPModule" else f"a {wrappers[0]}"
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            yield name, "a DTensor"
