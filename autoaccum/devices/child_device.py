"""Devices that run their trials in child processes."""

from __future__ import annotations

import dataclasses
import signal
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

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
"""Host memory that must be free beyond the budget for a standby process: it takes about 230 MiB (torch 2.13), and as
much again should stay free."""


class ChildDevice(Device):
    """A device that runs its trials in one child at a time.

    The budget is chosen when the first child has loaded the workload. A child is reused while its trials succeed; what
    they did not free may be missing for later ones (`search` repeats failures that may be due to it). After a failure
    the next trial has a fresh child. While jobs run, a standby process imports PyTorch for the next fresh child and, on
    the CPU, loads the workload, if the host has the memory for it beside the budget. Copies of that process then run
    all fresh trials, unless the workload has started threads, which a copy would not have.
    """

    _crashes_for_memory = False
    _loads_standby = False
    """Whether a standby process may load the workload, since that takes no memory of the device."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: ChildProcess | None = None
        self._standby: ChildProcess | None = None
        self._has_proved = False
        """Whether a trial ran in a fresh process; on the CPU, the next one usually fails, and is the last."""
        self._held_bytes: int | None = None
        """The memory of a child that has loaded the workload, once one has."""
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
        child, self._has_proved = self._use_child(), False
        self._start_standby()
        inspection = child.run(Inspect(savers=self._savers), self._settings.job_seconds(limit_seconds))
        self._needs_whole_batch, self._multiple_of = inspection.workload.whole_batch is not None, inspection.multiple_of
        return inspection

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `Device`."""
        self._savers = savers

    def turn_to(self, settings: TrialSettings) -> None:
        """As `Device`; a standby process that has loaded nothing is used for it, too."""
        self._end_child()
        if self._standby is not None and self._standby.calls:
            self._end_standby()
        self._settings = settings

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        """As `Device.trial`."""
        has_child = self._child is not None and self._child.alive
        child = self._use_child(fresh=fresh or not has_child)
        if not self._host_budget_bytes or not (fresh or self._has_proved):
            self._start_standby()
        in_copy = child is self._standby
        is_first, whole = in_copy or child.calls == 1, self._needs_whole_batch
        fields: dict[str, Any] = {"savers": self._savers, "limit_bytes": self.limit_bytes, "in_copy": in_copy}
        request = RunTrial(parts=parts, lengths=lengths, needs_whole_batch=whole, **fields)
        try:
            trial = child.call(request, self._settings.job_seconds(limit_seconds))
        except ChildDied as death:
            trial = record_death(parts, death, crashes_for_memory=self._crashes_for_memory)
        if not (trial.ran or in_copy):
            child.close()
        self._has_proved |= fresh and trial.ran
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
        """Return a child that has loaded the workload; the first one sets the budget.

        That is the running one; for what is `fresh` one that ran nothing, or the standby process if it is copied.
        """
        if fresh and self._standby is not None and self._standby.calls and not (self._child and self._child.calls == 1):
            if self._standby.posted is not None and not self._standby.has_died():
                self._facts = self._standby.run(self._standby.posted, self._load_seconds)
            if self._facts["is_copied"] and not self._standby.has_died():
                return self._standby
        if self._child is not None and (not self._child.alive or (fresh and self._child.calls > 1)):
            self._end_child()
        if self._child is None:
            if self._standby is not None and self._standby.has_died():
                self._end_standby()
            child, self._standby = self._standby or self._start(), None
            if self._limit_bytes is None:  # Both import PyTorch at once.
                self._start_standby()
            if child.posted is not None or not child.calls:
                self._facts = child.run(child.posted or self._load_request(), self._load_seconds)
            self._child, self._held_bytes = child, self._facts["held_bytes"]
        if self._limit_bytes is None:
            options, available = self._settings.options, self._available(self._facts)
            self._limit_bytes = choose_budget(available, options.memory, options.reserve)
        return self._child

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
        """Start a standby process if the host has the memory; without one, the next fresh child only takes longer.

        It loads the workload once another child has.
        """
        room = read_host_memory().free_bytes - self._host_budget_bytes
        if self._standby is None and room >= _STANDBY_BYTES:
            with suppress(NotMeasuredError):
                self._standby = self._start()
        if self._standby is None or self._standby.calls or self._held_bytes is None:
            return
        if self._loads_standby and room >= self._held_bytes + _STANDBY_BYTES:
            self._standby.post(self._load_request(to_copy=True))

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.end()

    def _start(self, *, measured: bool = True) -> ChildProcess:
        settings, handler = self._settings, "autoaccum.devices.trial_child:TrialChild"
        owner = "the machine" if self.name == "cpu" else self.name
        return ChildProcess(handler, on_output=settings.on_output, measured=measured, paths=settings.paths, owner=owner)

    @property
    def _host_budget_bytes(self) -> int:
        """The host memory that trials may take; 0 on a device with memory of its own."""
        return 0

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
