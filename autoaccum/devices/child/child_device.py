"""What devices have in common whose trials run in child processes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.child.process import ChildProcess, start_child
from autoaccum.devices.child.worker import Worker
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT_SHARE, _KEPT_BY_FIRST_SHARE = 0.01, 0.05
_SPARE_BYTES = 512 * MIB
"""Host memory that has to be free beyond the budget before a spare is kept: it takes about 230 MiB (torch 2.13), and
as much again should stay free."""


class ChildDevice(ABC):
    """Runs one child at a time, and sets the budget when the first one has loaded the workload.

    A child is kept while its trials succeed and give back what they took (to `least_kept_bytes` or 1 % of the
    budget, the first of them 5 %); after any failure the next trial has a fresh one. While a job runs, a spare child
    gets ready for the next one that needs a fresh process, as long as the host has the memory beside the budget. The
    budget is read before there is a spare.

    Args:
        settings: What all trials have in common.
    """

    least_kept_bytes: ClassVar[int]
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
                self._spare = start_child(self._settings.on_output, checkout=self._settings.checkout)

    @property
    def _host_budget_bytes(self) -> int:
        """What trials may take of the host's memory, as far as it is limited."""
        return 0

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _end_if_spoilt(self) -> None:
        """A process that keeps what a trial took would leave less to the next.

        What the first job keeps is mostly what every process needs once: modules, compiled kernels.
        """
        if self._worker is None:
            return
        share = _KEPT_BY_FIRST_SHARE if self._worker.jobs == 1 else _KEPT_SHARE
        if self._worker.kept_bytes > max(self.least_kept_bytes, int(self.limit_bytes * share)):
            self._end_worker()
