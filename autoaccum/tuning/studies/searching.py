"""The search: trials are drawn and run until there are as many as were asked for, by however many workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna.trial import FrozenTrial, Trial, TrialState

from autoaccum.errors import WorkloadError
from autoaccum.tuning.events import Listener, WaitingForOthers, WorkerLost
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.runner import Runner
from autoaccum.tuning.settings import Space
from autoaccum.tuning.studies.attributes import is_finished, is_given_up, value_of
from autoaccum.tuning.studies.line import Line, count_begun
from autoaccum.tuning.studies.parameters import distributions_of, draw_setting, is_drawn, own_parameters
from autoaccum.tuning.studies.study import Study
from autoaccum.tuning.studies.trying import Trying

_LONGEST_POLL_SECONDS = 1.0
_FAILURES_IN_A_ROW = 3
_OWN_TICKET = "own"


def search(
    study: Study, space: Space, runner: Runner, *, trials: int, time_limit: float | None, tell: Listener
) -> str | None:
    """Run trials until the study has `trials` of them that are finished.

    Several workers may do so at once: together they run as many.

    Args:
        study: The study.
        space: What settings are drawn from.
        runner: Who trains.
        trials: How many finished trials there are to be, those from before included.
        time_limit: Seconds after which no further trial begins.
        tell: Told how it goes.

    Returns:
        Why it ended before, as a clause; None when all trials are run.

    Raises:
        WorkloadError: The user's code fails at the very first trial, or again and again.
        StudyError: The storage cannot be read or written any more.
        KeyboardInterrupt: It was interrupted; the trial that ran is put back.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    _, line = study.search_line()
    trying = Trying(study, line, runner, tell)
    failures = _Failures(study.finished == 0)
    _queue_own(study, line, space)
    pause = Pause(study, tell)
    while True:
        known = look(study, line, tell)
        if sum(map(is_finished, known)) >= trials:
            return None
        if deadline is not None and time.monotonic() >= deadline:
            return f"its time of {time_limit:g} s is over"
        trial = _next(study, line, known, trials)
        if trial is None:
            pause.wait(known, deadline)
            continue
        outcome = trying.run(trial, lambda begun: draw_setting(begun, space), study.terms.seed)
        failures.note(outcome)


def look(study: Study, line: Line, tell: Listener) -> list[FrozenTrial]:
    """All trials, after those were put back whose worker is lost."""
    with study.reaching():
        lost = line.put_lost_back()
        trials = line.trials()
    for trial in lost:
        tell(_loss_of(trials[trial.number]))
    return trials


def _loss_of(trial: FrozenTrial) -> WorkerLost:
    confirms = value_of(trial, "confirms", int)
    return WorkerLost(
        trial.number,
        str(trial.user_attrs.get("worker", "unknown")),
        confirms=confirms,
        seed=None if confirms is None else value_of(trial, "seed", int),
        again=is_drawn(trial) and not is_given_up(trial),
    )


class Pause:
    """Waits while other workers run what is left; says so once.

    Args:
        study: The study.
        tell: Told of it.
    """

    def __init__(self, study: Study, tell: Listener) -> None:
        self._seconds = min(_LONGEST_POLL_SECONDS, study.storage.heartbeat / 4)
        self._tell: Callable[[WaitingForOthers], object] | None = tell

    def wait(self, known: list[FrozenTrial], deadline: float | None = None) -> None:
        """Wait a moment, not beyond the deadline."""
        running = [trial for trial in known if trial.state == TrialState.RUNNING]
        if running and self._tell is not None:
            confirms = {trial.user_attrs["confirms"] for trial in running if "confirms" in trial.user_attrs}
            self._tell(WaitingForOthers(tuple(trial.number for trial in running), tuple(sorted(confirms)) or None))
            self._tell = None
        left = self._seconds if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(self._seconds, left)))


def _next(study: Study, line: Line, known: list[FrozenTrial], trials: int) -> Trial | None:
    """A trial to run now: one that waits, or else a new one; None where those that run already are enough."""
    if sum(1 for trial in known if is_finished(trial) or trial.state == TrialState.RUNNING) >= trials:
        return None
    with study.reaching():
        waiting = line.take()
        if waiting is not None:
            return waiting
        return line.begin(trials) if count_begun(line.trials()) < trials else None


def _queue_own(study: Study, line: Line, space: Space) -> None:
    """Let the workload's own learning rate be the first one that is tried, where it is in the range.

    Once: where that trial fails, it is a failed one, and is not run again.
    """
    if space.own_rate in space.learning_rates:
        with study.reaching():
            line.put(_OWN_TICKET, own_parameters(space), distributions_of(space), {"own": True})


class _Failures:
    """Ends a search that only meets failures of the user's code.

    Args:
        first: Whether no trial of the study is finished yet.
    """

    def __init__(self, first: bool) -> None:
        self._bound = 1 if first else _FAILURES_IN_A_ROW
        self._count = 0

    def note(self, outcome: Outcome | None) -> None:
        """Count one more trial.

        Raises:
            WorkloadError: These were too many; the study stays.
        """
        if outcome is None:
            return
        if outcome.state != "failed":
            self._bound, self._count = _FAILURES_IN_A_ROW, 0
            return
        self._count += 1
        if self._count >= self._bound:
            which = "the first trial" if self._bound == 1 else f"each of the last {self._count} trials"
            raise WorkloadError(
                f"{which} failed: {outcome.reason or 'no reason is known'}",
                hint=_way_out(outcome),
                user_traceback=outcome.user_traceback,
            )


def _way_out(outcome: Outcome) -> str:
    """What helps: a workload whose files were changed is another one, and its trials belong to another study."""
    if outcome.user_traceback is not None:
        return (
            "mend it and begin another study by --study NAME; if the cause lay outside its files, the same command"
            " goes on"
        )
    return (
        "the study is kept: the same command goes on when the cause is mended (--trial-limit may be another); a"
        " workload whose files are changed takes another study, by --study NAME"
    )
