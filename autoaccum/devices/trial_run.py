"""One trial, in the child: the very Accumulator that trains makes an update, then one accumulated over the parts.

What the loop around it is to hold as well (`devices.companions`) is there: outputs of the last micro-batch, averages of
the weights, which each update is taken into, and two passes of an evaluation, with one more update by the first part
behind it: what that finds cached is the evaluation's, what the last one finds is an update's, as in most of training.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.accumulator import Accumulator, StepResult
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, on_device
from autoaccum.devices.base import Phase
from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.loop_memory import EmaModel, HeldOutputs, evaluate, naming
from autoaccum.devices.meters import Meter
from autoaccum.devices.trial_record import Reading, TrialMeasurement, without_evaluation_retries
from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import split_batch
from autoaccum.workload.objective import Objective
from autoaccum.workload.spec import Workload


class TrialRun:
    """What one trial builds and runs; `phase` tells where it is, or where it was when something was raised.

    Attributes:
        made: The model and its optimizer, once they are there.

    Args:
        workload: With the precision the plan asks for.
        share: Samples per update on this rank: the batch that is made and held, as `Accumulator.step` holds it.
        device: Where the model goes before the optimizer is made; None: where it is. The batch stays on the CPU, and
            the Accumulator moves one part at a time.
        before_update: Called before each update.
        around_evaluation: Called before and after the evaluation, and after the update behind it.
    """

    def __init__(
        self,
        workload: Workload,
        share: int,
        device: torch.device | None = None,
        *,
        before_update: Callable[[], None] = lambda: None,
        around_evaluation: Callable[[], object] = lambda: None,
    ) -> None:
        self._workload = workload
        each = workload.multiple_of or 1
        self._share = self._size = -(-share // each) * each
        self._device = device
        self._before_update = before_update
        self._around_evaluation = around_evaluation
        self._phase: Phase = "start"
        self._accumulator: Accumulator | None = None
        self._kept = HeldOutputs() if "outputs" in workload.keeps else None
        self._averages: EmaModel | None = None
        self.made: tuple[nn.Module, Optimizer] | None = None

    @property
    def phase(self) -> Phase:
        """Where the trial is."""
        if self._accumulator is None or self._phase == "evaluation":
            return self._phase
        return self._accumulator.phase

    @property
    def averages(self) -> list[Tensor]:
        """The copies of weights and buffers, where there are any."""
        return [] if self._averages is None else self._averages.tensors

    @property
    def outputs(self) -> list[Tensor]:
        """What the loop still names of the last micro-batch, where it does."""
        return [] if self._kept is None else self._kept.tensors

    def run(self, parts: Sequence[int]) -> StepResult:
        """Update by `parts[:1]`, then by all `parts`: gradients and optimizer state are resident as in training.

        Returns:
            What the last update told.

        Raises:
            WorkloadError: No update was made, so the optimizer has no state and the peak would be another one; or
                there are no outputs to keep; or the weights cannot be copied, or the evaluation fails.
        """
        seed_everything()
        self._phase = "model"
        model = move_model(self._workload.build_model(), self._device)
        if "ema" in self._workload.keeps:
            self._averages = EmaModel(model)
        self._phase = "optimizer"
        optimizer = self._workload.build_optimizer(model)
        self.made = model, optimizer
        self._phase = "batch"
        self._size = max(self._share, *parts)
        batch = self._workload.build_batch(self._size)
        first, last = (slice_parts(batch, self._size, sizes) for sizes in (parts[:1], parts))
        self._phase = "forward"
        objective = self._workload.objective if self._kept is None else naming(self._workload.objective, self._kept)
        self._accumulator = make_accumulator(self._workload, model, optimizer, max(parts), objective)
        self._update(self._accumulator, first)
        if self._workload.evaluation_batch is not None:
            self._evaluate(model)
            self._update(self._accumulator, first)
            self._around_evaluation()
        result = self._update(self._accumulator, last)
        synchronize_device(self._device)
        return result

    def _update(self, accumulator: Accumulator, window: Sequence[Any]) -> StepResult:
        self._before_update()
        result = accumulator.step_parts(window)
        if not result.updated:
            raise WorkloadError(
                f"no update was made from batch({self._size})",
                hint="its weight is zero, or under fp16 its gradients are not finite",
            )
        if self._kept is not None and not self._kept.calls:
            raise WorkloadError(
                "there are no outputs to keep: the loss does not call the model itself, but a method of it",
                hint='call model(...) in loss, or leave "outputs" out of keeps (--keeps)',
            )
        if self._averages is not None:
            self._averages.update()
        return result

    def _evaluate(self, model: nn.Module) -> None:
        self._phase = "evaluation"
        self._around_evaluation()
        evaluate(self._workload, model)
        self._around_evaluation()
        self._phase = "forward"


class TrialRunResult(NamedTuple):
    """The result of a trial run under a limit.

    Attributes:
        parts: As in `Trial`.
        seconds: Its wall time.
        reading: The memory that it took; the evaluation's own retries do not count.
        evaluation_readings: Readings before and after the evaluation, and after the update behind it.
        phase: Where the run was at its end.
        failure: What it raised.
    """

    parts: Sequence[int]
    seconds: float
    reading: Reading
    evaluation_readings: list[Reading]
    phase: Phase
    failure: BaseException | None

    def measurement(self) -> TrialMeasurement:
        """Return what was measured as a record, with the failure in words."""
        if self.failure is None:
            return TrialMeasurement(seconds=self.seconds, reading=self.reading)
        doing = f"micro-batch {max(self.parts)}, {self.phase}"
        failure = describe_failure(self.failure, doing, at=f"{doing}: ")
        return TrialMeasurement(seconds=self.seconds, reading=self.reading, failure=failure, phase=self.phase)


def run_trial(
    workload: Workload,
    share: int,
    parts: Sequence[int],
    *,
    meter: Meter,
    limit_bytes: int,
    window: AbstractContextManager[None] | None = None,
) -> TrialRunResult:
    """Rehearse `parts` under the limit, which is lifted at the end; within, `window` is open."""
    evaluation_readings: list[Reading] = []
    trial_run = TrialRun(
        workload, share, meter.device, around_evaluation=lambda: evaluation_readings.append(meter.read())
    )
    failure: BaseException | None = None
    meter.start()
    began = time.perf_counter()
    with meter.limit(limit_bytes), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The inspection has shown them.
        try:
            with on_device(find_auxiliary_modules(workload).values(), meter.device), window or nullcontext():
                trial_run.run(parts)
        except BaseException as error:
            failure = error
    reading = without_evaluation_retries(meter.read(), evaluation_readings)
    seconds = time.perf_counter() - began
    return TrialRunResult(parts, seconds, reading, evaluation_readings, trial_run.phase, failure)


def move_model(model: nn.Module, device: torch.device | None) -> nn.Module:
    """`model`, moved to `device` in place unless that is None or the CPU, or it is there."""
    if device is None or device.type == "cpu" or model_device(model) == device:
        return model
    return model.to(device)


def synchronize_device(device: torch.device | None) -> None:
    """Let `device` finish: what it still has to do is part of what was asked, and its errors come out here."""
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def make_accumulator(
    workload: Workload, model: Any, optimizer: Any, micro_batch: int, objective: Objective | None = None
) -> Accumulator:
    """The Accumulator that trains by the plan, except that running out of memory ends the trial.

    Under fp16 the scaler starts at 1 instead of 65536, whose first updates are often skipped: a trial has few.
    """
    device = next(model.parameters()).device.type
    return Accumulator(
        model,
        optimizer,
        workload.objective if objective is None else objective,
        micro_batch=micro_batch,
        precision=workload.precision,
        batchnorm=workload.batchnorm,
        scaler=GradScaler(device, init_scale=1.0) if workload.precision == "fp16" else None,
        multiple_of=workload.multiple_of,
        accumulate_in=workload.accumulate_in,
        recover=False,
    )


def slice_parts(batch: Any, size: int, parts: Sequence[int]) -> list[Any]:
    """Views of `batch`, which holds `size` samples: one after the other, the last ones overlapping where it is short.

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


def seed_everything() -> None:
    """Set every generator a workload may draw from, every card's too, so that one trial is like the other."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
