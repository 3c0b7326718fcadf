"""Trials of live objects, or of a Workload made in code, in this very process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from autoaccum.accumulation.recovery import clear_frames, release_memory
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.failures import describe_failure, failure_error
from autoaccum.devices.delayed_signals import DelayedSignals
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.in_place.live_objects import LiveObjects, prepare
from autoaccum.devices.in_place.memory_limits import MemoryLimit, check_single_thread, make_memory_limit, tight_heap
from autoaccum.devices.in_place.saved_state import StateRestorer, check_host_copy, measure_live_state
from autoaccum.devices.inspection import inspect_workload
from autoaccum.devices.meters import warm_up
from autoaccum.devices.trial_record import record_trial
from autoaccum.devices.trial_run import run_trial
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.units import MemorySize, format_bytes
from autoaccum.workload.spec import Workload

_WEAKNESS = (
    "trials ran in this process, which keeps pieces of what earlier ones took: a size just above may fit in a fresh"
    " one; plan through a file for exact ceilings"
)


class InPlaceDevice:
    """Trials in this process: of live objects, which are put back after each, or of a Workload made in code.

    *What is put back*, and proved by hash after every trial: see `SavedState`. The copy is made in host memory before
    each trial and does not count against a budget; one that does not fit is refused before anything is touched.
    Ctrl-C ends a trial; everything is put back first.

    *What the budget means* is the same as on the other devices: all that training takes, live objects and their
    `.grad` included. On the CPU that is what the live objects hold and what a trial adds to this process, told by its
    peak (see `HostMemoryLimit`); malloc gives back what is freed at once, until `close` (`tight_heap`). On a card it
    is all that PyTorch's allocator in this process holds there, other tensors of yours included.

    *What cannot be had in place*: a fresh process (`Trial.fresh` is always False) and a limit on a trial's time. What
    `batch`, `loss` and `optimizer` do outside of the model (draw from an iterator, print, count) happens.

    Args:
        subject: What is tried.
        share: Samples per update on this rank.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; for live objects `auto`, or where they are.
        memory: The budget; None: what is free, and what the live objects hold.
        reserve: Taken off the budget (see `choose_budget` for the default).

    Raises:
        UsageError: Live objects are on another device than asked.
        NotMeasuredError: Trials on the CPU, and this is not Linux.
    """

    def __init__(
        self,
        subject: Workload | LiveObjects,
        *,
        share: int,
        device: str = "auto",
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
    ) -> None:
        self._tried = prepare(subject, device)
        if self._tried.device.type == "cpu" and sys.platform != "linux":
            raise NotMeasuredError(
                f"trials on the CPU need Linux, this is {sys.platform}",
                hint="only there can a process be held to a budget so that the allocator itself refuses",
            )
        self._share, self._memory, self._reserve = share, memory, reserve
        self._live = measure_live_state(self._tried.roots, self._tried.optimizer, is_live=self._tried.is_live)
        self._keeper = StateRestorer(self._tried)
        self._started: tuple[MemoryLimit, int] | None = None
        self._resources = ExitStack()

    @property
    def name(self) -> str:
        """`cpu` or `cuda:N`."""
        return str(self._tried.device)

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes, live objects included; the first time, PyTorch is warmed up and it is measured.

        Raises:
            UsageError: It cannot be had, other Python threads run, or the copy does not fit into host memory.
        """
        return self._start()[1]

    def describe(self) -> Mapping[str, Any]:
        """What the plan records: as the other devices, and what live objects hold and their copy takes."""
        place, limit_bytes = self._start()
        return {
            "name": self.name,
            "kind": self._tried.device.type,
            **place.describe(),
            "limit_bytes": limit_bytes,
            "in_place": True,
            "held_bytes": self._live.held_bytes,
            "host_copy_bytes": self._live.copy_bytes,
        }

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`, by an update from a small batch; everything is put back.

        Raises:
            WorkloadError, UsageError, DoesNotFitError: As there.
            NotMeasuredError: Something could not be put back.
        """
        place, _ = self._start()
        inspection = self._keeper.run(lambda interruptions: self._inspect(place, interruptions))
        place.measure_leftover()
        return dataclasses.replace(inspection, cautions=tuple(self._cautions()))

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """Run one trial in this process, whatever `fresh` asks for; it is not ended when it takes long.

        Raises:
            UsageError: As `limit_bytes`.
            NotMeasuredError: Something could not be put back: it is named.
        """
        place, budget_bytes = self._start()
        self._check_threads()
        held_to = budget_bytes if limit_bytes is None else limit_bytes
        trial = self._keeper.run(lambda interruptions: self._try(place, parts, held_to, interruptions))
        place.measure_leftover()
        return dataclasses.replace(trial, limit_bytes=limit_bytes)

    def close(self) -> None:
        """Let the heap keep again what is freed; every trial has put back what it changed. Idempotent."""
        self._started = None
        self._resources.close()

    def __enter__(self) -> InPlaceDevice:
        """Nothing is started before the first question."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _start(self) -> tuple[MemoryLimit, int]:
        """Refuse what cannot be done before anything is touched; warm PyTorch up; choose the budget. Once."""
        if self._started is not None:
            return self._started
        if torch.is_inference_mode_enabled():
            raise UsageError("trials are asked for within torch.inference_mode()", hint="plan outside of it")
        is_cpu = self._tried.device.type == "cpu"
        check_host_copy(self._tried.workload.name, self._live, read_host_memory(), guarded_on_host=not is_cpu)
        place = make_memory_limit(self._tried.device, self._live)
        self._check_threads()
        with ExitStack() as resources:
            if is_cpu:
                resources.enter_context(tight_heap())
            self._keeper.run(lambda _: _warm_up(place))
            budget_bytes = place.choose_budget(place.begin(), self._memory, self._reserve)
            if budget_bytes <= self._live.held_bytes:
                raise UsageError(
                    f"a budget of {format_bytes(budget_bytes)} is less than the"
                    f" {format_bytes(self._live.held_bytes)} that model and optimizer hold already",
                    hint="raise --memory, which counts them in",
                )
            self._resources = resources.pop_all()
        self._started = (place, budget_bytes)
        return self._started

    def _check_threads(self) -> None:
        if self._tried.device.type == "cpu":  # On a card they share the limit as they share the card.
            check_single_thread()

    def _inspect(self, place: MemoryLimit, interruptions: DelayedSignals) -> Inspection:
        name = self._tried.workload.name
        try:
            with interruptions.window():
                return inspect_workload(self._tried.workload, self._share, place)
        except BaseException as error:
            clear_frames(error)
            if interruptions.ended(error) or isinstance(error, UsageError | WorkloadError):
                raise
            owner = "the machine" if self._tried.device.type == "cpu" else self.name
            failure = describe_failure(error, f"an update from a small batch of {name}")
        raise failure_error(failure, owner)

    def _try(self, place: MemoryLimit, parts: tuple[int, ...], held_to: int, interruptions: DelayedSignals) -> Trial:
        """One trial under the limit, which is lifted before anything is said about it."""
        release_memory(self._tried.device)
        done = run_trial(
            self._tried.workload,
            self._share,
            parts,
            meter=place,
            limit_bytes=held_to,
            window=interruptions.window(),
        )
        if done.failure is None:
            return place.judge(record_trial(done.measurement(), held_to, {"parts": parts}), done.reading, done.beside)
        try:
            if interruptions.ended(done.failure):
                raise done.failure
            return record_trial(done.measurement(), held_to, {"parts": parts})
        finally:
            clear_frames(done.failure)
            del done  # the traceback holds this frame

    def _cautions(self) -> list[str]:
        """What the caller has to know of trials in place."""
        said = [_WEAKNESS] if self._tried.device.type == "cpu" else []
        if self._tried.is_live and not self._tried.roots[""].training:
            said.append(
                "the model is in eval mode, and was measured so: training may take more, call model.train() before"
            )
        return [*said, *self._keeper.warnings]


def _warm_up(place: MemoryLimit) -> None:
    place.open()
    with torch.enable_grad():
        warm_up(place.device)
