"""Devices that run their trials in child processes, and a child that has loaded the workload."""

from __future__ import annotations

import dataclasses
import math
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from autoaccum.devices.base import Device, Inspection, Trial, TrialSettings
from autoaccum.devices.child.failures import ChildDied, JobFailed, failure_error
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.trial_requests import Inspect, LoadWorkload, RunTrial, TimeUpdate
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.units import MIB

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_LEAVE_SECONDS = 5.0
_MIN_LOAD_SECONDS = 300.0
"""A short limit on trials must not end the workload's imports."""


class LoadedChild:
    """A child process that has loaded a workload by the request `load`.

    Attributes:
        jobs: The number of jobs it was called for since.
        facts: The facts from the device's meter, once everything was loaded (`Meter.begin`).

    Raises:
        WorkloadError: The workload cannot be loaded.
        UsageError: There is no such device here.
        DoesNotFitError: Loading it runs the machine out of memory.
        NotMeasuredError: The process cannot be started, died or took too long.
    """

    def __init__(self, settings: TrialSettings, load: LoadWorkload, process: ChildProcess) -> None:
        self._limit_seconds, self._process = settings.trial_limit_seconds, process
        self._owner = "the machine" if load.device == "cpu" else load.device
        self.jobs = 0
        limit_seconds = settings.load_limit_seconds or max(self._limit_seconds, _MIN_LOAD_SECONDS)
        try:
            self.facts = process.call(load, limit_seconds)
        except JobFailed as failed:
            self.close()
            if failed.failure.is_usage:
                raise UsageError(failed.failure.message) from None
            raise failure_error(failed.failure, self._owner) from None

    @property
    def alive(self) -> bool:
        """Return whether it can run another job."""
        return self._process.alive

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Run a job and return its reply, in `limit_seconds` if that is less than the settings' limit on trials.

        Raises:
            WorkloadError: The workload fails.
            DoesNotFitError: It runs out of memory.
            NotMeasuredError: The process died or took too long.
        """
        try:
            return self.ask(request, limit_seconds)
        except JobFailed as failed:
            self.close()
            raise failure_error(failed.failure, self._owner) from None

    def ask(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Run a job as `call` does, except that JobFailed and ChildDied are raised as they are."""
        self.jobs += 1
        return self._process.call(request, min(self._limit_seconds, limit_seconds or math.inf))

    def close(self) -> None:
        """End the process; first give it time to exit by itself, so that the workload's `atexit` functions run."""
        self._process.end(grace_seconds=_LEAVE_SECONDS)


_STANDBY_BYTES = 512 * MIB
"""Host memory that must be free beyond the budget for a standby process: it takes about 230 MiB (torch 2.13), and as
much again should stay free."""


