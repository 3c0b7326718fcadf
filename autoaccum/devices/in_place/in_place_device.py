"""Trials of live objects, or of a Workload made in code, in this process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from autoaccum.accumulation.out_of_memory import clear_frames, release_memory
from autoaccum.devices.base import TRIAL_LIMIT_SECONDS, Device, Inspection, Trial, TrialOptions
from autoaccum.devices.child.failures import describe_failure, failure_error
from autoaccum.devices.delayed_signals import DelayedSignals
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.in_place.live_objects import LiveObjects, prepare
from autoaccum.devices.in_place.memory_limits import MemoryLimit, check_single_thread, make_memory_limit, tight_heap
from autoaccum.devices.in_place.saved_state import StateRestorer, check_host_copy, measure_live_state
from autoaccum.devices.inspection import inspect_workload
from autoaccum.devices.meters import warm_up
from autoaccum.devices.trial_record import Inspect, RunTrial, record_trial
from autoaccum.devices.trial_run import run_trial
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.units import MemorySize, format_bytes
from autoaccum.workload.spec import Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

_WEAKNESS = (
    "trials ran in this process, which keeps pieces of what earlier ones took: a size just above may fit in a fresh"
    " one; plan through a file for exact ceilings"
)


class InPlaceDevice(Device):
    """Trials in this process: of live objects, which are restored after each, or of a Workload made in code.

    *The state* that is restored, and compared by hash after every trial, is listed at `SavedState`. Its copy is made
    in host memory before each trial and does not count against the budget. A copy that does not fit is refused before
    anything is touched. Ctrl-C ends a trial after everything is restored.

    *The budget* means the same as on other devices: all memory that training takes, including the live objects and
    their `.grad`. On the CPU that is the memory of the live objects plus the memory that a trial adds to this process,
    measured by its peak (`HostMemoryLimit`); until `close`, malloc returns freed memory at once (`tight_heap`). On a
    card it is all that PyTorch's allocator in this process holds there, including your other tensors.

    *Not possible in place*: a fresh process (`Trial.fresh` is always False) and a limit on a trial's time. Side effects
    of `batch`, `loss` and `optimizer` outside of the model (draw from an iterator, print, count) are not undone.

    Args:
        workload_or_objects: The Workload, or the live objects.
        share: Samples per update on this rank.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; for live objects `auto`, or the device that they are on.
        memory: The budget; None: the free memory, and the memory of the live objects.
        reserve: Subtracted from the budget (see `choose_budget` for the default).

    Raises:
        UsageError: Live objects are on another device than requested.
        NotMeasuredError: Trials on the CPU, and this is not Linux.
    """

    def __init__(
        self,
        workload_or_objects: Workload | LiveObjects,
        *,
        share: int,
        device: str = "auto",
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
    ) -> None:
        self._target = prepare(workload_or_objects, device)
        if self._target.device.type == "cpu" and sys.platform != "linux":
            raise NotMeasuredError(
                f"trials on the CPU need Linux, this is {sys.platform}",
                hint="only there can a process be held to a budget so that the allocator itself refuses",
            )
        self._share, self._memory, self._reserve = share, memory, reserve
        self._live = measure_live_state(self._target.roots, self._target.optimizer, is_live=self._target.is_live)
        self._restorer = StateRestorer(self._target)
        self._least_size: int | None = None
        self._joined = False
        self._draw: str | None = None
        self._savers: tuple[str, ...] | None = None
        self._started: tuple[MemoryLimit, int] | None = None
        self._resources = ExitStack()

    @property
    def name(self) -> str:
        """`cpu` or `cuda:N`."""
        return str(self._target.device)

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes, live objects included; the first use warms PyTorch up and chooses it.

        Raises:
            UsageError: So much is not free, other Python threads run, or the copy does not fit into host memory.
        """
        return self._start()[1]

    def describe(self) -> Mapping[str, Any]:
        """Return the plan's record: as on other devices, with the bytes of the live objects and of their copy."""
        limit, limit_bytes = self._start()
        return {
            "name": self.name,
            "kind": self._target.device.type,
            **limit.describe(),
            "limit_bytes": limit_bytes,
            "in_place": True,
            "held_bytes": self._live.held_bytes,
            "host_copy_bytes": self._live.copy_bytes,
        }

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`, by an update from a small batch; everything is restored.

        Raises:
            WorkloadError, UsageError, DoesNotFitError: As `Device.inspect`.
            NotMeasuredError: Something could not be restored.
        """
        limit, _ = self._start()
        inspection = self._restorer.run(lambda signals: self._inspect(limit, signals))
        self._least_size, self._joined = inspection.least_size, inspection.joining is not None
        self._draw = inspection.draw
        limit.end_job()
        return dataclasses.replace(inspection, cautions=tuple(self._cautions()))

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `devices.update_cost.SavingDevice`."""
        self._savers = savers

    def trial(self, parts: tuple[int, ...], **options: Unpack[TrialOptions]) -> Trial:
        """Run one trial in this process; `fresh` and `limit_seconds` have no effect.

        Raises:
            UsageError: As `limit_bytes`.
            NotMeasuredError: Something could not be restored; the message names it.
        """
        limit_bytes = options.get("limit_bytes")
        return dataclasses.replace(self._run(parts, limit_bytes), limit_bytes=limit_bytes)

    def grow(self, most: int, *, limit_seconds: float | None = None) -> Trial:
        """As `GrowingDevice.grow`, in this process; sizes stop growing after a quarter of `limit_seconds`."""
        return self._run((self._least_size or 1, most), grows=True, limit_seconds=limit_seconds or TRIAL_LIMIT_SECONDS)

    def _run(
        self,
        parts: tuple[int, ...],
        limit_bytes: int | None = None,
        *,
        grows: bool = False,
        limit_seconds: float = TRIAL_LIMIT_SECONDS,
    ) -> Trial:
        limit, budget_bytes = self._start()
        self._check_threads()
        request = RunTrial(
            parts=parts,
            joined=self._joined,
            savers=self._savers,
            draw=self._draw,
            limit_bytes=budget_bytes if limit_bytes is None else limit_bytes,
            limit_seconds=limit_seconds,
            grows=grows,
        )
        trial = self._restorer.run(lambda signals: self._try(limit, request, signals))
        limit.end_job()
        return trial

    def close(self) -> None:
        """Let the heap keep freed memory again. Idempotent; every trial has already restored the state."""
        self._started = None
        self._resources.close()

    def _start(self) -> tuple[MemoryLimit, int]:
        """Once: check that trials can run before anything is touched, warm PyTorch up, and choose the budget."""
        if self._started is not None:
            return self._started
        if torch.is_inference_mode_enabled():
            raise UsageError("trials are asked for within torch.inference_mode()", hint="plan outside of it")
        is_cpu = self._target.device.type == "cpu"
        check_host_copy(self._target.workload.name, self._live, read_host_memory(), guarded_on_host=not is_cpu)
        limit = make_memory_limit(self._target.device, self._live)
        self._check_threads()
        with ExitStack() as resources:
            if is_cpu:
                resources.enter_context(tight_heap())
            self._restorer.run(lambda _: _warm_up(limit))
            budget_bytes = limit.choose_budget(limit.begin(), self._memory, self._reserve)
            if budget_bytes <= self._live.held_bytes:
                raise UsageError(
                    f"a budget of {format_bytes(budget_bytes)} is less than the"
                    f" {format_bytes(self._live.held_bytes)} that model and optimizer hold already",
                    hint="raise --memory, which counts them in",
                )
            self._resources = resources.pop_all()
        self._started = (limit, budget_bytes)
        return self._started

    def _check_threads(self) -> None:
        if self._target.device.type == "cpu":  # On a card, other threads share the limit as they share the card.
            check_single_thread()

    def _inspect(self, limit: MemoryLimit, signals: DelayedSignals) -> Inspection:
        name = self._target.workload.name
        try:
            with signals.window():
                return inspect_workload(
                    Inspect(savers=self._savers).replaced(self._target.workload), self._share, limit
                )
        except BaseException as error:
            clear_frames(error)
            if signals.ended(error) or isinstance(error, UsageError | WorkloadError):
                raise
            owner = "the machine" if self._target.device.type == "cpu" else self.name
            failure = describe_failure(error, f"an update from a small batch of {name}")
        raise failure_error(failure, owner)

    def _try(self, limit: MemoryLimit, request: RunTrial, signals: DelayedSignals) -> Trial:
        """Run one trial under the limit, which is lifted before a failure is described."""
        release_memory(self._target.device)
        measured, around_evaluation, failure = run_trial(
            self._target.workload, self._share, request, meter=limit, window=signals.window()
        )
        try:
            if failure is not None and signals.ended(failure):
                raise failure
            trial = record_trial(
                measured, request.limit_bytes, {"parts": request.parts[:1] * 2 if request.grows else request.parts}
            )
            return limit.classify(trial, measured.reading, around_evaluation)
        finally:
            if failure is not None:
                clear_frames(failure)
            del failure  # The traceback holds this frame.

    def _cautions(self) -> list[str]:
        said = [_WEAKNESS] if self._target.device.type == "cpu" else []
        if self._target.is_live and not self._target.roots[""].training:
            said.append(
                "the model is in eval mode, and was measured so: training may take more, call model.train() before"
            )
        return [*said, *self._restorer.warnings]


def _warm_up(limit: MemoryLimit) -> None:
    limit.open()
    with torch.enable_grad():
        warm_up(limit.device)
