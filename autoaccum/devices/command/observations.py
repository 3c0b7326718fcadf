"""What a script does with the sizes that it is told: whether it trains with them, and has enough data for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autoaccum.checks import counted
from autoaccum.devices.base import Trial, TrialSettings
from autoaccum.devices.child.failures import Failure
from autoaccum.devices.command.settings import ENOUGH_UPDATES, ProcessReport
from autoaccum.errors import WorkloadError
from autoaccum.messages import Message, message
from autoaccum.sources.command import ITER_SIZE, MICRO_BATCH, TOTAL_ITER_SIZE, CommandSource


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
        most = _most_samples(size, min(given or size, size) * made, ENOUGH_UPDATES * iter_size)
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
