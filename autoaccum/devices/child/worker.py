"""A child process that has loaded the workload, and what its answers mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.child.process import ChildDied, ChildProcess, start_child, where_to_import
from autoaccum.devices.child.replies import Failure, failure_error, record_death, record_reply
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError
from autoaccum.serialization import read_record

_LEAVE_SECONDS = 5.0
_START_SECONDS = 300.0
"""Importing PyTorch from a cold disk must not fail by a short limit on time."""
_LEAST_LOAD_SECONDS = 300.0
"""Nor what else the workload imports, by a short limit on trials."""


class Worker:
    """One process that runs the jobs of `devices.child` for one workload.

    Args:
        settings: What all its trials have in common.
        device: `cpu` or `cuda:N`.
        process: A child that `process.start_child` has started; None: a new one.
        card: The record of a card to simulate; `device` is then what messages call it.

    Attributes:
        jobs: How many inspections and trials it has run.
        facts: What the device's meter told when everything was loaded (`devices.meters`).
        kept_bytes: What its jobs did not give back, above the first job, or for that above loading.

    Raises:
        WorkloadError: The workload cannot be loaded.
        UsageError: There is no such device here.
        DoesNotFitError: Loading it runs the machine out of memory.
        NotMeasuredError: The process cannot be started, died or took too long.
    """

    def __init__(
        self,
        settings: TrialSettings,
        device: str = "cpu",
        *,
        process: ChildProcess | None = None,
        card: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._device = device
        self._process = process or start_child(
            settings.on_output, simulated=card is not None, checkout=settings.checkout
        )
        self.jobs = 0
        self.kept_bytes = 0
        request = {
            "job": "load",
            "device": device,
            **settings.to_request(),
            **where_to_import(settings.checkout),
            **({} if card is None else {"card": card}),
        }
        self._ask({"job": "ready"}, "starting", _START_SECONDS)
        limit = settings.load_limit_seconds or max(settings.trial_limit_seconds, _LEAST_LOAD_SECONDS)
        self.facts: Mapping[str, Any] = self._ask(request, "loading the workload", limit)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can run another job."""
        return self._process.alive

    def inspect(self, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`, in `limit_seconds` if that is less than the settings' limit on trials."""
        doing = "building the model and checking an update of it"
        reply = self._ask(self._request("inspect"), doing, self._seconds(limit_seconds))
        self.kept_bytes = reply.get("kept_bytes", 0)
        return read_record(reply["inspection"], Inspection)

    def ask(self, job: str, limit_seconds: float | None = None, **asked: Any) -> Mapping[str, Any]:
        """The reply to a job of a simulated card (`simulated.jobs`): its records are read there.

        Raises:
            WorkloadError: It fails, or cannot be simulated.
            NotMeasuredError: The process died or took too long.
        """
        doing = f"micro-batch {max(asked['parts'])}" if "parts" in asked else "looking for changes"
        doing += f" with {asked['change']}" if "change" in asked else ""
        return self._ask({**self._request(job), **asked}, doing, self._seconds(limit_seconds))

    def trial(
        self, parts: tuple[int, ...], budget_bytes: int, limit_bytes: int | None, limit_seconds: float | None
    ) -> Trial:
        """Run the job `trial` within the plan's budget, or `limit_bytes` instead.

        Whatever ends it is in the record, and after a failure the process is ended.
        """
        held_to_bytes = budget_bytes if limit_bytes is None else limit_bytes
        seconds = self._seconds(limit_seconds)
        about = {"parts": parts, "fresh": self.jobs == 0, "limit_bytes": limit_bytes}
        request = {**self._request("trial"), "parts": parts, "limit_bytes": held_to_bytes}
        try:
            reply = self._process.ask(request, seconds)
        except ChildDied as death:
            return record_death(death, about)
        trial = record_reply(reply, held_to_bytes, about)
        self.kept_bytes = reply.get("kept_bytes", 0)
        if not trial.ran:
            self.end()
        return trial

    def end(self) -> None:
        """End the process; it may leave by itself first, so that what the workload registered at exit runs."""
        self._process.end(grace_seconds=_LEAVE_SECONDS)

    def _seconds(self, limit_seconds: float | None) -> float:
        return min(self._settings.trial_limit_seconds, limit_seconds or math.inf)

    def _request(self, job: str) -> dict[str, Any]:
        self.jobs += 1
        return {"job": job, "share": self._settings.share}

    def _ask(self, request: Mapping[str, Any], doing: str, limit_seconds: float) -> dict[str, Any]:
        try:
            reply = self._process.ask(request, limit_seconds)
        except ChildDied as death:
            raise death_error(death, doing, limit_seconds) from None
        if "refused" in reply:
            self.end()
            raise UsageError(reply["refused"])
        if "failure" in reply:
            self.end()
            raise failure_error(Failure(**reply["failure"]), "the machine" if self._device == "cpu" else self._device)
        return reply


def death_error(death: ChildDied, doing: str, limit_seconds: float) -> AutoaccumError:
    """The error that the death of a child is before any trial, `doing` such as `loading the workload`."""
    if death.kind == "limit":
        return NotMeasuredError(
            f"{doing} took longer than {limit_seconds:g} s, and was ended",
            hint="look for what does not end there, or raise --time-limit or --trial-limit",
        )
    message = f"{doing}: its process {death}"
    if death.out_of_memory:
        return DoesNotFitError(message, hint="it needs more memory than the machine has free")
    return NotMeasuredError(message)
