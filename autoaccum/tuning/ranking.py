"""What the trials came to: which setting wins, how much may be chance, and what to say beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance

from autoaccum.accumulation.coupling import describe_modules
from autoaccum.planning.plan import Plan
from autoaccum.tuning.tune_request import LearningRateRange
from autoaccum.tuning.tuning_result import Row, Setting, SettingResult, WorkloadFacts

_ENDED_BADLY = ("diverged", "out_of_memory", "failed")
_NOISE_DEVIATIONS = 2.0
"""How many standard deviations of a difference count as chance."""
_NEAR_FACTOR = 2.0
"""How near to an end of the range a best rate says that the range was too short."""


def rank(rows: Sequence[Row]) -> tuple[SettingResult, ...]:
    """Rank the settings that a trial of the search has trained to the end with, best first.

    Settings without a failed run come first, then those whose updates never ran out of memory, then those that were
    repeated (the lowest of many single losses is lucky), then the lower mean. A seed counts once for a setting.
    """
    runs: dict[Setting, list[Row]] = {}
    for row in rows:
        if row.setting is not None and not row.lost and (is_complete(row) or row.state in _ENDED_BADLY):
            runs.setdefault(row.setting, []).append(row)
    found: list[tuple[tuple[int, bool, bool, float, int], SettingResult]] = []
    for setting, told in runs.items():
        searched = [row.number for row in told if row.confirms is None and is_complete(row)]
        if searched:
            standing = _sum_up(setting, min(searched), told)
            short = any(row.oom_retries for row in told)
            single = len(standing.losses) + standing.failed == 1
            found.append(((standing.failed, short, single, fmean(standing.losses), standing.trial), standing))
    return tuple(standing for _, standing in sorted(found, key=lambda pair: pair[0]))


def _sum_up(setting: Setting, trial: int, rows: Sequence[Row]) -> SettingResult:
    by_seed: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: (not is_complete(row), row.number)):
        by_seed.setdefault(row.seed, row)
    losses = tuple(row.loss for row in by_seed.values() if row.loss is not None and is_complete(row))
    failed = len(by_seed) - len(losses)
    return SettingResult(
        trial=trial,
        setting=setting,
        losses=losses,
        failed=failed,
        mean=None if failed else fmean(losses),
        spread=stdev(losses) if len(losses) > 1 else None,
    )


def find_default_result(rows: Sequence[Row]) -> SettingResult | None:
    """Find the standing of the workload's own setting; None where it was not run to the end."""
    own = {row.setting for row in rows if row.own and row.confirms is None}
    return next((standing for standing in rank(rows) if standing.setting in own), None)


def is_complete(row: Row) -> bool:
    """Return whether a row has a loss that counts."""
    return row.state == "complete" and row.loss is not None and math.isfinite(row.loss)


def find_noise(standings: Iterable[SettingResult]) -> float | None:
    """Return up to which difference two runs may differ by chance; None where no setting has two complete runs.

    Two standard deviations of a difference, by the spread over seeds, pooled over the settings that were repeated.
    """
    repeated = [one.losses for one in standings if len(one.losses) > 1]
    if not repeated:
        return None
    freedom = sum(len(losses) - 1 for losses in repeated)
    pooled = sum((len(losses) - 1) * variance(losses) for losses in repeated) / freedom
    return _NOISE_DEVIATIONS * math.sqrt(2 * pooled)


def find_range_warning(rate: float, rates: LearningRateRange) -> str | None:
    """Say that the best rate lies near an end of the range, where it does."""
    said = "the best learning rate lies near the end of the range: search"
    if rate < rates.low * _NEAR_FACTOR < rates.high:
        return f"{said} below {rates.low:.3g}, too"
    if rate > rates.high / _NEAR_FACTOR > rates.low:
        return f"{said} above {rates.high:.3g}, too"
    return None


def describe_coupling(plan: Plan, facts: WorkloadFacts) -> tuple[str | None, str | None]:
    """Return why the micro-batch changes the training, as a clause, and a sentence where that could not be told.

    A BatchNorm counts wherever the model has one that is not frozen: the plan's experiment, at the first weights, does
    not see one whose own weights are zeros yet, as residual blocks begin with.
    """
    normed = () if facts.batchnorm == "frozen" else facts.batchnorms
    found = plan.coupling
    others = [] if found is None else [name for name in found.modules if name not in facts.batchnorms]
    reasons = [
        *([f"BatchNorm in {describe_modules(normed)} normalises by the micro-batch"] if normed else []),
        *([f"samples of a micro-batch are coupled in {describe_modules(others)}"] if others else []),
        *(["the loss mixes the samples of a batch"] if found is not None and found.loss else []),
    ]
    if reasons:
        return " and ".join(reasons), None
    if found is None or found.reason is not None or found.loss is None:
        why = "" if found is None or found.reason is None else f" ({found.reason})"
        return None, (
            f"whether samples are coupled could not be told{why}: trials take it that the micro-batch changes speed and"
            " memory only; `autoaccum verify` tells"
        )
    return None, None
