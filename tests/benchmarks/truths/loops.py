"""Plain training loops on a simulated card: what the loops of the tables ask of the allocator."""

from __future__ import annotations

import gc
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from truths.scores import NotBuilt, Predicted

from autoaccum.devices.simulated.simulated_device import predict_trial
from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import LARGE_GRAIN_BYTES, CachingAllocator, read_settings
from autoaccum.simulation.allocator.replay import EventReplay, Replayer, SizedTrace
from autoaccum.simulation.cards import Card, ContextMemory, context_memory
from autoaccum.simulation.releases import Release
from autoaccum.simulation.torch_patches import torch_release
from autoaccum.simulation.trace_records import Phase, Trace
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
        model: Builds it, on the host, or on the card if it `loads`.
        batch: Makes one batch, on the host.
        forward: The loss, and what else the loop names at the end of an iteration.
        optimizer: Makes it from the model.
        loads: Whether the model is on the card once it is built, so that building it is a part of the trace.
        with_values: Whether a model that cannot be built without values is built with them, in this machine's memory.
        precision: Autocast to it, backward included; None: none.
        zero_grad: When gradients are cleared.
        set_to_none: Whether they are then gone.
        keeps: Whether the loss and the outputs of an iteration stay until those of the next take their names.
        resident_batch: One batch, put on the card before the first iteration; else one for each iteration, whose name
            is the host's batch by then, so that the one before is gone.
        channels_last: Whether model and batch are put into that format, on the card.
        benchmark: `torch.backends.cudnn.benchmark`.
        updates: How many. The last one is replayed once more if it leaves nothing behind, as it does without `keeps`:
            then the second is like those that follow.
        twice: Whether the process runs it once more, with a new model and nothing cached. The least memory is then that
            of the second run; the first one may use the whole card.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    optimizer: Callable[[nn.Module], Optimizer]
    loads: bool = False
    with_values: bool = True
    precision: torch.dtype | None = None
    zero_grad: Literal["start", "before backward", "after step"] = "start"
    set_to_none: bool = True
    keeps: bool = True
    resident_batch: bool = False
    channels_last: bool = False
    benchmark: bool = False
    updates: int = 3
    twice: bool = False


def with_parameters(make: Callable[..., Optimizer], **settings: Any) -> Callable[[nn.Module], Optimizer]:
    """An optimizer of all parameters, for `Loop.optimizer`."""
    return lambda model: make(model.parameters(), **settings)


def predict_loop(
    loop: Loop, card: Card, batch: int, *, eager: bool = False, release: Release | None = None
) -> Predicted:
    """Trace `loop`, whose batches have `batch` samples, on `card`, and replay it there.

    `eager`: all kernels are loaded with the context, as before PyTorch 1.13 and CUDA 11.7. `release`: of the PyTorch
    that was measured, whose rules are followed (`simulation/releases.py`); None: the installed one.
    """
    release = release or torch_release()
    outside = _eager_context(card) if eager else context_memory(card)
    traces = trace_runs(loop, card, batch, release)
    predicted, _ = predict_trace(traces[0], card, batch, release, outside, os.environ)
    if not loop.twice or not predicted.trains:
        return predicted
    replayer = Replayer(card, read_settings(os.environ, card.total_bytes), release)
    return replace(predicted, min_budget_bytes=_least_of_second(traces[1], replayer, predicted.capacity_bytes))


def predict_trace(
    trace: Trace,
    card: Card,
    batch: int,
    release: Release,
    outside: ContextMemory,
    environment: Mapping[str, str],
    taken_bytes: int = 0,
) -> tuple[Predicted, SizedTrace]:
    """Replay a trace on `card`, of which others have taken some bytes; the environment has the allocator's settings."""
    replayer = Replayer(card, read_settings(environment, card.total_bytes), release)
    capacity_bytes = card.total_bytes - outside.bytes - taken_bytes
    sized, _, within = replayer.replay(trace, capacity_bytes)
    predicted = Predicted(
        batch=batch,
        outcome=predict_trial(replayer, [trace], capacity_bytes).outcome,
        capacity_bytes=capacity_bytes,
        phases_bytes=phase_peaks(sized, replayer, capacity_bytes) if within.fits else {},
        shown_bytes=within.peak_reserved_bytes,
        min_budget_bytes=replayer.min_budget_bytes([trace], replayer.peak_bytes(trace)),
        start_bytes=outside.start_bytes,
        modules_bytes=outside.modules_bytes,
    )
    return predicted, sized


