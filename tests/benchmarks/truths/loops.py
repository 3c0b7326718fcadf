"""Plain training loops on a simulated card: what the loops of the tables ask of the allocator."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from truths.scores import Predicted

from autoaccum.devices.simulated.simulated_device import predict_trial
from autoaccum.simulation.allocator.caching_allocator import read_settings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import Card, ContextMemory, context_memory
from autoaccum.simulation.torch_patches import torch_release
from autoaccum.simulation.trace_records import Trace
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.recorder import Recorder, manual_garbage_collection
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.sources.batches import move_batch
from autoaccum.units import MIB

_EAGER_MIB = {
    # Beside a tensor of one element: torch 1.8.2+cu111 (pytorch/pytorch#55277), and Hugging Face on a model's training.
    "NVIDIA GeForce RTX 3090": 1685,
    "Tesla V100-SXM2-16GB": 1341,
}
"""Contexts with all of PyTorch's kernels in them, as they were before PyTorch 1.13 and CUDA 11.7."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop without accumulation. The model is moved to the card before the optimizer is made: see below.

    In a loop that makes the optimizer first, it keeps the same parameters, whose data alone are moved, and its state
    comes with the first update: the allocator sees the same.

    Attributes:
        model: Builds it, on the host.
        batch: Makes one batch, on the host.
        forward: The loss, and what else the loop names at the end of an iteration.
        optimizer: Makes it from the parameters.
        precision: Autocast to it, backward included; None: none.
        zero_grad: When gradients are cleared.
        set_to_none: Whether they are then gone.
        keeps: Whether the loss and the outputs of an iteration stay until those of the next take their names.
        resident_batch: One batch, put on the card before the first iteration; else one for each iteration.
        channels_last: Whether model and batch are put into that format, on the card.
        benchmark: `torch.backends.cudnn.benchmark`.
        updates: How many. The last one is replayed once more if it leaves nothing behind, as it does without `keeps`:
            then the second is like those that follow.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    precision: torch.dtype | None = None
    zero_grad: Literal["start", "before backward", "after step"] = "start"
    set_to_none: bool = True
    keeps: bool = True
    resident_batch: bool = False
    channels_last: bool = False
    benchmark: bool = False
    updates: int = 3


def predict_loop(loop: Loop, card: Card, batch: int, *, eager: bool = False) -> Predicted:
    """Trace `loop`, whose batches have `batch` samples, on `card`, and replay it there.

    `eager`: all kernels are loaded with the context, as before PyTorch 1.13 and CUDA 11.7.
    """
    trace = trace_loop(loop, card, batch)
    settings = read_settings(os.environ, card.total_bytes)
    replayer = Replayer(card, settings, torch_release())
    outside = _eager_context(card) if eager else context_memory(card)
    capacity_bytes = card.total_bytes - outside.bytes
    peaks = replayer.replay(trace, capacity_bytes)[2]
    return Predicted(
        batch=batch,
        outcome=predict_trial(replayer, [trace], capacity_bytes).outcome,
        capacity_bytes=capacity_bytes,
        allocated_bytes=peaks.peak_allocated_bytes,
        shown_bytes=peaks.peak_reserved_bytes,
        min_budget_bytes=replayer.min_budget_bytes([trace], replayer.peak_bytes(trace)),
        start_bytes=outside.start_bytes,
        modules_bytes=outside.modules_bytes,
    )


def _eager_context(card: Card) -> ContextMemory:
    """Kernels of cuDNN and cuBLAS come when they are first used: 50 to 250 MiB, by reports."""
    start, late, band = (each * MIB for each in (_EAGER_MIB[card.title], 150, 100))
    return ContextMemory(
        start_bytes=start, modules_bytes=late, uncertainty_bytes=band, source="reported", measured=True
    )


def trace_loop(loop: Loop, card: Card, batch: int) -> Trace:
    """Return the allocator requests of `loop` on `card`, from moving the model there."""
    recorder, before = Recorder(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = loop.benchmark
    try:
        with simulate(card, recorder) as mode, manual_garbage_collection():
            model = _lazily(mode, loop.model)
            recorder.begin(lambda: "forward")
            _run(loop, model, mode)
            return recorder.trace((batch,))
    finally:
        torch.backends.cudnn.benchmark = before


def _run(loop: Loop, model: nn.Module, mode: FakeCudaMode) -> None:
    """Run the updates; `loss`, `outputs` and the batch are held as long as the variables of a loop hold them."""
    layout: dict[str, Any] = {"memory_format": torch.channels_last} if loop.channels_last else {}
    model = model.to("cuda", **layout).train()
    optimizer = loop.optimizer(model.parameters())
    clear = partial(optimizer.zero_grad, set_to_none=loop.set_to_none)
    batch: Any = _on_card(loop, mode) if loop.resident_batch else None
    loss: Any = None
    outputs: Any = None
    for _ in range(loop.updates):
        gc.collect()
        mode.recorder.mark_update()
        if loop.zero_grad == "start":
            clear()
        if not loop.resident_batch:
            batch = _on_card(loop, mode)
        with nullcontext() if loop.precision is None else torch.autocast("cuda", dtype=loop.precision):
            loss, outputs = loop.forward(model, batch)
            if loop.zero_grad == "before backward":
                clear()
            loss.backward()
        optimizer.step()
        if loop.zero_grad == "after step":
            clear()
        if not loop.keeps:
            loss = outputs = None
    del outputs


def _on_card(loop: Loop, mode: FakeCudaMode) -> Any:
    batch = move_batch(_lazily(mode, loop.batch), torch.device("cuda"))
    if not loop.channels_last:
        return batch
    images, *rest = batch
    return (images.contiguous(memory_format=torch.channels_last), *rest)


def _lazily(mode: FakeCudaMode, build: Callable[[], Any]) -> Any:
    """Without values for large tensors; with them where that fails."""
    mode.lazy = True
    try:
        return build()
    except Exception:  # noqa: BLE001 - whatever it is: built for real, it works or says why not.
        mode.lazy = False
        return build()
    finally:
        mode.lazy = False
