"""Runs of a command as trials: what it is told, what it did, and whether that is what it was told."""

from __future__ import annotations

import dataclasses
import os
import signal
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from autoaccum.checks import counted
from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.child.failures import Failure, JobFailed, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import ChildProcess, child_environment
from autoaccum.devices.command.settings import ProcessReport, WatchSettings
from autoaccum.devices.command.supervisor import CommandEnd, RunCommand
from autoaccum.errors import WorkloadError
from autoaccum.messages import message
from autoaccum.options import resolve_spec
from autoaccum.sources.command import ITER_SIZE, MICRO_BATCH, TOTAL_ITER_SIZE, CommandSource
from autoaccum.spec import WorkloadFacts

_HOOK: Final = Path(__file__).resolve().parent / "hook"
_GRACE_SECONDS: Final = 30.0
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_ENOUGH_UPDATES: Final = 2
"""The second update finds the optimizer's state: a script that has data for no more is measured too."""


class CommandRun:
    """One run of a command, which begins at once; several can run at the same time.

    Args:
        settings: The settings that all trials share.
        parts: The micro-batches of an update, in samples, all equal.
        environment: Variables that its environment has beside those of `command_environment`.
        watch: Further fields of `WatchSettings`.

    Raises:
        NotMeasuredError: Its process cannot be started.
    """

    def __init__(
        self,
        settings: TrialSettings,
        parts: tuple[int, ...],
        environment: Mapping[str, str] | None = None,
        **watch: Any,
    ) -> None:
        source, options = settings.source, settings.options
        assert isinstance(source, CommandSource)
        self._source, self.parts = source, parts
        self._files = ExitStack()
        self.folder = Path(self._files.enter_context(TemporaryDirectory(prefix="autoaccum-")))
        self.watch = WatchSettings(
            folder=str(self.folder),
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
            environment={**command_environment(self.watch.device, settings.paths), **(environment or {})},
            settings=self.watch,
            limit_seconds=settings.job_seconds(),
            shows_output=settings.on_output is not None,
        )
        self._process.post(self._request)

    def wait(self, limit_seconds: float | None = None) -> CommandEnd:
        """Return how it ended; it is closed then, but for its folder.

        Raises:
            JobFailed: It could not be run.
        """
        seconds = min(self._request.limit_seconds, limit_seconds or self._request.limit_seconds)
        return self._process.receive(self._request, seconds + _GRACE_SECONDS)

    def finish(
        self, owner: str, limit_seconds: float | None = None, *, crashes_for_memory: bool = False
    ) -> tuple[Trial, ProcessReport | None]:
        """Wait for its end, and return it as a trial, with the report of the process that trains; it is closed then.

        Raises:
            UsageError, NotMeasuredError: It could not be run; `owner` is whose memory it takes.
        """
        try:
            end = self.wait(limit_seconds)
        except JobFailed as failed:
            raise failure_error(failed.failure, owner) from None
        finally:
            self.close()
        return trial_of(end, self.parts, crashes_for_memory=crashes_for_memory), first_report(end)

    def close(self) -> None:
        """End everything that it started, and remove its files. Idempotent."""
        self._files.close()


def command_environment(device: str | None, paths: ImportPaths | None = None) -> dict[str, str]:
    """Return the environment of a command: this process's, with the hook, and the device as its only one.

    Modules are found on `paths`, if those are given. On the CPU memory is made repeatable (`child_environment`).
    """
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
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


