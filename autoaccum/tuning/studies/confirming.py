"""Confirmations: the best few settings are run with other seeds, so that a lucky run does not win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial, Trial

from autoaccum.tuning.events import Listener
from autoaccum.tuning.runner import Runner
from autoaccum.tuning.settings import Setting
from autoaccum.tuning.studies.attributes import is_finished, value_of
from autoaccum.tuning.studies.line import Line
from autoaccum.tuning.studies.parameters import MICRO, TARGET, setting_of
from autoaccum.tuning.studies.searching import Pause, look
from autoaccum.tuning.studies.study import Study
from autoaccum.tuning.studies.trying import Trying

_Run = tuple[int, int]
"""The trial of the search, and the seed."""


def confirm(
    study: Study, settings: Sequence[tuple[int, Setting]], runner: Runner, *, seeds: Sequence[int], tell: Listener
) -> None:
    """Run each setting with each seed once, unless that was done before; nothing is pruned.

    They are trials of a study of their own, `NAME, confirmed`, since Optuna would take them for trials of the search.

    Args:
        study: The study.
        settings: The number of the trial they come from, and the setting.
        runner: Who trains.
        seeds: Other ones than the search's.
        tell: Told how it goes.

    Raises:
        StudyError: The storage cannot be read or written any more.
        KeyboardInterrupt: It was interrupted; the run that was going on is put back.
    """
    _, line = study.confirmation_line()
    wanted = {(trial, seed): setting for trial, setting in settings for seed in seeds}
    _queue(study, line, wanted)
    trying = Trying(study, line, runner, tell)
    pause = Pause(study, tell)
    while True:
        known = look(study, line, tell)
        if wanted.keys() <= {_run_of(trial) for trial in known if is_finished(trial)}:
            return
        with study.reaching():
            trial = line.take(lambda waiting: _run_of(waiting) in wanted)
        if trial is None:
            pause.wait([one for one in known if _run_of(one) in wanted])
        else:
            trying.run(trial, _kept_setting, trial.user_attrs["seed"])


def _queue(study: Study, line: Line, wanted: Mapping[_Run, Setting]) -> None:
    """Queue what was not queued before, with the parameters of the trials they repeat."""
    searched = {trial.number: trial for trial in study.trials(study.name)}
    with study.reaching():
        for (number, seed), setting in wanted.items():
            source = searched[number]
            attributes = {"confirms": number, "seed": seed, TARGET: setting.target_batch, MICRO: setting.micro_batch}
            line.put(f"confirms {number} with seed {seed}", source.params, source.distributions, attributes)


def _run_of(trial: FrozenTrial) -> _Run | None:
    confirms, seed = value_of(trial, "confirms", int), value_of(trial, "seed", int)
    return None if confirms is None or seed is None else (confirms, seed)


def _kept_setting(trial: Trial) -> Setting:
    setting = setting_of(trial.study._storage.get_trial(trial._trial_id))
    assert setting is not None
    return setting
