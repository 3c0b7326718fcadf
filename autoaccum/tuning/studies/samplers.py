"""Samplers that draw the same for the same trials before, whether a study was stopped in between or not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from autoaccum.tuning.studies.attributes import LOST, is_superfluous
from autoaccum.tuning.studies.parameters import is_drawn
from autoaccum.tuning.studies.spreading import spread

STARTUP_TRIALS = 8
"""How many trials cover the range evenly before TPE has something to go by."""


def make_sampler(kind: str, seed: int) -> BaseSampler:
    """The sampler of that kind: `tpe` or `random`."""
    if kind == "random":
        return SteadySampler(seed, lambda drawn: RandomSampler(seed=drawn))
    return SpreadSampler(seed, lambda drawn: TPESampler(seed=drawn, n_startup_trials=STARTUP_TRIALS))


def describe_sampler(kind: str, seed: int) -> str:
    """A sampler as a phrase."""
    if kind == "random":
        return f"random, seed {seed}"
    return f"TPE behind {STARTUP_TRIALS} evenly spread trials, seed {seed}"


class SteadySampler(BaseSampler):
    """A sampler made anew for each trial, with a seed of the study's and of how many were drawn before it.

    A sampler's own generator goes on from trial to trial and begins again in every process: a study that was stopped
    would draw what it has drawn already.

    Args:
        seed: The study's.
        make: A sampler with a seed.
    """

    def __init__(self, seed: int, make: Callable[[int], BaseSampler]) -> None:
        self._seed = seed
        self._make = make
        self._inner = make(seed_of(seed, 0))
        self._drawn = 0

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed what comes."""
        self._drawn = _drawn_before(study, trial)
        self._inner = self._make(seed_of(self._seed, self._drawn))
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """As the sampler does; nothing for a trial whose parameters are known."""
        return {} if trial.params else self._inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """As the sampler does."""
        return self._inner.sample_relative(study, trial, search_space) if search_space else {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """As the sampler does."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As the sampler does."""
        self._inner.after_trial(study, trial, state, values)


class SpreadSampler(SteadySampler):
    """A steady sampler that covers the range evenly as long as it has nothing to go by.

    A handful of random rates leaves gaps, in which the best ones may lie.
    """

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The next value of an even sequence: TPE draws what it knows of jointly, and not by this."""
        start = seed_of(self._seed, len(trial.params)) / 2**32
        return spread(param_distribution, self._drawn, len(trial.params), start)


def seed_of(seed: int, drawn: int) -> int:
    """The seed to draw a trial with, of 32 bits.

    >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(1, 0)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {drawn}".encode()).digest()[:4], "big")


def _drawn_before(study: optuna.Study, trial: FrozenTrial) -> int:
    """How many settings were drawn before: a lost trial and the one that takes it up again are the same one."""
    return sum(1 for other in study.get_trials(deepcopy=False) if other.number < trial.number and _is_draw(other))


def _is_draw(trial: FrozenTrial) -> bool:
    if is_superfluous(trial) or "repeats" in trial.user_attrs:
        return False
    return is_drawn(trial) or LOST not in trial.user_attrs