class ChildDevice(Device):
    """A device that runs its trials in one child at a time.

    The budget is chosen when the first child has loaded the workload. A child is reused while its trials succeed; what
    they did not free may be missing for later ones (`search` repeats failures that may be due to it). After a failure
    the next trial has a fresh child. While a job runs, a standby process imports PyTorch for the next fresh child, if
    the host has the memory for it beside the budget. There is none before the budget is chosen.
    """

    _crashes_for_memory = False

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: LoadedChild | None = None
        self._standby: ChildProcess | None = None
        self._limit_bytes: int | None = None
        self._multiple_of: int | None = None
        self._needs_whole_batch = False
        self._savers: tuple[str, ...] | None = None

    @abstractmethod
    def _choose_budget(self, facts: Mapping[str, Any]) -> int:
        """Return the budget in bytes, from the facts of the first child's meter."""

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes; the first use loads the workload and chooses it.

        Raises:
            UsageError: The requested memory is more than is free, or the reserve leaves nothing.
            WorkloadError, NotMeasuredError: As `inspect`.
        """
        if self._limit_bytes is None:
            self._use_child()
        assert self._limit_bytes is not None
        return self._limit_bytes

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`."""
        child = self._use_child()
        self._start_standby()
        inspection = child.call(Inspect(savers=self._savers), limit_seconds)
        self._needs_whole_batch, self._multiple_of = inspection.workload.whole_batch is not None, inspection.multiple_of
        return inspection

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `Device`."""
        self._savers = savers

    def _run_trial(self, parts: tuple[int, ...], fresh: bool, limit_bytes: int, limit_seconds: float | None) -> Trial:
        child = self._use_child(fresh=fresh)
        if not fresh:  # A trial in a fresh process is usually the last.
            self._start_standby()
        is_first, whole = child.jobs == 0, self._needs_whole_batch
        request = RunTrial(parts=parts, needs_whole_batch=whole, savers=self._savers, limit_bytes=limit_bytes)
        try:
            trial = child.ask(request, limit_seconds)
        except ChildDied as death:
            trial = record_death(parts, death, crashes_for_memory=self._crashes_for_memory)
        if not trial.ran:
            child.close()
        return dataclasses.replace(trial, fresh=is_first)

    @contextmanager
    def timing(self) -> Iterator[Callable[[int], float]]:
        """As `Device.timing`: in a child of its own, since the settings of the others make malloc slow."""
        self._end_child()
        process = self._start(measured=False)
        try:
            child = self._load(process, multiple_of=self._multiple_of, savers=self._savers)
            yield lambda micro_batch: child.call(TimeUpdate(micro_batch=micro_batch))
        finally:
            process.end(grace_seconds=_LEAVE_SECONDS)

    def close(self) -> None:
        """End every process that this device started. Idempotent; a later job starts a new one."""
        standby, self._standby = self._standby, None
        try:
            self._end_child()
        finally:
            if standby is not None:
                standby.end()

    def _use_child(self, *, fresh: bool = False) -> LoadedChild:
        """Return the running child, or a new one; the first one sets the budget."""
        if self._child is not None and (not self._child.alive or (fresh and self._child.jobs > 0)):
            self._end_child()
        if self._child is None:
            standby, self._standby = self._standby, None
            if standby is not None and standby.has_died():
                standby.end()
                standby = None
            self._child = self._load(standby or self._start())
        if self._limit_bytes is None:
            self._limit_bytes = self._choose_budget(self._child.facts)
        return self._child

    def _load(self, process: ChildProcess, **spec: Any) -> LoadedChild:
        given = {name: value for name, value in spec.items() if value is not None}
        settings = dataclasses.replace(self._settings, options=self._settings.options.with_spec(**given))
        if self._limit_bytes is not None:  # An earlier child has loaded it within its limit.
            settings = dataclasses.replace(settings, load_limit_seconds=None)
        return LoadedChild(settings, LoadWorkload(device=self.name, **settings.to_request()), process)

    def _start_standby(self) -> None:
        """Start a standby process if the host has the memory; without one, the next fresh child only takes longer."""
        if self._standby is None and read_host_memory().free_bytes - self._host_budget_bytes >= _STANDBY_BYTES:
            with suppress(NotMeasuredError):
                self._standby = self._start()

    def _start(self, *, measured: bool = True) -> ChildProcess:
        settings, handler = self._settings, "autoaccum.devices.trial_child:TrialChild"
        return ChildProcess(handler, on_output=settings.on_output, measured=measured, paths=settings.paths)

    @property
    def _host_budget_bytes(self) -> int:
        """The host memory that trials may take; 0 on a device with memory of its own."""
        return 0

    def _end_child(self) -> None:
        worker, self._child = self._child, None
        if worker is not None:
            worker.close()


def record_death(parts: tuple[int, ...], death: ChildDied, *, crashes_for_memory: bool = False) -> Trial:
    """Return the record of a trial of `parts` in which the child died.

    If native code `crashes_for_memory`, a crash may be an out-of-memory error (`Trial.is_definite_oom`).
    """
    trial = Trial(parts=parts, outcome="error", seconds=death.seconds, timed_out=death.timed_out).failed(death.failure)
    if crashes_for_memory and death.signal in _CRASHES:
        return dataclasses.replace(trial, outcome="oom", fault=None, is_definite_oom=False)
    return trial
