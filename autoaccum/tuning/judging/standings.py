"""Which setting wins: by one run each until the best few are repeated, and by the mean over seeds from then on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from autoaccum.tuning.records import Row, Standing
from autoaccum.tuning.settings import Setting

_ENDED_BADLY = ("diverged", "out_of_memory", "failed")


def rank(rows: Sequence[Row]) -> tuple[Standing, ...]:
    """The settings that a trial of the search has trained to the end with, best first.

    - A setting counts once, whatever number of trials drew it, and a seed counts once for it: with a budget in samples
      the same seed gives the same run. A run that is complete stands in for one of its seed that is not.
    - As long as nothing was repeated, the lowest loss is best. From the first repetition on, settings that were
      repeated come first, by the mean of their losses: the lowest of many single losses is lucky, too.
    - Behind those come the settings of which an update ran out of memory on the way, and last the ones of which a run
      diverged, ran out of memory or failed, the fewest of them first. Neither wins unless there is nothing else.
    - Ties go to the earlier trial.
    """
    return tuple(contender.standing for contender in sorted(_contenders(rows), key=_Contender.order))


def own_standing(rows: Sequence[Row]) -> Standing | None:
    """The standing of the workload's own setting; None where it was not run to the end."""
    own = {row.setting for row in rows if row.own and row.confirms is None}
    return next((standing for standing in rank(rows) if standing.setting in own), None)


@dataclass(frozen=True)
class _Contender:
    """A standing, and what decides about it beyond its losses."""

    standing: Standing
    repeated: bool
    short: bool

    def order(self) -> tuple[int, bool, bool, float, int]:
        standing = self.standing
        mean = fmean(standing.losses)
        return standing.failed, self.short, not self.repeated, mean, standing.trial


def _contenders(rows: Iterable[Row]) -> list[_Contender]:
    """Every setting with a complete trial of the search."""
    runs: dict[Setting, list[Row]] = {}
    for row in rows:
        if row.setting is not None and not row.lost and (is_complete(row) or row.state in _ENDED_BADLY):
            runs.setdefault(row.setting, []).append(row)
    searched = ((setting, told, next(filter(_is_searched, told), None)) for setting, told in runs.items())
    return [_contend(setting, trial.number, told) for setting, told, trial in searched if trial is not None]


def _contend(setting: Setting, trial: int, rows: list[Row]) -> _Contender:
    """Sum up the runs with one setting."""
    told: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: (not is_complete(row), row.confirms is not None)):
        told.setdefault(row.seed, row)
    losses = tuple(row.loss for row in told.values() if row.loss is not None and is_complete(row))
    failed = len(told) - len(losses)
    standing = Standing(
        trial=trial,
        setting=setting,
        losses=losses,
        failed=failed,
        mean=None if failed else fmean(losses),
        spread=stdev(losses) if len(losses) > 1 else None,
    )
    return _Contender(standing, len(told) > 1, any(row.shortages for row in told.values()))


def is_complete(row: Row) -> bool:
    """Whether a row has a loss that counts."""
    return row.state == "complete" and row.loss is not None and math.isfinite(row.loss)


def _is_searched(row: Row) -> bool:
    return row.confirms is None and is_complete(row)
