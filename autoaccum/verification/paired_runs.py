"""One batch, cut in one way: the full batch's update beside the accumulated one, under the same random draws."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.module_calls import ModuleCalls
from autoaccum.accumulation.random_ops import RandomCallMode, neutral_rng
from autoaccum.accumulation.rng_replay import HostRngReplay, ReplayMismatch, RngRecording, host_rng_states
from autoaccum.accumulation.rng_state import RngState
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError, NotMeasuredError
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.update_comparison import distance, largest_entry
from autoaccum.verification.update_run import UNCHANGED, Change, Outcome, Run
from autoaccum.workload.batches import batch_size, join_batches, split_batch
from autoaccum.workload.objective import Objective

_ANY_ORDER = ReplayMismatch("a loop may draw in any order")
_KEPT = 3
"""Pairs of updates beside the unchanged one: each holds gradients and parameters twice."""

_APART, _APART_NARROW = 1e-8, 2e-2
"""Of gradients, relative to the largest entry; in float64, and in other precisions."""

_OUTPUTS_APART = {torch.float64: 1e-10, torch.float32: 1e-4}
_OUTPUTS_APART_HALF = 5e-2


@dataclass(frozen=True)
class Pair:
    """Both updates under one change.

    Attributes:
        full: By the whole batch.
        accumulated: By the Accumulator.
        draws: What both share; of calm ones only what Python's and NumPy's generators do.
        is_calm: Random operations do nothing.
        uses_host: The full one may have drawn otherwise from Python's or NumPy's generators than parts did.
    """

    full: Outcome
    accumulated: Outcome
    draws: RngRecording
    is_calm: bool
    uses_host: bool

    def joined(self) -> AbstractContextManager[Any]:
        """Around another full run."""
        return neutral_rng() if self.is_calm else self.draws.replay_whole()


class Runs:
    """Makes runs of one batch; each begins with a fresh copy and the same seeds, and updates are made once.

    Random draws are recorded in the accumulated run and joined for the full one. Where their shapes forbid that, both
    runs are made with draws that do nothing, and `mismatch` says why. Python's and NumPy's generators are rewound for
    each part; where that makes a difference, parts go on where the one before has ended.

    Attributes:
        batch: The whole batch as runs are given it.
        sizes: The parts, in samples.
        parts: The batch as it is cut.
        mismatch: Why draws could not be joined; None where they could.

    Args:
        held: Why draws do nothing from the start; None where they are joined.
    """

    def __init__(self, fixture: Fixture, batch: Any, sizes: Sequence[int], held: ReplayMismatch | None = None) -> None:
        self.fixture, self.sizes = fixture, tuple(sizes)
        self._given = batch
        self.batch = fixture.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self.batch, self.sizes)
        self.mismatch = self._held = held
        self._pairs: dict[Change, Pair] = {}
        self._owns: dict[Change, Outcome] = {}

    @property
    def objective(self) -> Objective:
        """The workload's own."""
        return self.fixture.workload.objective

    @property
    def draw_sites(self) -> tuple[str, ...]:
        """Where random numbers are drawn, and were joined for the full batch."""
        pair = self._pair(UNCHANGED)
        return () if pair.is_calm else pair.draws.sites

    @cached_property
    def rng_mixes_samples(self) -> bool | None:
        """Whether random draws mix samples, as far as that can be told; see `rng_mixes_samples`."""
        return rng_mixes_samples(self.fixture, self.batch)

    def full(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the whole batch."""
        return self._pair(change).full

    def full_again(self, change: Change = UNCHANGED) -> Outcome:
        """The same once more, to see whether it is the same.

        Raises:
            NotMeasuredError: It does not even draw the same.
        """
        pair = self._pair(change)
        seed_everything()
        try:
            with pair.joined():
                return Run(self.fixture, change).full(self.batch, pair.draws.end_part)
        except ReplayMismatch as error:
            raise _not_matched("the full batch", error) from error

    def accumulated(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the Accumulator."""
        return self._pair(change).accumulated

    def own(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the workload's own `accumulate`; see `for_own`."""
        pair = self._pair(change)
        if change not in self._owns:
            seed_everything()
            with neutral_rng() if pair.is_calm else nullcontext():
                run, draws = Run(self.fixture, change), pair.draws
                self._owns[change] = run.own(self.parts, draws.host.begin, draws.end_part)
        return self._owns[change]

    def for_own(self) -> Runs:
        """These; runs in which all draws do nothing where it draws, since a loop may do so in any order."""
        sites = list(self._pair(UNCHANGED).draws.sites)
        with RandomCallMode(lambda call: sites.append(str(call.site))):
            self.own()
        return Runs(self.fixture, self._given, self.sizes, _ANY_ORDER) if sites else self

    def depends_on_host(self) -> bool:
        """Whether parts may draw otherwise from Python's or NumPy's generators, and that changes the full gradient.

        They draw where no one sees it, so that what they draw cannot be given to another run.
        """
        pair, generators = self._pair(UNCHANGED), self.fixture.generators
        if not pair.uses_host:
            return False
        seed_everything()
        before = RngState(generators=generators)
        with pair.joined():
            drawing: Any
            for drawing in (random, np.random, *generators):
                drawing.random()
            try:
                other = Run(self.fixture).full(self.batch, pair.draws.end_part)
            finally:
                before.restore()
        return self._differ(pair.full, other)

    def part(self, index: int, change: Change = UNCHANGED) -> Outcome:
        """The loss and the gradient of one part alone, under its draws, multiplied by no share; run anew each time."""
        pair = self._pair(change)
        seed_everything()
        try:
            with neutral_rng() if pair.is_calm else pair.draws.replay_part(index):
                run = Run(self.fixture, change)
                return run.part(self.parts[index], lambda own: pair.draws.host.begin(index, own))
        except ReplayMismatch as error:
            raise _not_matched("a part by itself", error) from error

    def with_sizes(self, sizes: Sequence[int]) -> Runs:
        """The same batch cut otherwise."""
        return Runs(self.fixture, self._given, sizes, self._held)

    def with_fixture(self, fixture: Fixture) -> Runs:
        """The same batch, cut alike, of another fixture, such as one in float64."""
        return Runs(fixture, self._given, self.sizes, self._held)

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
        """The parameters after one step of the optimizer with these gradients."""
        seed_everything()
        return Run(self.fixture).update(gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """The parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.fixture.fresh().model.named_parameters()}

    def _pair(self, change: Change) -> Pair:
        if change not in self._pairs:
            if change.calm or self.mismatch:
                made = self._calm(change)
            else:
                made, self.mismatch = self._joined(change)
            while len(self._pairs) > _KEPT:
                oldest = next(change for change in self._pairs if change != UNCHANGED)
                del self._pairs[oldest]
                self._owns.pop(oldest, None)
            self._pairs[change] = made
        return self._pairs[change]

    def _calm(self, change: Change) -> Pair:
        """Both updates with random operations that do nothing; parts begin alike, or go on where only that is equal."""
        made: list[Pair] = []
        for onward in (False, True):
            draws = RngRecording(self.sizes, host=HostRngReplay(self.fixture.generators, sequential=onward))
            seed_everything()
            with neutral_rng():
                run = Run(self.fixture, change)
                accumulated = run.accumulated(self.batch, self.parts, draws.host.begin, draws.end_part)
            seed_everything()
            with neutral_rng():
                full, uses_host = self._full(change, draws)
            made.append(Pair(full, accumulated, draws, is_calm=True, uses_host=uses_host))
            if not uses_host or not self._differ(full, accumulated):
                return made[-1]
        return made[0]

    def _joined(self, change: Change) -> tuple[Pair, ReplayMismatch | None]:
        """Both updates under joined draws; under calm ones where those cannot be joined, and why."""
        pair = self._try(change)
        if not isinstance(pair, Pair):
            return self._calm(change), pair
        if not self._differ(pair.full, pair.accumulated) or not (pair.draws.sites or pair.uses_host):
            return pair, None
        other = self._try(change, onward=True) if pair.uses_host else None
        if isinstance(other, Pair) and not self._differ(other.full, other.accumulated):
            return other, None
        held = self._calm(change) if pair.draws.sites else pair
        is_told = math.isfinite(held.full.loss)  # Where draws that do nothing hide all words, a mean is over none.
        mixes = pair.draws.is_per_sample if self.rng_mixes_samples is None else self.rng_mixes_samples
        if not is_told or self._differ(held.full, held.accumulated) or mixes:
            return pair, None
        sites = ", ".join(pair.draws.sites)
        return held, ReplayMismatch(f"{sites} draws rows of which shapes do not tell whose they are")

    def _try(self, change: Change, *, onward: bool = False) -> Pair | ReplayMismatch:
        """Both updates under joined draws."""
        host = HostRngReplay(self.fixture.generators, sequential=onward)
        draws = RngRecording(self.sizes, host=host)
        seed_everything()
        with draws.record():
            accumulated = self._recorded(draws, change)
        ends = set(host.ends)
        seed_everything()
        try:
            with draws.replay_whole():
                full, uses_host = self._full(change, draws)
        except ReplayMismatch as error:
            return error
        # Onward, an order of all samples takes as many numbers as those of the parts.
        is_matched = not onward and ends == {host.ends[-1]} and not self.fixture.keeps_generators
        return Pair(full, accumulated, draws, is_calm=False, uses_host=uses_host and not is_matched)

    def _recorded(self, draws: RngRecording, change: Change) -> Outcome:
        run = Run(self.fixture, change)
        outcome = run.accumulated(self.batch, self.parts, draws.begin_part, draws.end_part)
        for index, part in enumerate(self.parts):
            if index not in draws.calls_by_part:  # It has no weight and did not run; the full batch draws for it too.
                unweighed = Run(self.fixture, replace(change, weights=None, summed=False))
                unweighed.part(part, partial(draws.begin_part, index))
        return outcome

    def _full(self, change: Change, draws: RngRecording) -> tuple[Outcome, bool]:
        """The full update, and whether Python's or NumPy's generators may have been drawn from."""
        before = pickle.dumps(host_rng_states(()))
        full = Run(self.fixture, change).full(self.batch, draws.end_part)
        may_draw = bool(self.fixture.generators or self.fixture.keeps_generators)
        return full, may_draw or pickle.dumps(host_rng_states(())) != before

    def _differ(self, full: Outcome, other: Outcome) -> bool:
        """Whether gradients are further apart than rounding in any sum brings them."""
        bound = _APART if self.fixture.precision == "fp64" else _APART_NARROW
        allowed = bound * largest_entry(full.gradients.values())
        known = [(one, other.gradients[name]) for name, one in full.gradients.items() if one is not None]
        return any(two is None or distance(one, two) > allowed for one, two in known)


def _not_matched(what: str, error: ReplayMismatch) -> NotMeasuredError:
    return NotMeasuredError(f"{what} draws otherwise than when it was recorded ({error})")


def rng_mixes_samples(fixture: Fixture, batch: Any) -> bool | None:
    """Whether outputs of some samples change where others change places, under the very same draws.

    Draws that mix samples, as a shuffled partner does, are told so from those that lie in another order. Two forwards
    of the whole batch: in the second, the samples of its first half have exchanged places, so that all shapes and
    lengths are there as before. BatchNorm is at rest. What is mixed behind the model's outputs is not seen.

    Returns:
        None where no output has a dimension of samples, there are fewer than four, or the user's code raises.
    """
    samples = batch_size(batch)
    half = samples // 2
    if half < 2:
        return None
    first, others, rest = split_batch(batch, [1, half - 1, samples - half])
    try:
        still, moved = (_outputs(fixture, one) for one in (batch, join_batches([others, first, rest])))
    except AutoaccumError:
        return None
    rows = [
        [one.narrow(list(one.shape).index(samples), half, samples - half) for one in pair]
        for pair in zip(still, moved, strict=False)
        if pair[0].shape == pair[1].shape and samples in pair[0].shape
    ]
    return any(_outputs_differ(one, other) for one, other in rows) if rows else None


def _outputs(fixture: Fixture, batch: Any) -> list[Tensor]:
    """What the loss is given by the calls it makes, in order."""
    run, calls = Run(fixture), ModuleCalls()
    model = run.trained.model
    for norm in find_batchnorms(model, run.trained.objective.criterion_module):
        norm.training = False
    seed_everything()
    with run.running("the loss"), torch.no_grad(), calls.attach({"": model}):
        run.terms(copy.deepcopy(batch))
    return calls.top_outputs


def _outputs_differ(one: Tensor, other: Tensor) -> bool:
    scale = max(largest_entry([one]), 1e-30)
    return not distance(one, other) <= _OUTPUTS_APART.get(one.dtype, _OUTPUTS_APART_HALF) * scale
