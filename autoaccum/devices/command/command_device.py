"""Trials of a command on the CPU or a card of this machine: each is a run of it, in processes of its own."""

from __future__ import annotations

import dataclasses
from contextlib import closing

from autoaccum.devices.base import Device, Inspection, Sizes, Trial, TrialSettings
from autoaccum.devices.budget import choose_budget
from autoaccum.devices.command.command_runs import CommandRun, check_ran, inspection_of
from autoaccum.devices.command.observations import Observations
from autoaccum.devices.command.settings import ProcessReport
from autoaccum.devices.cpu import describe_host
from autoaccum.devices.cuda import InstalledCard
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.messages import message
from autoaccum.serialization import read_record
from autoaccum.spec import DeviceFacts

_PROBE_SIZE = 2


class CommandDevice(Device):
    """A device of this machine on which a command runs.

    A first run, without a limit, tells what the command does; the budget is chosen then. Each trial is a run of the
    command that ends after its last update (`Options.updates`). What counts of its memory is said in
    `devices.command.watch`; of several ranks, each is held to the budget.

    Args:
        settings: The settings that all trials share.
        index: The index of the card; None: the CPU.
    """

    def __init__(self, settings: TrialSettings, index: int | None) -> None:
        self._settings, self._index = settings, index
        self._observations = Observations(settings)
        self._inspection: Inspection | None = None
        self._facts: DeviceFacts | None = None
        self._limit_bytes = 0

    @property
    def name(self) -> str:
        """`cpu` or `cuda:N`."""
        return "cpu" if self._index is None else f"cuda:{self._index}"

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes; the first use runs the command."""
        if not self._limit_bytes:
            self.inspect()
        return self._limit_bytes

    def describe(self) -> DeviceFacts:
        """As `Device`."""
        self.inspect()
        assert self._facts is not None
        return self._facts

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`, by a run in micro-batches of two samples."""
        if self._inspection is None:
            options = self._settings.options
            least = options.spec.get("multiple_of") or 1
            parts = self._observations.parts(min(max(_PROBE_SIZE, least), self._settings.rank_samples))
            trial, report = self._run(parts, None, limit_seconds)
            if trial.outcome == "oom" and parts[0] > least:  # There may be room for one sample.
                parts = self._observations.parts(least)
                trial, report = self._run(parts, None, limit_seconds)
            report = check_ran(trial, report, self.name)
            if not self._limit_bytes:
                card = None if self._index is None else read_record(report.available["card"], InstalledCard)
                available = read_host_memory() if card is None else card.available
                limit = self._limit_bytes = choose_budget(available, options.memory, options.reserve)
                self._facts = describe_host(available, limit) if card is None else card.describe(self.name, limit)
            self._inspection = inspection_of(
                self._settings, report, update_bytes=trial.peak_reserved_bytes, update_samples=parts[0]
            )
        return self._inspection

    def turn_to(self, settings: TrialSettings) -> None:
        """As `Device`."""
        self._settings, self._observations, self._inspection = settings, Observations(settings), None

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        """As `Device.trial`, by a run of its own."""
        return self._run(parts, self.limit_bytes, limit_seconds)[0]

    def _run(
        self, parts: tuple[int, ...], limit_bytes: int | None, limit_seconds: float | None
    ) -> tuple[Trial, ProcessReport | None]:
        run = CommandRun(self._settings, parts, limit_seconds, device=self.name, limit_bytes=limit_bytes)
        with closing(run):
            trial, report = run.finish(self.name, crashes_for_memory=self._index is None)
        if not trial.ran or report is None:
            return self._observations.judge(trial, report), report
        if (rows := self._observations.rows_after_oom(report)) is not None:
            self.findings = (message("command_catches_oom", size=parts[0], rows=rows),)
            text = f"it ran out of memory, caught that, and went on with {rows} rows"
            trial = dataclasses.replace(trial, outcome="oom", message=text)
        elif (trial := self._observations.judge(trial, report)).ran:
            self.findings = self._observations.warnings(parts, report) or self.findings
        return trial, report

    def close(self) -> None:
        """Do nothing: each run has ended."""