def trial_of(
    end: CommandEnd, parts: tuple[int, ...], *, crashes_for_memory: bool = False, updates: int = _ENOUGH_UPDATES
) -> Trial:
    """Return the trial that a run was.

    If native code `crashes_for_memory`, a crash may be an out-of-memory error (`Trial.is_definite_oom`). `updates` is
    how many it needs.
    """
    trial = Trial(parts=parts, outcome="ok", seconds=end.seconds, timed_out=end.timed_out, fresh=True)
    doing = f"micro-batch {max(parts)}"

    def failed(text: str, **fields: Any) -> Trial:
        usual = {"outcome": "error", "fault": "user", "message": f"{doing}: {text}", "traceback": end.output}
        return dataclasses.replace(trial, **{**usual, **fields})

    failures = [report.failure for report in end.reports if report.failure is not None]
    for failure in sorted(failures, key=lambda failure: failure.outcome != "oom"):
        return trial.failed(failure)
    if end.is_oom_kill:
        text = "a process was ended by the kernel for lack of memory"
        return failed(text, outcome="oom", fault=None, traceback=None)
    report = first_report(end)
    if report is not None and report.updates >= updates and (end.exit_status or 0) == 0 and not end.timed_out:
        return _measured(trial, end)
    if end.timed_out:
        seen = "" if report is None else f" after {_counted(report)}"
        return failed(f"the command took longer than the limit on time{seen}, and was ended", fault="measurement")
    if crashes_for_memory and end.exit_status in {*(-number for number in _CRASHES), *(128 + n for n in _CRASHES)}:
        text = f"the command crashed with exit status {end.exit_status}, as libraries do that get no memory"
        return failed(text, outcome="oom", fault=None, is_definite_oom=False, traceback=None)
    if end.exit_status:
        return failed(f"the command left with exit status {end.exit_status}")
    seen = "no Python process in it has imported torch" if report is None else f"it made {_counted(report)}"
    return failed(
        f"the command ended before its {'first' if updates == 1 else 'second'} update ({seen}): let it train for"
        f" {counted(updates, 'update')} or more",
        fault="measurement",
    )


def check_ran(trial: Trial, report: ProcessReport | None, owner: str) -> ProcessReport:
    """Return the report of a trial that ran.

    Raises:
        WorkloadError, DoesNotFitError, NotMeasuredError: It did not.
    """
    if trial.ran and report is not None:
        return report
    failure = Failure(outcome=trial.outcome, message=trial.message or "", traceback=trial.traceback, fault=trial.fault)
    raise failure_error(failure, owner)


def first_report(end: CommandEnd) -> ProcessReport | None:
    """Return the report of the process that trains; of several ranks, the first."""
    return max(end.reports, key=lambda report: (report.updates, sum(report.backwards), -report.rank), default=None)


def _counted(report: ProcessReport) -> str:
    return f"{report.updates} optimizer steps and {sum(report.backwards)} backward passes"


def _measured(trial: Trial, end: CommandEnd) -> Trial:
    """Return a trial with the worst outcome and the highest peaks of its ranks."""
    order = ("ok", "tight", "oom")
    worst = max(end.reports, key=lambda report: order.index(report.outcome))

    def highest(name: str) -> Any:
        return max((value for report in end.reports if (value := getattr(report, name)) is not None), default=None)

    names = ("peak_reserved_bytes", "peak_allocated_bytes", "allocator_retries")
    peaks = {name: highest(name) for name in names}
    return dataclasses.replace(trial, outcome=worst.outcome, message=worst.message, **peaks)


