"""Devices that run their trials in child processes, and a child that has loaded the workload."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.child.failures import ChildDied, JobFailed, death_error, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import ChildProcess, start_child
from autoaccum.devices.child.requests import Ready, Reply, Request
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.trial_record import record_death, record_trial
from autoaccum.devices.trial_requests import Inspect, LoadWorkload, RunTrial
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.units import MIB

if TYPE_CHECKING:
    from typing_extensions import Self

_LEAVE_SECONDS = 5.0
_START_SECONDS = 300.0
"""Importing PyTorch from a cold disk must not fail by a short limit on time."""
_LEAST_LOAD_SECONDS = 300.0
"""Nor what else the workload imports, by a short limit on trials."""


class LoadedChild:
    """A child process that has loaded a workload.

    Args:
        settings: What all its trials have in common.
        load: The request that loads the workload.
        process: A child that `start_child` has started.

    Attributes:
        jobs: How many jobs it has been called for since then.
        facts: What the device's meter told when everything was loaded (`devices.meters`).

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
        """Whether it can run another job."""
        return self._process.alive

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Have it run a job, and return its reply.

        Args:
            request: The job.
            limit_seconds: End it after this time, below the settings' own limit on trials.

        Raises:
            WorkloadError: The workload fails.
            DoesNotFitError: It runs out of memory.
            NotMeasuredError: The process died or took too long.
        """
        self.jobs += 1
        return self._call(request, self._seconds(limit_seconds))

    def close(self) -> None:
        """End the process; it may leave by itself first, so that what the workload registered at exit runs."""
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


class Worker(LoadedChild):
    """A child that inspects a workload and runs its trials.

    Args:
        settings: What all its trials have in common.
        device: `cpu` or `cuda:N`.
        process: A child that `start_worker` has started; None: a new one.

    Attributes:
        leftover_bytes: What its jobs did not give back, above the first job, or for that above loading.
    """

    def __init__(self, settings: TrialSettings, device: str = "cpu", *, process: ChildProcess | None = None) -> None:
        process = process or start_worker(settings)
        load = LoadWorkload(device=device, paths=ImportPaths.of(settings.checkout), **settings.to_request())
        super().__init__(settings, load, process)
        self.leftover_bytes = 0

    def inspect(self, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`."""
        inspected = self.call(Inspect(), limit_seconds)
        self.leftover_bytes = inspected.leftover_bytes
        return inspected.inspection

    def trial(
        self, parts: tuple[int, ...], budget_bytes: int, limit_bytes: int | None, limit_seconds: float | None
    ) -> Trial:
        """Run a trial within the plan's budget, or `limit_bytes` instead.

        Whatever ends it is in the record, and after a failure the process is ended.
        """
        held_to_bytes = budget_bytes if limit_bytes is None else limit_bytes
        about = {"parts": parts, "fresh": self.jobs == 0, "limit_bytes": limit_bytes}
        self.jobs += 1
        request = RunTrial(parts=parts, limit_bytes=held_to_bytes)
        try:
            measured = self._process.call(request, self._seconds(limit_seconds))
        except ChildDied as death:
            return record_death(death, about)
        trial = record_trial(measured, held_to_bytes, about)
        self.leftover_bytes = measured.leftover_bytes
        if not trial.ran:
            self.close()
        return trial


def start_worker(settings: TrialSettings) -> ChildProcess:
    """Start a child for a `Worker`, which need not have loaded anything yet."""
    return start_child("autoaccum.devices.trial_child:TrialChild", settings.on_output, checkout=settings.checkout)


_KEPT_SHARE, _KEPT_BY_FIRST_SHARE = 0.01, 0.05
_SPARE_BYTES = 512 * MIB
"""Host memory that has to be free beyond the budget before a spare is kept: it takes about 230 MiB (torch 2.13), and
as much again should stay free."""


class ChildDevice(ABC):
    """Runs one child at a time, and sets the budget when the first one has loaded the workload.

    A child is kept while its trials succeed and give back what they took (to `tolerated_leftover_bytes` or 1 % of the
    budget, the first of them 5 %); after any failure the next trial has a fresh one. While a job runs, a spare child
    gets ready for the next one that needs a fresh process, as long as the host has the memory beside the budget. The
    budget is read before there is a spare.

    Args:
        settings: What all trials have in common.
    """

    tolerated_leftover_bytes: ClassVar[int]
    """What a child may keep of its trials, however small the budget."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._worker: Worker | None = None
        self._spare: ChildProcess | None = None
        self._limit_bytes: int | None = None
        self.resets_peak = True

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name, which also tells the child where to run."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What the plan records about the device."""

    @abstractmethod
    def _choose_budget(self, facts: Mapping[str, Any]) -> int:
        """The budget in bytes, from what the first child's meter told."""

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes; the first time, it is measured with the workload loaded.

        Raises:
            UsageError: The memory asked for is more than what is free, or nothing is left beside the reserve.
            WorkloadError, NotMeasuredError: As `inspect`.
        """
        if self._limit_bytes is None:
            self._use_worker()
        assert self._limit_bytes is not None
        return self._limit_bytes

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`."""
        worker = self._use_worker()
        self._keep_spare()
        inspection = worker.inspect(limit_seconds)
        self._end_if_spoilt()
        return inspection

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """As `Device.trial`; errors are those of loading, and of setting the budget."""
        worker = self._use_worker(fresh=fresh or not self.resets_peak)
        self._keep_spare()
        trial = worker.trial(parts, self.limit_bytes, limit_bytes, limit_seconds)
        self._end_if_spoilt()
        return trial

    def close(self) -> None:
        """End every process of this device's own. Idempotent; another question would start a new one."""
        spare, self._spare = self._spare, None
        try:
            self._end_worker()
        finally:
            if spare is not None:
                spare.end()

    def __enter__(self) -> Self:
        """Nothing is started before the first question."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()

    def _use_worker(self, *, fresh: bool = False) -> Worker:
        """The process at hand, or a new one; with the first one the budget is set."""
        if self._worker is not None and (not self._worker.alive or (fresh and self._worker.jobs > 0)):
            self._end_worker()
        if self._worker is None:
            spare, self._spare = self._spare, None
            if spare is not None and spare.has_died():
                spare.end()
                spare = None
            settings = self._settings
            if self._limit_bytes is not None:  # It has been loaded within its limit before.
                settings = dataclasses.replace(settings, load_limit_seconds=None)
            self._worker = Worker(settings, self.name, process=spare)
            self.resets_peak = bool(self._worker.facts.get("resets_peak", True))
        if self._limit_bytes is None:
            self._limit_bytes = self._choose_budget(self._worker.facts)
        return self._worker

    def _keep_spare(self) -> None:
        """Have a spare started, unless the host's memory is too short for one; it is no loss when none can be."""
        if self._spare is None and read_host_memory().free_bytes - self._host_budget_bytes >= _SPARE_BYTES:
            with suppress(NotMeasuredError):
                self._spare = start_worker(self._settings)

    @property
    def _host_budget_bytes(self) -> int:
        """What trials may take of the host's memory, as far as it is limited."""
        return 0

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _end_if_spoilt(self) -> None:
        """A process that keeps what a trial took would leave less to the next.

        What the first job keeps is mostly what every process needs once: modules, compiled kernels.
        """
        if self._worker is None:
            return
        share = _KEPT_BY_FIRST_SHARE if self._worker.jobs == 1 else _KEPT_SHARE
        if self._worker.leftover_bytes > max(self.tolerated_leftover_bytes, int(self.limit_bytes * share)):
            self._end_worker()
