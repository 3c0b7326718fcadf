"""The search: `study.optimize` over real trainings, then repetitions of the best settings with other seeds."""

from __future__ import annotations

import dataclasses
import math

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from autoaccum.errors import WorkloadError
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.ranking import rank
from autoaccum.tuning.study import MICRO, RATE, TARGET, Study, read_trial, storage_errors
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tune_request import Budget
from autoaccum.tuning.tuning_result import (
    Listener,
    LossReported,
    Outcome,
    Row,
    SearchSpace,
    Setting,
    TrialEnded,
    TrialStarted,
)

_CONFIRMING_SEEDS = 2
"""Seeds that a confirmed setting runs with, besides the search's own."""
_MOST_ROUNDS = 5
"""Rounds of repetitions: a new best setting after the last one is not repeated."""
_FAILURES_IN_A_ROW = 3


class _TrialFailed(Exception):  # noqa: N818 (an outcome, for Optuna)
    """The user's code raised in a training, or its process died."""


class Search:
    """Runs trials of a study in child processes; `ceiling` is the micro-batch of every evaluation."""

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        budget: Budget,
        ceiling: int,
        processes: TrialProcesses,
        notify: Listener,
    ) -> None:
        self._study, self._space, self._budget, self._ceiling = study, space, budget, ceiling
        self._processes, self._notify = processes, notify
        self._last: Outcome | None = None
        self._failures = 0

    def run(self) -> str | None:
        """Run trials until the study has as many as requested; return why it ended before, as a clause.

        Several workers may do so at once, each with up to one trial too many.

        Raises:
            WorkloadError: The user's code fails in the very first trial, or repeatedly.
            StudyError: The storage can no longer be read or written.
        """
        request, rates = self._processes.request, self._space.learning_rates
        rows = self._study.rows()
        if count_finished(rows) >= request.trials:
            return None
        is_covered = rates.low <= self._space.default_learning_rate <= rates.high
        if is_covered and not any(row.own and not row.lost for row in rows):
            with storage_errors(self._study.address):
                self._study.optuna.enqueue_trial(_default_parameters(self._space), user_attrs={"own": True})
        self._optimize(None, request.options.time_limit)
        is_over = count_finished(self._study.rows()) >= request.trials
        return None if is_over else f"its time of {request.options.time_limit:g} s is over"

    def confirm(self) -> None:
        """Repeat the best settings with other seeds, then any new best that has run only once; errors as in `run`."""
        request = self._processes.request
        seeds = [request.seed + 1 + number for number in range(_CONFIRMING_SEEDS)]
        searched = [row for row in self._study.rows() if row.confirms is None]
        chosen = list(rank(searched)[: request.confirm])
        for _ in range(_MOST_ROUNDS):
            if not chosen:
                break
            done = {(row.confirms, row.seed) for row in self._study.rows() if not row.lost}
            runs = {(one.trial, seed) for one in chosen for seed in seeds} - done
            with storage_errors(self._study.address):
                trials = self._study.optuna.get_trials(deepcopy=False)
                for trial, seed in sorted(runs):
                    self._study.optuna.enqueue_trial(trials[trial].params, {"confirms": trial, "seed": seed})
            while any(row.state == "waiting" for row in self._study.rows()):
                self._optimize(1, None)
            chosen = [one for one in rank(self._study.rows())[:1] if len(one.losses) + one.failed == 1]

    def _optimize(self, trials: int | None, time_limit: float | None) -> None:
        with storage_errors(self._study.address):
            self._study.optuna.optimize(
                self._objective,
                n_trials=trials,
                timeout=time_limit,
                catch=(_TrialFailed,),
                callbacks=[self._on_trial_end],
            )

    def _objective(self, trial: Trial) -> float:
        """Train with a trial's setting: Optuna's objective."""
        confirms, trial_seed = trial.user_attrs.get("confirms"), trial.user_attrs.get("seed")
        seed = self._processes.request.seed if trial_seed is None else trial_seed
        setting = _suggest_setting(trial, self._space)
        attributes = {TARGET: setting.target_batch, MICRO: setting.micro_batch, "seed": seed}
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self._notify(TrialStarted(trial.number, setting, seed, confirms=confirms))

        def should_continue(percent: int, loss: float) -> bool:
            self._notify(LossReported(trial.number, percent, loss))
            trial.report(loss, percent)
            return confirms is not None or not trial.should_prune()

        outcome = self._processes.train(setting, self._budget, seed, self._ceiling, should_continue)
        self._last = outcome
        for text in outcome.warnings:
            self._notify(Notice(f"trial {trial.number}: {text}"))
        for name, value in dataclasses.asdict(outcome).items():
            if name not in ("loss", "user_traceback", "warnings") and value is not None:
                trial.set_user_attr(name, value)
        if outcome.state == "failed":
            raise _TrialFailed(outcome.reason)
        if outcome.state == "pruned":
            raise optuna.TrialPruned
        # A trial that diverged or ran out of memory is worse than any other, so the sampler avoids it.
        return math.inf if outcome.loss is None else outcome.loss

    def _on_trial_end(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Report the result of a trial, and end the search if it has enough trials or keeps failing."""
        self._notify(TrialEnded(read_trial(trial)))
        finished = count_finished(self._study.rows())
        if trial.state != TrialState.FAIL:
            self._failures = 0
        else:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW or finished == 1:
                which = "the first trial" if finished == 1 else f"each of the last {self._failures} trials"
                assert self._last is not None
                raise WorkloadError(
                    f"{which} failed: {self._last.reason or 'no reason is known'}",
                    hint="fix the workload; a changed workload needs another study: --study NAME",
                    user_traceback=self._last.user_traceback,
                )
        if finished >= self._processes.request.trials:
            study.stop()


def count_finished(rows: tuple[Row, ...]) -> int:
    """Count the finished trials of the search; repetitions and lost trials do not count."""
    return sum(row.confirms is None and not row.lost and row.state not in ("running", "waiting") for row in rows)


def _suggest_setting(trial: Trial, space: SearchSpace) -> Setting:
    rates, targets = space.learning_rates, space.target_batches
    rate = trial.suggest_float(RATE, rates.low, rates.high, log=True)
    target = targets.low if len(targets.sizes) == 1 else trial.suggest_categorical(TARGET, targets.sizes)
    micro = space.micro_batch if space.coupled is None else trial.suggest_categorical(MICRO, space.micro_batches)
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)


def _default_parameters(space: SearchSpace) -> dict[str, float | int]:
    """Return the workload's default learning rate, the smallest batch, and a micro-batch that fits into it."""
    low = space.target_batches.low
    found: dict[str, float | int] = {RATE: space.default_learning_rate}
    if len(space.target_batches.sizes) > 1:
        found[TARGET] = low
    if space.coupled is not None:
        found[MICRO] = max([size for size in space.micro_batches if size <= low] or space.micro_batches[:1])
    return found
