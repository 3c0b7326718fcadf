"""One trial: the Accumulator that trains makes an update, then one accumulated over the parts.

The memory of the loop around it (`devices.loop_memory`) is there, too: held outputs of the last micro-batch, an EMA of
the weights, which each update enters, and two passes of an evaluation. After the evaluation, one more update by the
first part follows: it finds the evaluation's memory in the cache, while the last update finds an update's, as most
updates in training do. So the allocator's retries are those of the last update.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.accumulator import Accumulator, StepResult
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.ranks.launch import shard_model
from autoaccum.accumulation.ranks.replicated import take_room
from autoaccum.accumulation.rng_state import RngState
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.devices.loop_memory import EmaModel, HoldingObjective, evaluate
from autoaccum.devices.meters import synchronize_device
from autoaccum.errors import WorkloadError
from autoaccum.options import GradSync
from autoaccum.simulation.trace_records import Phase
from autoaccum.sources.batches import split_batch
from autoaccum.sources.workload import Workload


class _RankRoom(StepObserver):
    """Takes the memory in which several ranks would sum their gradients."""

    def __init__(self, optimizer: Optimizer, *, in_fp32: bool) -> None:
        self._optimizer, self._in_fp32 = optimizer, in_fp32
        self._backwards = 0

    def phase(self, phase: StepPhase) -> None:
        if phase == "backward":
            self._backwards += 1
        elif phase == "clip":
            take_room(optimizer_parameters(self._optimizer), in_fp32=self._in_fp32, parts=self._backwards)
            self._backwards = 0


class TrialRun:
    """The model, optimizer, batch and updates of one trial; `phase` is the current phase, or the one that failed.

    Attributes:
        made: The model and its optimizer; None before they are built.
        origin: The device that the model was made on.
        accumulator: The Accumulator, once it is built: the one that trains by the plan, except that running out of
            memory ends the trial.
        has_drawn: Whether an update drew random numbers on the host.

    Args:
        workload: The workload, with the options of the plan.
        rank_samples: Samples per update on this rank: the batch that is made and held, as `Accumulator.step` holds it.
        device: The device that the model is moved to before the optimizer is made; None: it stays. The batch stays on
            the CPU, and the Accumulator moves one part at a time.
        world_size: The ranks of the training if there are no others here; the memory in which several sum their
            gradients is taken too.
        mesh: The mesh of ranks that the model is sharded over; None: each holds the whole model.
        grad_sync: Whether gradients of a sharded model are summed over ranks with each part or with the last one.
        before_update: Called before each update.
    """

    origin: torch.device

    def __init__(
        self,
        workload: Workload,
        rank_samples: int,
        device: torch.device | None = None,
        *,
        world_size: int = 1,
        mesh: tuple[int, ...] | None = None,
        grad_sync: GradSync = "each",
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._workload, self._device = workload, device
        multiple = workload.multiple_of or 1
        self._size = -(-rank_samples // multiple) * multiple
        self._world_size, self._mesh, self._grad_sync = world_size, mesh, grad_sync
        self._before_update = before_update
        self._phase: Phase = "start"
        self._held: HoldingObjective | None = None
        self._ema: EmaModel | None = None
        self.made: tuple[nn.Module, Optimizer] | None = None
        self.accumulator: Accumulator | None = None
        self.has_drawn = False

    @property
    def phase(self) -> Phase:
        """The current phase of the trial."""
        if self.accumulator is None or self._phase == "evaluation":
            return self._phase
        return self.accumulator.phase

    @property
    def built(self) -> tuple[nn.Module, Optimizer]:
        """The model and its optimizer, which are built."""
        assert self.made is not None
        return self.made

    @property
    def models(self) -> Sequence[nn.Module]:
        """The model, once it is built."""
        return () if self.made is None else self.made[:1]

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Its optimizer, once it is built."""
        return () if self.made is None else self.made[1:]

    @property
    def averages(self) -> list[Tensor]:
        """The copies of weights and buffers, if there is an EMA."""
        return [] if self._ema is None else self._ema.tensors

    @property
    def outputs(self) -> list[Tensor]:
        """The held outputs of the last micro-batch, if the loop holds any."""
        return [] if self._held is None else self._held.tensors

    @property
    def host_bytes(self) -> int | None:
        """As `Accumulator.host_bytes`; None if it kept none there."""
        return None if self.accumulator is None else self.accumulator.host_bytes or None

    def run(
        self,
        parts: Sequence[int],
        lengths: Sequence[int] = (),
        *,
        needs_whole_batch: bool = False,
        lead: int | None = None,
    ) -> StepResult:
        """Update by `parts[:1]`, then by all `parts`: gradients and optimizer state are resident as in training.

        Samples are the longest, or those of each part have a length of `lengths`.

        The first update is no smaller: a size that training never runs would leave kernels compiled for it (oneDNN), or
        blocks of a cache that are not those of training. With `needs_whole_batch` every update runs all: one part alone
        would keep on the device what waits elsewhere in training. `lead` samples, if that is less, make the first
        update and replace the first of two equal parts: an update of that size has run before, so it compiles nothing.

        Returns:
            The result of the last update.

        Raises:
            WorkloadError: An update was skipped, so that the optimizer would have no state and the peak would differ;
                or there are no outputs to hold, the weights cannot be copied, or the evaluation fails.
        """
        accumulator, batch = self.prepare(parts)
        if lengths:
            build, cut = self._workload.build_batch, self._workload.token_costs.cut
            last = [cut(build(size, length)) for size, length in zip(parts, lengths, strict=True)]
            first = last[:1]
        else:
            last = slice_parts(batch, self._size, parts)
            first = last[:1] if lead is None else slice_parts(batch, self._size, [min(lead, *parts)])
            last = [*first, *last[1:]] if parts[:1] == parts[1:2] else last
        if needs_whole_batch:
            first = last = [batch] if sum(parts) == self._size else last
        self._update(accumulator, first)
        if self._workload.evaluation_batch is not None:
            self._phase = "evaluation"
            evaluate(self._workload, self.built[0])
            self._phase = "forward"
            self._update(accumulator, first)
        result = self._update(accumulator, last)
        synchronize_device(self._device)
        return result

    def prepare(self, parts: Sequence[int]) -> tuple[Accumulator, Any]:
        """Build everything for updates by `parts`; return the Accumulator and the batch.

        Under fp16 the scaler starts at 1: from 65536 on, its first updates are often skipped, and a trial has few.
        """
        workload = self._workload
        seed_everything()
        self._phase = "model"
        model = workload.build_model()
        self.origin = model_device(model)
        if self._mesh is None:
            model = move_model(model, self._device)
        else:
            assert self._device is not None
            model = shard_model(model, self._device, self._mesh, workload.parallelize)
        if workload.ema:
            self._ema = EmaModel(model)
        self._phase = "optimizer"
        optimizer = workload.build_optimizer(model)
        self.made = model, optimizer
        self._phase = "batch"
        self._size = max(self._size, *parts)
        batch = workload.build_batch(self._size)
        self._phase = "forward"
        if workload.hold_outputs:
            self._held = HoldingObjective.of(workload.objective)
        takes_room, device = self._world_size > 1, model_device(model)
        self.accumulator = Accumulator(
            model,
            optimizer,
            self._held or workload.objective,
            micro_batch=max(parts),
            spec=workload,
            scaler=GradScaler(device.type, init_scale=1.0) if workload.precision == "fp16" else None,
            check="off",
            recover=False,
            grad_sync=self._grad_sync,
            observer=_RankRoom(optimizer, in_fp32=workload.accumulate_in == "fp32") if takes_room else None,
        )
        return self.accumulator, batch

    def _update(self, accumulator: Accumulator, window: Sequence[Any]) -> StepResult:
        self._before_update()
        seed_everything()  # Where random numbers decide what runs, they decide alike for all sizes.
        before = RngState().digest()
        result = accumulator.step_parts(window)
        self.has_drawn = self.has_drawn or RngState().digest() != before
        if not result.updated:
            raise WorkloadError(
                f"no update was made from batch({self._size})",
                hint="its weight is zero, or under fp16 its gradients are not finite",
            )
        if self._held is not None and not self._held.calls:
            raise WorkloadError(
                "there are no outputs to keep: the loss does not call the model itself, but a method of it",
                hint="call model(...) in loss, or train without hold_outputs (--no-hold-outputs)",
            )
        if self._ema is not None:
            self._ema.update()
        return result


def move_model(model: nn.Module, device: torch.device | None) -> nn.Module:
    """Move `model` to `device` in place, unless that is None or the CPU, or the model is there; return it."""
    if device is None or device.type == "cpu" or model_device(model) == device:
        return model
    return model.to(device)


def slice_parts(batch: Any, size: int, parts: Sequence[int]) -> list[Any]:
    """Return views of `batch`, which has `size` samples: consecutive parts; the last ones overlap if it is short.

    >>> slice_parts(torch.arange(5), 5, [2, 2])
    [tensor([0, 1]), tensor([2, 3])]
    >>> slice_parts(torch.arange(3), 3, [2, 2])
    [tensor([0, 1]), tensor([1, 2])]
    """
    taken, start = [], 0
    for part in parts:
        start = min(start, size - part)
        taken.append(split_batch(batch, [start, part, size - start - part])[1])
        start += part
    return taken


def seed_everything(seed: int = 0) -> None:
    """Seed every random generator that a workload may use, those of all cards too, so that trials repeat."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
