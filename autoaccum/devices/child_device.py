"""Devices that run their trials in child processes."""

from __future__ import annotations

import dataclasses
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

from autoaccum.devices.base import Device, Inspection, Sizes, Trial, TrialSettings
from autoaccum.devices.budget import AvailableMemory, choose_budget
from autoaccum.devices.child.failures import ChildDied
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.trial_requests import Inspect, LoadWorkload, RunTrial, TimeUpdate
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_STANDBY_BYTES = 512 * MIB
"""Host memory that must be free for a standby process: it takes about 230 MiB (torch 2.13), and as much should stay."""


class ChildDevice(Device):
    """A device that runs its trials in one child at a time.

    The budget is chosen when the first child has loaded the workload. A child is reused while its trials succeed; what
    they did not free may be missing for later ones (`search` repeats failures that may be due to it). After a failure
    the next trial has a fresh child. On the CPU, the first child only loads the workload, and copies of it are these
    children, unless the workload has started threads, which a copy would not have. On a card, a standby process imports
    PyTorch for the next fresh child while jobs run, if the host has the memory for it.
    """

    _crashes_for_memory = False
    _copies = False
    """Whether the workload can be loaded without memory of the device, so that copies of the process can run."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: ChildProcess | None = None
        self._standby: ChildProcess | None = None
        self._facts: Mapping[str, Any] = {"is_copied": False}
        self._keeps_copy = False  # Whether a copy of the child is kept, in which jobs have run.
        self._limit_bytes: int | None = None
        self._multiple_of: int | None = None
        self._needs_whole_batch = False
        self._savers: tuple[str, ...] | None = None

    @abstractmethod
    def _available(self, facts: Mapping[str, Any]) -> AvailableMemory:
        """Return the memory that the budget is chosen of, from the facts of the first child's meter."""

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
        request = Inspect(savers=self._savers, copy=self._choose_copy())
        inspection, self._keeps_copy = child.run(request, self._settings.job_seconds(limit_seconds)), True
        self._needs_whole_batch, self._multiple_of = inspection.workload.whole_batch is not None, inspection.multiple_of
        return inspection

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `Device`."""
        self._savers = savers

    def turn_to(self, settings: TrialSettings) -> None:
        """As `Device`; a standby process is used for it, too."""
        self._end_child()
        self._settings = settings

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        """As `Device.trial`."""
        child = self._use_child(fresh=fresh)
        self._start_standby()
        copy, whole, limit = self._choose_copy(fresh=fresh), self._needs_whole_batch, self.limit_bytes
        is_first = child.calls == 1 or copy == "new" or (copy == "kept" and not self._keeps_copy)
        request = RunTrial(
            parts=parts, lengths=lengths, needs_whole_batch=whole, savers=self._savers, limit_bytes=limit, copy=copy
        )
        try:
            trial = child.call(request, self._settings.job_seconds(limit_seconds))
        except ChildDied as death:
            trial = record_death(parts, death, crashes_for_memory=self._crashes_for_memory)
        if not trial.ran and copy is None:
            child.close()
        self._keeps_copy = trial.ran if copy == "kept" else self._keeps_copy
        return dataclasses.replace(trial, lengths=lengths, fresh=is_first or (trial.fresh and not trial.ran))

    @contextmanager
    def timing(self) -> Iterator[Callable[[int], float]]:
        """As `Device.timing`: in a child of its own, since the settings of the others make malloc slow."""
        self._end_child()
        process = self._start(measured=False)
        try:
            load = self._load_request(multiple_of=self._multiple_of, savers=self._savers)
            process.run(load, self._load_seconds)
            seconds = self._settings.job_seconds()
            yield lambda micro_batch: process.run(TimeUpdate(micro_batch=micro_batch), seconds)
        finally:
            process.close()

    def close(self) -> None:
        """End every process that this device started. Idempotent; a later job starts a new one."""
        try:
            self._end_child()
        finally:
            self._end_standby()

    def _use_child(self, *, fresh: bool = False) -> ChildProcess:
        """Return the running child, or a new one that has loaded the workload; the first one sets the budget."""
        spends = fresh and not self._facts["is_copied"]
        if self._child is not None and (not self._child.alive or (spends and self._child.calls > 1)):
            self._end_child()
        if self._child is None:
            if self._standby is not None and self._standby.has_died():
                self._end_standby()
            child, self._standby = self._standby or self._start(), None
            if self._limit_bytes is None:  # Both import PyTorch at once.
                self._start_standby()
            self._facts = child.run(self._load_request(to_copy=self._copies), self._load_seconds)
            self._child, self._keeps_copy = child, False
        if self._limit_bytes is None:
            options, available = self._settings.options, self._available(self._facts)
            self._limit_bytes = choose_budget(available, options.memory, options.reserve)
        return self._child

    def _choose_copy(self, *, fresh: bool = False) -> Literal["new", "kept"] | None:
        """Return which copy of the child runs a job; None: it runs that itself."""
        return None if not self._facts["is_copied"] else "new" if fresh else "kept"

    def _load_request(self, *, to_copy: bool = False, **spec: Any) -> LoadWorkload:
        given = {name: value for name, value in spec.items() if value is not None}
        settings = dataclasses.replace(self._settings, options=self._settings.options.with_spec(**given))
        return LoadWorkload(device=self.name, to_copy=to_copy, **settings.to_request())

    @property
    def _load_seconds(self) -> float:
        """The limit on loading, which an earlier child has kept once there is a budget."""
        limit_seconds = self._settings.load_limit_seconds if self._limit_bytes is None else None
        return dataclasses.replace(self._settings, load_limit_seconds=limit_seconds).load_seconds

    def _start_standby(self) -> None:
        """Start a standby process if the host has the memory; without one, the next fresh child only takes longer."""
        if self._standby is None and not self._copies and read_host_memory().free_bytes >= _STANDBY_BYTES:
            with suppress(NotMeasuredError):
                self._standby = self._start()

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.end()

    def _start(self, *, measured: bool = True) -> ChildProcess:
        settings, handler = self._settings, "autoaccum.devices.trial_child:TrialChild"
        owner = "the machine" if self.name == "cpu" else self.name
        return ChildProcess(handler, on_output=settings.on_output, measured=measured, paths=settings.paths, owner=owner)

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


def record_death(parts: tuple[int, ...], death: ChildDied, *, crashes_for_memory: bool = False) -> Trial:
    """Return the record of a trial of `parts` in which the child died.

    If native code `crashes_for_memory`, a crash may be an out-of-memory error (`Trial.is_definite_oom`).
    """
    trial = Trial(parts=parts, outcome="error", seconds=death.seconds, timed_out=death.timed_out).failed(death.failure)
    if crashes_for_memory and death.signal in _CRASHES:
        return dataclasses.replace(trial, outcome="oom", fault=None, is_definite_oom=False)
    return trial
