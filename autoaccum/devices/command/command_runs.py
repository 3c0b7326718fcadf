"""Runs of a command as trials: what a run is told, and what is made of its end."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sysconfig
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, Literal
from uuid import uuid4

from autoaccum.checks import counted
from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.child.failures import Failure, JobFailed, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import TOO_LONG_HINT, ChildProcess, child_environment
from autoaccum.devices.command.settings import ENOUGH_UPDATES, ProcessReport, WatchSettings
from autoaccum.devices.command.supervisor import CommandEnd, RunCommand
from autoaccum.errors import NotMeasuredError, WorkloadError
from autoaccum.messages import message
from autoaccum.options import resolve_spec
from autoaccum.sources.command import CommandSource
from autoaccum.spec import WorkloadFacts

_HOOK: Final = Path(__file__).resolve().parent / "hook"
_GRACE_SECONDS: Final = 30.0
_CRASHES: Final = [
    status for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT) for status in (-number, 128 + number)
]


class CommandRun:
    """One run of a command, which begins at once; several can run at the same time. `close` removes its folder.

    Args:
        settings: The settings that all trials share.
        parts: The micro-batches of an update, in samples, all equal.
        limit_seconds: The limit on its time, if that is less than the settings' own.
        environment: Variables that its environment has beside those of `command_environment`.
        watch: Further fields of `WatchSettings`.

    Raises:
        NotMeasuredError: Its process cannot be started.
    """

    def __init__(
        self,
        settings: TrialSettings,
        parts: tuple[int, ...],
        limit_seconds: float | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **watch: Any,
    ) -> None:
        source, options = settings.source, settings.options
        assert isinstance(source, CommandSource)
        self._files = ExitStack()
        folder = Path(gettempdir(), f"autoaccum-{uuid4().hex[:12]}")  # The supervisor makes it, and removes it as well.
        self._files.callback(shutil.rmtree, folder, ignore_errors=True)
        self.watch = WatchSettings(
            folder=str(folder),
            parts=parts,
            values=options.values,
            paths=settings.paths,
            **{"updates": options.updates, **watch},
        )
        words = source.fill(micro_batch=max(parts), iter_size=len(parts), world_size=options.world_size)
        self._process = ChildProcess(
            "autoaccum.devices.command.supervisor:Supervisor",
            on_output=settings.on_output,
            measured=False,
            grace_seconds=_GRACE_SECONDS,
        )
        self._files.callback(self._process.close)
        self._request = RunCommand(
            words=tuple(words),
            folder=source.folder,
            environment={
                **command_environment(self.watch.device, settings.paths),
                **(environment or {}),
                "TMPDIR": str(self.watch.temporary),
            },
            settings=self.watch,
            limit_seconds=settings.job_seconds(limit_seconds),
            shows_output=settings.on_output is not None,
        )
        self._process.post(self._request)

    def finish(self, owner: str, *, crashes_for_memory: bool = False) -> tuple[Trial, ProcessReport | None]:
        """Wait for its end, and return it as a trial, with the report of the process that trains.

        If native code `crashes_for_memory`, a crash may be an out-of-memory error (`Trial.is_definite_oom`).

        Raises:
            UsageError, NotMeasuredError: It could not be run; `owner` is whose memory it takes.
        """
        try:
            end = self._process.receive(self._request, self._request.limit_seconds + _GRACE_SECONDS)
        except JobFailed as failed:
            raise failure_error(failed.failure, owner) from None
        finally:
            self._process.close()
        parts = self.watch.parts
        report = max(end.reports, key=lambda each: (each.updates, sum(each.backwards), -each.rank), default=None)
        trial = Trial(parts=parts, outcome="ok", seconds=end.seconds, timed_out=end.timed_out, fresh=True)
        needed = min(self.watch.updates, ENOUGH_UPDATES)
        failure = _failure(end, report, self._request.doing, needed, crashes_for_memory=crashes_for_memory)
        return (_measured(trial, end) if failure is None else trial.failed(failure)), report

    def close(self) -> None:
        """End everything that it started, and remove its files. Idempotent."""
        self._files.close()


def command_environment(device: str | None, paths: ImportPaths | None = None) -> dict[str, str]:
    """Return the environment of a command: this process's, with the hook, and the device as its only one.

    Modules are found on `paths`, if those are given. On the CPU memory is made repeatable (`child_environment`).
    """
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    with suppress(KeyError, OSError):  # There is no name for the user. Runs share what `torch.compile` has compiled.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{getuser()}")
    if device == "cpu":
        names = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTHONMALLOC")
        environment |= {name: value for name, value in child_environment().items() if name in names}
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = int(device.partition(":")[2] or 0)
        if "LOCAL_RANK" not in os.environ and index:
            environment["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) else str(index)
    pythonpath = os.environ.get("PYTHONPATH") if paths is None else paths.pythonpath
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOK), pythonpath]))
    environment["AUTOACCUM_PACKAGES"] = sysconfig.get_path("purelib")
    return environment


def _failure(
    end: CommandEnd, report: ProcessReport | None, doing: str, updates: int, *, crashes_for_memory: bool
) -> Failure | None:
    """Return why a run is no measurement; None if it is one, with so many updates."""
    failures = [each.failure for each in end.reports if each.failure is not None]
    if failures:
        return min(failures, key=lambda failure: failure.outcome != "oom")
    if end.is_oom_kill:
        return Failure(outcome="oom", message=f"{doing}: a process was ended by the kernel for lack of memory")
    if report is not None and report.updates >= updates and not end.exit_status and not end.timed_out:
        return None
    seen = "no Python process in it has imported torch"
    if end.updates is not None:
        seen = f"it made {counted(end.updates, 'update')}"
    if report is not None:
        seen += f" and {counted(sum(report.backwards), 'backward pass')}"
    fault: Literal["user", "measurement"] = "measurement"
    if end.timed_out:
        text = f"the command took longer than the limit on time, and was ended ({seen}): {TOO_LONG_HINT}"
    elif crashes_for_memory and end.exit_status in _CRASHES:
        text = f"{doing}: the command crashed with exit status {end.exit_status}, as libraries do that get no memory"
        return Failure(outcome="oom", message=text, is_definite_oom=False)
    elif end.exit_status:
        text, fault = f"the command left with exit status {end.exit_status}", "user"
    else:
        hint = f"let it train for {counted(updates, 'update')} or more, and not resume a run that has ended"
        if report is not None:
            hint += "; if its data is less than that, plan for smaller batches (--target-batch or --max-micro-batch)"
        text = f"the command ended too early ({seen}): {hint}"
    return Failure(outcome="error", message=f"{doing}: {text}", traceback=end.output, fault=fault)


def check_ran(trial: Trial, report: ProcessReport | None, owner: str) -> ProcessReport:
    """Return the report of a trial that ran.

    Raises:
        WorkloadError, DoesNotFitError, NotMeasuredError: It did not.
    """
    if trial.ran and report is not None:
        return report
    failure = Failure(outcome=trial.outcome, message=trial.message or "", traceback=trial.traceback, fault=trial.fault)
    error = failure_error(failure, owner)
    if isinstance(error, (WorkloadError, NotMeasuredError)):
        error.most_samples = trial.most_samples
    raise error


def _measured(trial: Trial, end: CommandEnd) -> Trial:
    """Return a trial with the worst outcome and the highest peaks of its ranks."""
    order = ("ok", "tight", "oom")
    worst = max(end.reports, key=lambda report: order.index(report.outcome))
    peaks: dict[str, Any] = {}
    for name in ("peak_reserved_bytes", "peak_allocated_bytes", "allocator_retries"):
        known = [value for report in end.reports if (value := getattr(report, name)) is not None]
        peaks[name] = max(known, default=None)
    return dataclasses.replace(trial, outcome=worst.outcome, message=worst.message, **peaks)


def inspection_of(settings: TrialSettings, report: ProcessReport, **fields: Any) -> Inspection:
    """Return what a first run tells of a command."""
    source = settings.source
    assert isinstance(source, CommandSource)
    warnings = [message("command_batchnorm", layers=list(report.batchnorms))] if report.batchnorms else []
    return Inspection(
        workload=WorkloadFacts(
            name=source.title,
            digest=source.digest,
            model=report.model,
            parameters=report.parameters,
            parameter_bytes=report.parameter_bytes,
            dtypes=report.dtypes,
            optimizer=report.optimizer,
            loss="model",
            reduction="mean",
            command=tuple(source.words),
        ),
        spec=resolve_spec({"precision": report.precision}, settings.options.spec),
        environment=report.environment,
        accumulation_warnings=tuple(warnings),
        **fields,
    )