@dataclass
class Observations:
    """What a script does with its sizes, from all its runs so far: a run that contradicts is refused.

    Attributes:
        source: The command.
        world_size: The ranks of the plan.
        first: The micro-batch of the first run, and the lengths of all dimensions of its first batch.
        place: The index of the dimension that has the samples, once it is known.
    """

    source: CommandSource
    world_size: int = 1
    first: tuple[int, list[int]] | None = None
    place: int | None = None

    @classmethod
    def of(cls, settings: TrialSettings) -> Observations:
        """Return those of a command that has not run yet."""
        assert isinstance(settings.source, CommandSource)
        return cls(settings.source, settings.options.world_size)

    @property
    def iter_option(self) -> str:
        """The option of the command that takes the number of micro-batches."""
        return self._option(TOTAL_ITER_SIZE if TOTAL_ITER_SIZE in self.source.name else ITER_SIZE)

    def parts(self, size: int) -> tuple[int, ...]:
        """Return the parts of a run that shows whether a size fits: two micro-batches, if the command can be told."""
        return (size, size) if self.source.takes_iter_size else (size,)

    def check(self, parts: tuple[int, ...], report: ProcessReport) -> WorkloadError | None:
        """Return why a run of these parts was not what the command was told; None if it was.

        The samples are the first dimension of the first batch that differs between runs of two micro-batches: it grows
        with the micro-batch, and is there in the last update, too. Backward passes per update are a multiple of the
        micro-batches of an update.
        """
        size, iter_size = max(parts), len(parts)
        if report.world_size > 1 and report.world_size != self.world_size:
            return WorkloadError(
                f"the command trains on {report.world_size} ranks, and the plan is for {self.world_size}",
                hint=f"say so (--world-size {report.world_size}): the target batch is that of all ranks",
            )
        backwards = report.backwards[-1] if report.backwards else 0
        if self.source.takes_iter_size and iter_size > 1 and backwards % iter_size:
            passes = "backward pass" if backwards == 1 else f"{backwards} backward passes"
            option = self.iter_option
            if backwards * self.world_size == iter_size > backwards:
                why, way_out = f"divides {option} by the number of ranks", f"write {TOTAL_ITER_SIZE} for {ITER_SIZE}"
            else:
                why, way_out = f"ignores {option}", "let it take an optimizer step after so many micro-batches only"
            return WorkloadError(
                f"the script makes one update per {passes}, not per {iter_size}: it {why}", hint=way_out
            )
        lengths = _lengths(report.first_batch)
        if self.first is None:
            self.first = size, lengths
        before, first = self.first
        if size == before or not first:
            return None
        if self.place is None:
            self.place = next(
                (at for at, pair in enumerate(zip(first, lengths, strict=False)) if len({*pair}) > 1), None
            )
            if self.place is None:
                return WorkloadError(
                    f"the script's batches have the same shapes at {{micro_batch}} = {before} and {size}:"
                    f" {self._option(MICRO_BATCH)} is ignored",
                    hint="write {micro_batch} where the command takes its batch size",
                )
        asked, place = first[self.place] * size // before, self.place
        calls = [lengths, *map(_lengths, report.batches)]
        first_seen, *seen = [call[place] for call in calls if place < len(call)] or [0]
        if first_seen != asked or asked not in seen:
            rows = first_seen if first_seen != asked else max(seen, default=0)
            return WorkloadError(
                f"at {{micro_batch}} = {size} the script's batches have {rows} rows, not {asked}: its data has no more",
                hint=f"try no larger size than it trains with (--max-micro-batch {before * rows // first[place]})",
            )
        return None

    def rows_after_oom(self, report: ProcessReport) -> int | None:
        """Return the rows of the last batch of a script that ran out of memory, caught that, and took smaller ones."""
        first, last = _lengths(report.first_batch), _lengths(report.batches[-1] if report.batches else ())
        smaller = [after for before, after in zip(first, last, strict=False) if before > after]
        return smaller[0] if smaller and report.caught_oom else None

    def _option(self, place: str) -> str:
        """Return the option of the command that takes a size."""
        words = self.source.words
        at = next(at for at, word in enumerate(words) if place in word)
        word = words[at].replace(place, "").rstrip("=: ")
        return word or (words[at - 1] if at else place)


def _lengths(shapes: Iterable[Iterable[int]]) -> list[int]:
    return [length for shape in shapes for length in shape]


def inspection_of(settings: TrialSettings, report: ProcessReport, **fields: Any) -> Inspection:
    """Return what a first run tells of a command."""
    source = settings.source
    assert isinstance(source, CommandSource)
    warnings = [message("command_batchnorm", layers=list(report.batchnorms))] if report.batchnorms else []
    return Inspection(
        workload=WorkloadFacts(
            name=source.files[0].name if source.files else source.words[0],
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
