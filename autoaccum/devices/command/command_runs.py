"""Runs of a command as trials: what it is told, what it did, and whether that is what it was told."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sysconfig
from collections.abc import Iterable, Mapping
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
from autoaccum.devices.command.settings import ProcessReport, WatchSettings
from autoaccum.devices.command.supervisor import CommandEnd, RunCommand
from autoaccum.errors import NotMeasuredError, WorkloadError
from autoaccum.messages import Message, message
from autoaccum.options import resolve_spec
from autoaccum.sources.command import ITER_SIZE, MICRO_BATCH, TOTAL_ITER_SIZE, CommandSource
from autoaccum.spec import WorkloadFacts

_HOOK: Final = Path(__file__).resolve().parent / "hook"
_GRACE_SECONDS: Final = 30.0
_CRASHES: Final = [
    status for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT) for status in (-number, 128 + number)
]
_ENOUGH_UPDATES: Final = 2
"""The second update finds the optimizer's state: a script that has data for no more is measured too."""


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
        needed = min(self.watch.updates, _ENOUGH_UPDATES)
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
        if report is not None and not any(report.backwards):
            hint += "; if its data is less than a batch, plan for smaller ones (--max-micro-batch)"
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


class Observations:
    """What a script does with its sizes, from all its runs so far: a run that contradicts is refused."""

    def __init__(self, settings: TrialSettings) -> None:
        assert isinstance(settings.source, CommandSource)
        self.source, self._world_size = settings.source, settings.options.world_size
        self._target, self._accumulates = settings.rank_samples, False
        self._first: tuple[int, list[int]] | None = None
        """The micro-batch of the first run, and the lengths of all dimensions of its first batch."""
        self._place: int | None = None
        """The index of the dimension that has the samples, once it is known."""

    @property
    def iter_option(self) -> str:
        """The option of the command that takes the number of micro-batches."""
        return self._option(self.source.iter_place or ITER_SIZE)

    def parts(self, size: int) -> tuple[int, ...]:
        """Return the parts of a run that shows whether a size fits: two micro-batches, if the command can be told."""
        return (size, size) if self.source.takes_iter_size else (size,)

    def check(self, parts: tuple[int, ...], report: ProcessReport) -> WorkloadError | None:
        """Return why a run of these parts was not what the command was told; None if it was.

        The samples are the first dimension of the first batch that differs between runs of two micro-batches: it grows
        with the micro-batch, and is there after the first update, too. Backward passes per update are a multiple of the
        micro-batches of an update, at least in one update: at the end of an epoch, what is left over makes a short one,
        or goes into the next. A script that did so at one size, but not at another, has too little data for that one.
        """
        size, iter_size = max(parts), len(parts)
        if report.world_size != self._world_size:
            return WorkloadError(
                f"the command trains on {counted(report.world_size, 'rank')}, and the plan is for {self._world_size}",
                hint=f"say so (--world-size {report.world_size}): the target batch is that of all ranks",
            )
        backwards = report.backwards[0] if report.backwards else 0
        if self.source.takes_iter_size and backwards and all(count % iter_size for count in report.backwards):
            passes = "backward pass" if backwards == 1 else f"{backwards} backward passes"
            option, made = self.iter_option, max(report.backwards)
            if self._accumulates and made < iter_size:
                error = WorkloadError(
                    f"the script makes one update per {passes}, not per {iter_size} of {size} samples: an epoch has no"
                    " more",
                    hint="give it more data, or take a smaller --target-batch",
                )
                if not self._is_whole_update(parts):
                    error.most_samples = _most_samples(size, size * made, iter_size)
                return error
            if backwards * self._world_size == iter_size > backwards:
                why, way_out = f"divides {option} by the number of ranks", f"write {TOTAL_ITER_SIZE} for {ITER_SIZE}"
            else:
                why, way_out = f"ignores {option}", "let it take an optimizer step only after that many micro-batches"
            return WorkloadError(
                f"the script makes one update per {passes}, not per {iter_size}: it {why}", hint=way_out
            )
        self._accumulates |= iter_size > 1 and self.source.takes_iter_size and backwards > 0
        if self._first is None:
            self._first = size, _lengths(report.first_batch)
        before, first = self._first
        if size == before or not first:
            return None
        given = self._given(size, report)
        if self._place is None:
            return WorkloadError(
                f"the script's batches have the same shapes at {{micro_batch}} = {before} and {size}:"
                f" {self._option(MICRO_BATCH)} is ignored",
                hint="write {micro_batch} where the command takes its batch size",
            )
        if given[0] == size and size in given[1:]:
            return None
        if given[0] != size:
            seen, most = given[0], _most_samples(size, given[0], 1)
        else:  # The data ends with the second batch.
            seen = max(given[1:], default=0)
            most = _most_samples(size, size + seen, 2)
        rows, asked = (first[self._place] * samples // before for samples in (seen, size))
        error = WorkloadError(
            f"at {{micro_batch}} = {size} the script's batches have {rows} rows, not {asked}: its data has no more",
            hint=f"try no larger size than it trains with (--max-micro-batch {most})" if most else None,
        )
        error.most_samples = most
        return error

    def judge(self, trial: Trial, report: ProcessReport | None) -> Trial:
        """Return a trial as an `error` where the run was not what the command was told.

        One that ended too early may have had too little data for its size.
        """
        if report is not None and trial.ran:
            error = self.check(trial.parts, report)
            if error is None:
                return trial
            failure = Failure(outcome="error", message=str(error), fault="user")
            return dataclasses.replace(trial.failed(failure), most_samples=error.most_samples)
        if report is None or report.failure is not None or trial.fault != "measurement" or trial.timed_out:
            return trial
        if self._is_whole_update(trial.parts):
            return trial
        size, iter_size = trial.micro_batch, len(trial.parts)
        given, made = self._given(size, report)[0], report.updates * iter_size or sum(report.backwards)
        most = _most_samples(size, min(given or size, size) * made, _ENOUGH_UPDATES * iter_size)
        return dataclasses.replace(trial, most_samples=most)

    def _given(self, size: int, report: ProcessReport) -> list[int]:
        """Return the samples of the first batch, and of those after the first update; 0 where that is not known."""
        calls = [_lengths(report.first_batch), *map(_lengths, report.batches)]
        before, first = self._first or (size, [])
        if self._place is None and size != before:
            pairs = enumerate(zip(first, calls[0], strict=False))
            self._place = next((at for at, pair in pairs if len({*pair}) > 1), None)
        place = self._place
        if place is None:
            return [0]
        return [call[place] * before // first[place] for call in calls if place < len(call)] or [0]

    def _is_whole_update(self, parts: tuple[int, ...]) -> bool:
        """Return whether parts add up to the target batch: where the data is less, smaller parts need as much of it."""
        return len(parts) > 1 and sum(parts) >= self._target

    def warnings(self, parts: tuple[int, ...], report: ProcessReport) -> tuple[Message, ...]:
        """Return what a plan should say of a run of these parts that `check` has let pass."""
        if not any(count % len(parts) for count in report.backwards):
            return ()
        return (message("command_updates_differ", passes=list(report.backwards), iter_size=len(parts)),)

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


def _most_samples(size: int, samples: int, micro_batches: int) -> int | None:
    """Return the size to try where one had too little data: its samples in so many equal `micro_batches`.

    Of data that is less than a batch, nothing was seen (0 samples): then half the size. None: that is no smaller one.
    """
    most = samples // micro_batches if samples else size // 2
    return most if 0 < most < size else None


def _lengths(shapes: Iterable[Iterable[int]]) -> list[int]:
    return [length for shape in shapes for length in shape]


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
