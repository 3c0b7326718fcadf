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
from autoaccum.devices.child.failures import ChildDied, JobFailed, death_error, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import ChildProcess, start_child
from autoaccum.devices.child.requests import Ready, Reply, Request
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.trial_requests import Inspect, LoadWorkload, RunTrial, TimeUpdate
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.units import MIB

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_LEAVE_SECONDS = 5.0
_START_SECONDS = 300.0
"""A short limit on time must not end the import of PyTorch from a cold disk."""
_LEAST_LOAD_SECONDS = 300.0
"""Nor must a short limit on trials end the workload's other imports."""


class LoadedChild:
    """A child process, started by `start_child`, that has loaded a workload by the request `load`.

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
        self._settings, self._process = settings, process
        self._owner = "the machine" if load.device == "cpu" else load.device
        self.jobs = 0
        self._call(Ready(), _START_SECONDS)
        limit = settings.load_limit_seconds or max(settings.trial_limit_seconds, _LEAST_LOAD_SECONDS)
        loaded = self._call(load, limit)
        if loaded.refused is not None:
            self.close()
            raise UsageError(loaded.refused)
        self.facts = loaded.facts

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

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
        self.jobs += 1
        return self._call(request, self._seconds(limit_seconds))

    def trial(self, request: RunTrial, limit_seconds: float | None) -> Trial:
        """Run a trial as `call` does, except that `ChildDied` is raised as it is."""
        self.jobs += 1
        return self._process.call(request, self._seconds(limit_seconds))

    def close(self) -> None:
        """End the process; first give it time to exit by itself, so that the workload's `atexit` functions run."""
        self._process.end(grace_seconds=_LEAVE_SECONDS)

    def _seconds(self, limit_seconds: float | None) -> float:
        return min(self._settings.trial_limit_seconds, limit_seconds or math.inf)

    def _call(self, request: Request[Reply], limit_seconds: float) -> Reply:
        try:
            return self._process.call(request, limit_seconds)
        except ChildDied as death:
            raise death_error(death, request.doing, limit_seconds) from None
        except JobFailed as failed:
            self.close()
            raise failure_error(failed.failure, self._owner) from None


_STANDBY_BYTES = 512 * MIB
"""Host memory that must be free beyond the budget for a standby process: it takes about 230 MiB (torch 2.13), and as
much again should stay free."""


class ChildDevice(Device):
    """A device that runs its trials in one child at a time.

    The budget is chosen when the first child has loaded the workload. A child is reused while its trials succeed; what
    they did not free may be missing for later ones (`search` repeats failures that may be due to it). After a failure
    the next trial has a fresh child. While a job runs, a standby process imports PyTorch for the
    next fresh child, if the host has the memory for it beside the budget. There is none before the budget is chosen.
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

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """As `Device.trial`; errors of loading and of choosing the budget are raised."""
        child = self._use_child(fresh=fresh)
        if not fresh:  # A trial in a fresh process is usually the last.
            self._start_standby()
        is_first = child.jobs == 0
        request = RunTrial(
            parts=parts,
            needs_whole_batch=self._needs_whole_batch,
            savers=self._savers,
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
        )
        try:
            trial = child.trial(request, limit_seconds)
        except ChildDied as death:
            trial = record_death(parts, death, crashes_for_memory=self._crashes_for_memory)
        if not trial.ran:
            child.close()
        return dataclasses.replace(trial, limit_bytes=limit_bytes, fresh=is_first)

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
        paths = ImportPaths.of(settings.checkout)
        load = LoadWorkload(device=self.name, paths=paths, **settings.to_request())
        return LoadedChild(settings, load, process)

    def _start_standby(self) -> None:
        """Start a standby process if the host has the memory; without one, the next fresh child only takes longer."""
        if self._standby is None and read_host_memory().free_bytes - self._host_budget_bytes >= _STANDBY_BYTES:
            with suppress(NotMeasuredError):
                self._standby = self._start()

    def _start(self, *, measured: bool = True) -> ChildProcess:
        handler = "autoaccum.devices.trial_child:TrialChild"
        settings = self._settings
        return start_child(handler, settings.on_output, measured=measured, checkout=settings.checkout)

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

    If native code `crashes_for_memory`, a crash is an out-of-memory error that is not certain.
    """
    message = f"micro-batch {max(parts)}: the trial's process {death}"
    crashed = crashes_for_memory and death.number in _CRASHES
    if death.out_of_memory or crashed:
        return Trial(parts=parts, outcome="oom", message=message, seconds=death.seconds, is_definite_oom=not crashed)
    timed_out = death.kind == "limit"
    return Trial(
        parts=parts,
        outcome="error",
        message=f"{message}: raise --trial-limit" if timed_out else message,
        fault="measurement",
        seconds=death.seconds,
        timed_out=timed_out,
    )