def _least_of_second(trace: Trace, replayer: Replayer, capacity_bytes: int) -> int:
    """Return the smallest limit at which the second run of a process goes through; the first one has all memory.

    Without one up to `capacity_bytes`, the result is larger than that. All segments are multiples of 2 MiB.
    """
    sized = replayer.with_sizes(trace)
    start = max(index for index, phase in trace.phases if phase == "load")

    def fits(grains: int) -> bool:
        allocator = CachingAllocator(capacity_bytes, replayer.settings)
        replay = EventReplay(allocator, sized)
        replay.run(trace.events[:start])
        allocator.set_capacity(grains * LARGE_GRAIN_BYTES)
        return replay.run(trace.events[start:]) is None

    return LARGE_GRAIN_BYTES * bisect_left(range(capacity_bytes // LARGE_GRAIN_BYTES + 1), True, key=fits)


def phase_peaks(sized: SizedTrace, replayer: Replayer, capacity_bytes: int) -> Mapping[str, int]:
    """Return the most that is allocated in each phase of the last update, with what was held before it.

    `load` is what is held once the model has been loaded, and `reserved` the most that is reserved in the last update.
    """
    allocator, blocks = CachingAllocator(capacity_bytes, replayer.settings), dict[int, Block]()
    peaks: dict[str, int] = {}
    last: str | None = None
    for index, event in enumerate(sized.trace.events):
        phase: str = sized.phase_at(index)
        if index >= sized.trace.last_update:
            for name in {phase, "reserved"} - peaks.keys() if phase != last else ():
                peaks[name] = allocator.reserved_bytes if name == "reserved" else allocator.allocated_bytes
            last = phase
        if event < 0:
            if (block := blocks.pop(~event, None)) is not None:
                allocator.free(block)
        elif sized.sizes[event] > 0:
            blocks[event] = allocator.malloc(sized.sizes[event])
        elif sized.sizes[event] < 0:  # `EMPTY_CACHE`, or once.
            allocator.release_cached_blocks()
        if phase == "load":
            peaks[phase] = allocator.allocated_bytes
        elif last is not None:
            peaks[phase] = max(peaks[phase], allocator.allocated_bytes)
            peaks["reserved"] = max(peaks["reserved"], allocator.reserved_bytes)
    return peaks


def _eager_context(card: Card) -> ContextMemory:
    """Kernels of cuDNN and cuBLAS come when they are first used: 50 to 250 MiB, by reports."""
    start, late, band = (each * MIB for each in (_EAGER_MIB[card.title], 150, 100))
    return ContextMemory(
        start_bytes=start, modules_bytes=late, uncertainty_bytes=band, source="reported", measured=True
    )


def trace_runs(loop: Loop, card: Card, batch: int, release: Release | None = None) -> list[Trace]:
    """Return the allocator requests of `loop` on `card`, and if it runs twice, those of both runs.

    They begin with moving the model there, or with loading it. Those of the second run all have the phase `load`.
    """
    recorder, before = Recorder(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = loop.benchmark
    phases: list[Phase] = ["load"]
    traces: list[Trace] = []
    try:
        with simulate(card, recorder, release) as mode, manual_garbage_collection():
            recorder.begin(lambda: phases[-1])
            for again in (False, True) if loop.twice else (False,):
                if again:
                    gc.collect()
                    recorder.record_empty_cache()
                model = _lazily(mode, loop.model, loop.with_values)
                if not loop.loads:
                    model.to("cuda", **_layout(loop))
                _run(loop, model.train(), mode, phases.append)
                traces.append(recorder.trace((batch,)))
                del model
            return traces
    finally:
        torch.backends.cudnn.benchmark = before


def _layout(loop: Loop) -> dict[str, Any]:
    return {"memory_format": torch.channels_last} if loop.channels_last else {}


def _run(loop: Loop, model: nn.Module, mode: FakeCudaMode, enter: Callable[[Phase], None]) -> None:
    """Run the updates; `loss`, `outputs` and the batch are held as long as the variables of a loop hold them."""
    optimizer = loop.optimizer(model)
    clear = partial(optimizer.zero_grad, set_to_none=loop.set_to_none)
    enter("batch")
    batch: Any = _on_card(loop, mode) if loop.resident_batch else None
    loss: Any = None
    outputs: Any = None
    for _ in range(loop.updates):
        gc.collect()
        mode.recorder.mark_update()
        enter("batch")
        if loop.zero_grad == "start":
            clear()
        if not loop.resident_batch:
            batch = None
            batch = _on_card(loop, mode)
        enter("forward")
        with nullcontext() if loop.precision is None else torch.autocast("cuda", dtype=loop.precision):
            loss, outputs = loop.forward(model, batch)
            if loop.zero_grad == "before backward":
                clear()
            enter("backward")
            loss.backward()
        enter("update")
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
    return (images.contiguous(**_layout(loop)), *rest)


def _lazily(mode: FakeCudaMode, build: Callable[[], Any], with_values: bool = True) -> Any:
    """Without values for large tensors; with them where that fails."""
    try:
        with mode.building_lazily():
            return build()
    except NotBuilt:
        raise
    except Exception:  # noqa: BLE001 - whatever it is: built for real, it works or says why not.
        if not with_values:
            raise
        return build()
