"""Settings as parameters of Optuna's, and back."""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, Trial

from autoaccum.tuning.settings import Setting, Space
from autoaccum.tuning.studies.attributes import TICKET, value_of

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


def own_parameters(space: Space) -> dict[str, Any]:
    """Of what is searched: the workload's own learning rate, the smallest batch, and a micro-batch that it holds."""
    low = space.target_batches.low
    values = {RATE: space.own_rate, TARGET: low, MICRO: _offered(space, min(space.micro_batch, low))}
    return {name: values[name] for name in distributions_of(space)}


def draw_setting(trial: Trial, space: Space) -> Setting:
    """The setting of a trial; what it does not have yet is drawn."""
    rates, targets = space.learning_rates, space.target_batches
    rate = trial.suggest_float(RATE, rates.low, rates.high, log=True)
    target = targets.low if targets.single else trial.suggest_categorical(TARGET, targets.sizes)
    micro = space.micro_batch
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


def is_drawn(trial: FrozenTrial) -> bool:
    """Whether all of its parameters are known: it was queued with them, or its setting was noted after they were drawn.

    What died between two of them begins anew, so that they are drawn as they would have been.
    """
    return bool(trial.params) and (TICKET in trial.user_attrs or setting_of(trial) is not None)


def _offered(space: Space, most: int) -> int:
    """The largest micro-batch of those searched that is at most `most`; the smallest where none is."""
    return max([size for size in space.micro_batches if size <= most] or space.micro_batches[:1])
