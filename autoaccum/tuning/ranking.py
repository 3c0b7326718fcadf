"""The ranking of settings by their trials, how far losses differ by randomness, and warnings about the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance

from autoaccum.accumulation.coupling import describe_modules
from autoaccum.planning.plan_record import Plan
from autoaccum.tuning.tune_request import LearningRateRange
from autoaccum.tuning.tuning_result import Row, Setting, SettingResult, WorkloadFacts

_ENDED_BADLY = ("diverged", "out_of_memory", "failed")
_NOISE_DEVIATIONS = 2.0
"""Standard deviations of a difference that count as randomness."""
_NEAR_FACTOR = 2.0
"""A best learning rate within this factor of an end of the range suggests a longer range."""


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
    for setting, of_setting in runs.items():
        searched = [row.number for row in of_setting if row.confirms is None and is_complete(row)]
        if searched:
            result = _summarize(setting, min(searched), of_setting)
            ran_out = any(row.oom_retries for row in of_setting)
            single = len(result.losses) + result.failed == 1
            found.append(((result.failed, ran_out, single, fmean(result.losses), result.trial), result))
    return tuple(result for _, result in sorted(found, key=lambda pair: pair[0]))


def _summarize(setting: Setting, trial: int, rows: Sequence[Row]) -> SettingResult:
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
    """Return the result of the workload's default setting; None if it was not run to the end."""
    defaults = {row.setting for row in rows if row.own and row.confirms is None}
    return next((result for result in rank(rows) if result.setting in defaults), None)


def is_complete(row: Row) -> bool:
    """Return whether a row has a finite loss at the end of its budget."""
    return row.state == "complete" and row.loss is not None and math.isfinite(row.loss)


def find_noise(results: Iterable[SettingResult]) -> float | None:
    """Return the difference up to which two runs may differ by randomness; None if no setting has two complete runs.

    This is two standard deviations of a difference. The variance over seeds is pooled over the repeated settings.
    """
    repeated = [one.losses for one in results if len(one.losses) > 1]
    if not repeated:
        return None
    freedom = sum(len(losses) - 1 for losses in repeated)
    pooled = sum((len(losses) - 1) * variance(losses) for losses in repeated) / freedom
    return _NOISE_DEVIATIONS * math.sqrt(2 * pooled)


def find_range_warning(rate: float, rates: LearningRateRange) -> str | None:
    """Return a warning if the best learning rate lies near an end of the range."""
    warning = "the best learning rate lies near the end of the range: search"
    if rate < rates.low * _NEAR_FACTOR < rates.high:
        return f"{warning} below {rates.low:.3g}, too"
    if rate > rates.high / _NEAR_FACTOR > rates.low:
        return f"{warning} above {rates.high:.3g}, too"
    return None


def describe_coupling(plan: Plan, facts: WorkloadFacts) -> tuple[str | None, str | None]:
    """Return why the micro-batch changes the training, as a clause, and a warning if that could not be determined.

    A BatchNorm counts wherever the model has one that is neither frozen nor exact: the plan's experiment uses the
    initial weights, and does not see one whose own weight is still zero, as at the start of residual blocks. A loss
    does not count where it is computed of the whole effective batch.
    """
    normed = () if facts.batchnorm in ("frozen", "exact") else facts.batchnorms
    found = plan.coupling
    loss = False if facts.coupled or found is None else found.loss
    others = [] if found is None else [name for name in found.modules if name not in facts.batchnorms]
    reasons = [
        *([f"BatchNorm in {describe_modules(normed)} normalises by the micro-batch"] if normed else []),
        *([f"samples of a micro-batch are coupled in {describe_modules(others)}"] if others else []),
        *(["the loss mixes the samples of a batch"] if loss else []),
    ]
    if reasons:
        return " and ".join(reasons), None
    if found is None or found.reason is not None or loss is None:
        why = "" if found is None or found.reason is None else f" ({found.reason})"
        return None, (
            f"batch coupling could not be determined{why}: trials assume that the micro-batch changes only speed and"
            " memory; check with `autoaccum verify`"
        )
    return None, None
