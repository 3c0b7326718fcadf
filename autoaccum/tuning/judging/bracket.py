"""Between which tried learning rates the best one lies, as far as the trials can tell.

Where the expected loss has one valley over the learning rate, two rates that are worse than a third, one below it and
one above, have the optimum between them. What is seen is the loss of single runs, so that worse has to be clearly so:

- A rate is compared with the best by runs of one seed, that of the search: weights and order are the same for both,
  and the luck of a seed does not come in between.
- Differences up to `noise` count as chance: two standard deviations of a difference of two runs, by the spread over
  seeds of the settings that were repeated, pooled over them.
- A run that was pruned is compared where it ended, with the best's loss and the noise there. That tells of higher
  rates. A lower one may be behind there and catch up (`catching_up`): it is worse only if the whole budget would take
  it no further than the best had come there, and the best has clearly gained since then. Where the workload has a
  schedule, a pruned run says nothing: a rate that falls on the way may be behind there at its best.
- One that diverged is worse. One that failed or ran out of memory says nothing.
- Every tried rate beyond an end of the bracket is clearly worse: should one be that lies between two others that are
  not, this was chance, or the valley is not the only one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from statistics import variance

from autoaccum.tuning.judging.catching_up import may_catch_up
from autoaccum.tuning.judging.standings import is_complete
from autoaccum.tuning.records import Bracket, Row, Standing
from autoaccum.tuning.runner import END
from autoaccum.tuning.settings import Setting

NOISE_DEVIATIONS = 2.0
"""How many standard deviations of a difference count as chance."""


def find_bracket(rows: Sequence[Row], standings: Sequence[Standing], *, scheduled: bool = False) -> Bracket | None:
    """The learning rates around the best that are clearly worse, among trials of its effective batch and micro-batch.

    None where no trial is complete.

    Args:
        rows: Of the search, and the confirmations.
        standings: Of those rows, best first.
        scheduled: Whether the learning rate changes on the way, so that milestones say nothing of the end.
    """
    if not standings:
        return None
    winner = standings[0]
    best = next(row for row in rows if row.confirms is None and row.number == winner.trial)
    rate = winner.setting.learning_rate
    worse: dict[float, bool] = {}
    for row in rows:
        if row.confirms is None and row.setting is not None and _differs_in_rate(row.setting, winner.setting):
            told = None if scheduled and row.state == "pruned" else _is_worse(row, best, rows)
            if told is not None:
                worse[row.setting.learning_rate] = told and worse.get(row.setting.learning_rate, True)
    below = takewhile(lambda tried: worse[tried], sorted(tried for tried in worse if tried < rate))
    above = takewhile(lambda tried: worse[tried], sorted((tried for tried in worse if tried > rate), reverse=True))
    return Bracket(low=_last(below), best=rate, high=_last(above), noise=find_noise(rows))


def find_noise(rows: Iterable[Row], percent: int = END) -> float | None:
    """Up to which difference the losses of two runs differ by chance, at a milestone or at the end.

    None where no setting has two complete runs.
    """
    losses: dict[Setting, dict[int, float]] = {}
    for row in rows:
        loss = _loss_at(row, percent)
        if row.setting is not None and is_complete(row) and loss is not None:
            losses.setdefault(row.setting, {}).setdefault(row.seed, loss)
    repeated = [tuple(seeds.values()) for seeds in losses.values() if len(seeds) > 1]
    if not repeated:
        return None
    freedom = sum(len(found) - 1 for found in repeated)
    pooled = sum((len(found) - 1) * variance(found) for found in repeated) / freedom
    return NOISE_DEVIATIONS * math.sqrt(2 * pooled)


def _is_worse(row: Row, best: Row, rows: Sequence[Row]) -> bool | None:
    """Whether a trial is clearly worse than the best; None where that cannot be told."""
    if row.state == "diverged":
        return True
    if is_complete(row):
        return _is_clear(row, best, END, rows)
    if row.state != "pruned" or not row.losses:
        return None
    percent = row.losses[-1][0]
    behind = _is_clear(row, best, percent, rows)
    slower = behind and _rate(row) < _rate(best)
    if slower and not (_is_out_of_reach(row, best, percent) and _has_gained(best, percent, rows)):
        return None
    return behind


def _is_out_of_reach(row: Row, best: Row, percent: int) -> bool:
    """Whether a slower trial would not come further in the whole budget than the best at a milestone."""
    setting, faster = row.setting, best.setting
    return setting is not None and faster is not None and not may_catch_up(setting, faster, [faster], percent)


def _is_clear(row: Row, best: Row, percent: int, rows: Sequence[Row]) -> bool | None:
    """Whether the loss of a trial exceeds the best's by more than noise; None where either was not looked at."""
    loss, least = _loss_at(row, percent), _loss_at(best, percent)
    return None if loss is None or least is None else loss - least > (find_noise(rows, percent) or 0.0)


def _has_gained(best: Row, percent: int, rows: Sequence[Row]) -> bool:
    """Whether the best's loss has clearly fallen from a milestone to the end."""
    then, now = _loss_at(best, percent), _loss_at(best, END)
    return then is not None and now is not None and then - now > (find_noise(rows) or 0.0)


def _rate(row: Row) -> float:
    assert row.setting is not None
    return row.setting.learning_rate


def _loss_at(row: Row, percent: int) -> float | None:
    """The loss at the end of the budget, or at a milestone, as far as it is finite."""
    loss = row.loss if percent == END else dict(row.losses).get(percent)
    return loss if loss is not None and math.isfinite(loss) else None


def _differs_in_rate(one: Setting, other: Setting) -> bool:
    """Whether two settings differ in the learning rate, and in nothing else."""
    same = one.target_batch == other.target_batch and one.micro_batch == other.micro_batch
    return same and one.learning_rate != other.learning_rate


def _last(rates: Iterable[float]) -> float | None:
    found = list(rates)
    return found[-1] if found else None
