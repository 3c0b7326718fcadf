"""Settings as parameters of Optuna's, and back."""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, Trial

from autoaccum.tuning.settings import Setting, Space
from autoaccum.tuning.studies.attributes import value_of

RATE, TARGET, MICRO = "learning_rate", "target_batch", "micro_batch"


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """What is searched, by name: nothing of which there is only one."""
    rates, targets = space.learning_rates, space.target_batches
    found: dict[str, BaseDistribution] = {RATE: FloatDistribution(rates.low, rates.high, log=True)}
    if not targets.single:
        found[TARGET] = CategoricalDistribution(targets.sizes)
    if space.coupled is not None:
        found[MICRO] = CategoricalDistribution(space.micro_batches)
    return found


def parameters_of(setting: Setting, space: Space) -> dict[str, Any]:
    """A setting's values of what is searched."""
    values = {RATE: setting.learning_rate, TARGET: setting.target_batch, MICRO: setting.micro_batch}
    return {name: values[name] for name in distributions_of(space)}


def own_setting(space: Space) -> Setting:
    """The workload's own learning rate, at the smallest batch and the micro-batch that uncoupled trials run with."""
    return Setting(learning_rate=space.own_rate, target_batch=space.target_batches.low, micro_batch=_offered(space))


def draw_setting(trial: Trial, space: Space) -> Setting:
    """The setting of a trial; what it does not have yet is drawn."""
    rates, targets = space.learning_rates, space.target_batches
    rate = trial.suggest_float(RATE, rates.low, rates.high, log=True)
    target = targets.low if targets.single else trial.suggest_categorical(TARGET, targets.sizes)
    micro = _offered(space)
    if space.coupled is not None:
        micro = trial.suggest_categorical(MICRO, space.micro_batches)
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)


def setting_of(trial: FrozenTrial) -> Setting | None:
    """What a trial trains with; None while that is not drawn."""
    rate = trial.params.get(RATE)
    target, micro = value_of(trial, TARGET, int), value_of(trial, MICRO, int)
    if not isinstance(rate, float) or target is None or micro is None:
        return None
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)


def _offered(space: Space) -> int:
    """The micro-batch of uncoupled trials, or the next smaller one that is among those searched."""
    if space.coupled is None or space.micro_batch in space.micro_batches:
        return space.micro_batch
    return max([size for size in space.micro_batches if size <= space.micro_batch] or space.micro_batches[:1])
