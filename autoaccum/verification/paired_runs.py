"""One batch, split in one way: the full batch's update and the accumulated one, with the same random numbers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.coupling_probe import ModuleCalls
from autoaccum.accumulation.random_draws import ReplayMismatch, RngRecording, host_rng_states, neutral_rng
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.sources.batches import batch_size, join_batches, split_batch
from autoaccum.sources.objective import Objective
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.update_comparison import distance, largest_entry
from autoaccum.verification.update_run import UNCHANGED, Ablation, UpdateResult, UpdateRun

_ANY_ORDER = ReplayMismatch("a loop may draw in any order")
_KEPT = 3
"""Pairs kept besides the unchanged one: each holds gradients and parameters twice."""

_GRADIENT_TOLERANCE, _NARROW_GRADIENT_TOLERANCE = 1e-8, 2e-2
"""Differences of gradients due to rounding, relative to the largest entry: in float64, and in other precisions."""

_OUTPUT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_OUTPUT_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Pair:
    """Both updates under one ablation.

    Attributes:
        full: The update by the whole batch.
        accumulated: The update by the Accumulator.
        draws: The random numbers of both; with neutral ones only those of Python's and NumPy's generators.
        is_neutral: Random operations returned neutral values.
        uses_host_rng: The full batch may have drawn other numbers from Python's or NumPy's generators than the parts.
    """

    full: UpdateResult
    accumulated: UpdateResult
    draws: RngRecording
    is_neutral: bool
    uses_host_rng: bool

    def held(self) -> AbstractContextManager[Any]:
        """Return neutral random numbers where both updates had them."""
        return neutral_rng() if self.is_neutral else nullcontext()


class PairedRuns:
    """Makes the runs of one batch, each from a fresh copy and the same seeds.

    Random numbers are recorded in the accumulated run and replayed in the full one. Where their shapes do not allow
    that, both runs use neutral values, and `mismatch` says why. Python's and NumPy's generators are reset for each
    part; where only that makes both equal, parts continue from where the part before ended.

    Attributes:
        batch: The whole batch as it is passed to runs.
        sizes: The parts, in samples.
        parts: The parts of the batch.
        mismatch: Why random numbers could not be replayed; None where they could.

    Args:
        held: Why random numbers are neutral from the start; None where they are replayed.
    """

    def __init__(self, fixture: Fixture, batch: Any, sizes: Sequence[int], held: ReplayMismatch | None = None) -> None:
        self.fixture, self.sizes = fixture, tuple(sizes)
        self._given = batch
        self.batch = fixture.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self.batch, self.sizes)
        self.mismatch = held
        self._pairs: dict[Ablation, Pair] = {}

    @property
    def parts_by_rank(self) -> tuple[int, ...]:
        """How many of the parts, in their order, each rank runs; one rank runs all."""
        return (len(self.sizes),)

    @property
    def objective(self) -> Objective:
        """The workload's objective."""
        return self.fixture.workload.objective

    @property
    def rng_sites(self) -> tuple[str, ...]:
        """The lines and modules that drew random numbers which were replayed for the full batch."""
        pair = self._pair(UNCHANGED)
        return () if pair.is_neutral else pair.draws.sites

    @cached_property
    def rng_mixes_samples(self) -> bool | None:
        """Whether some samples' outputs change when other samples swap places, with the same random numbers.

        This distinguishes random numbers that mix samples, such as a shuffled partner, from those in another order. The
        batch is run twice; the second time the samples of its first half are rotated, so all shapes stay. BatchNorm is
        in eval mode. Samples that are mixed after the model's outputs are not noticed.

        Returns:
            None where no output has a dimension of samples, there are fewer than four, or the user's code raises.
        """
        samples = batch_size(self.batch)
        half = samples // 2
        if half < 2:
            return None
        first, others, rest = split_batch(self.batch, [1, half - 1, samples - half])
        try:
            still, moved = (_outputs(self.fixture, one) for one in (self.batch, join_batches([others, first, rest])))
        except AutoaccumError:
            return None
        rows = [
            [one.narrow(list(one.shape).index(samples), half, samples - half) for one in pair]
            for pair in zip(still, moved, strict=False)
            if pair[0].shape == pair[1].shape and samples in pair[0].shape
        ]
        return any(_outputs_differ(one, other) for one, other in rows) if rows else None

    @property
    def uses_host_rng(self) -> bool:
        """Whether the full batch may draw other numbers from Python's or NumPy's generators than the parts."""
        return self._pair(UNCHANGED).uses_host_rng

    def full(self, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Return the update by the whole batch."""
        return self._pair(ablation).full

    def full_again(self) -> UpdateResult | None:
        """Return the update by the whole batch, run once more; None if it draws other random numbers."""
        pair = self._pair(UNCHANGED)
        seed_everything()
        try:
            with pair.held() if pair.is_neutral else pair.draws.replay_whole():
                return UpdateRun(self.fixture).full(self.batch, pair.draws.end_part)
        except ReplayMismatch:
            return None

    def accumulated(self, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Return the update by the Accumulator."""
        return self._pair(ablation).accumulated

    def user_loop(self, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Return the update by the workload's own `accumulate`; see `for_user_loop`."""
        pair = self._pair(ablation)
        seed_everything()
        with pair.held():
            return self._loop(ablation)

    def for_user_loop(self) -> PairedRuns:
        """Return runs for the user's loop: with neutral random numbers if any are drawn, as their order is unknown."""
        draws = self._pair(UNCHANGED).draws
        return PairedRuns(self.fixture, self._given, self.sizes, _ANY_ORDER) if draws.sites else self

    def part(self, index: int, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Run one part alone as in a user's loop, and return its loss and gradient, not weighted."""
        pair = self._pair(ablation)
        seed_everything()
        with pair.held():
            return UpdateRun(self.fixture, ablation).part(self.parts[index])

    def _pair(self, ablation: Ablation) -> Pair:
        if ablation not in self._pairs:
            self.fixture.deadline.check()
            is_neutral = ablation.neutral_rng or self.mismatch is not None
            made = self._run(ablation, neutral=True) if is_neutral else self._replayed(ablation)
            if len(self._pairs) > _KEPT:
                del self._pairs[next(known for known in self._pairs if known != UNCHANGED)]
            self._pairs[ablation] = made
        return self._pairs[ablation]

    def _replayed(self, ablation: Ablation) -> Pair:
        """Make both updates with replayed random numbers; with neutral ones where that fails, which `mismatch` says."""
        try:
            pair = self._run(ablation, neutral=False)
        except ReplayMismatch as error:
            self.mismatch = error
            return self._run(ablation, neutral=True)
        if not pair.draws.sites or not self._differs(pair):
            return pair
        held = self._run(ablation, neutral=True)
        is_known = math.isfinite(held.full.loss)  # Neutral values may mask all words: a mean over nothing.
        mixes = pair.draws.is_per_sample if self.rng_mixes_samples is None else self.rng_mixes_samples
        if not is_known or mixes or self._differs(held):
            return pair
        sites = ", ".join(pair.draws.sites)
        self.mismatch = ReplayMismatch(f"the shapes drawn in {sites} do not show which sample each row belongs to")
        return held

    def _run(self, ablation: Ablation, *, neutral: bool) -> Pair:
        """Make both updates; host generators continue over parts if only that makes them equal.

        Raises:
            ReplayMismatch: Random numbers cannot be replayed in the full batch.
        """
        pair = self._run_once(ablation, neutral, sequential=False)
        if pair.uses_host_rng and self._differs(pair):
            with suppress(ReplayMismatch):
                other = self._run_once(ablation, neutral, sequential=True)
                return pair if self._differs(other) else other
        return pair

    def _run_once(self, ablation: Ablation, neutral: bool, *, sequential: bool) -> Pair:
        draws = RngRecording(self.sizes, self.fixture.generators, sequential=sequential)
        seed_everything()
        with neutral_rng() if neutral else draws.record():
            accumulated = self._accumulate(ablation, draws)
            for index in () if neutral else sorted(set(range(len(self.parts))) - draws.calls_by_part.keys()):
                draws.begin_part(index)  # It has no weight and did not run; the full batch draws for it.
                UpdateRun(self.fixture, replace(ablation, weights=())).part(self.parts[index])
        ends = set(draws.ends.values())
        seed_everything()
        with neutral_rng() if neutral else draws.replay_whole():
            before = pickle.dumps(host_rng_states(()))
            full = UpdateRun(self.fixture, ablation).full(self.batch, draws.end_part)
            keeps = self.fixture.keeps_generators
            uses = bool(self.fixture.generators) or keeps or pickle.dumps(host_rng_states(())) != before
        # If generators continue over parts, a shuffle of all samples takes as many numbers as those of the parts.
        is_matched = not neutral and not sequential and ends == {draws.ends[0]} and not keeps
        return Pair(full, accumulated, draws, neutral, uses_host_rng=uses and not is_matched)

    def _accumulate(self, ablation: Ablation, draws: RngRecording) -> UpdateResult:
        run = UpdateRun(self.fixture, ablation)
        return run.accumulated(self.batch, self.parts, draws.begin_part, draws.go_on_with_part, draws.end_part)

    def _loop(self, ablation: Ablation) -> UpdateResult:
        return UpdateRun(self.fixture, ablation).user_loop(self.parts)

    def _differs(self, pair: Pair) -> bool:
        """Return whether the gradients of a pair differ by more than rounding."""
        bound = _GRADIENT_TOLERANCE if self.fixture.precision == "fp64" else _NARROW_GRADIENT_TOLERANCE
        full, other = pair.full.gradients, pair.accumulated.gradients
        allowed = bound * largest_entry(full.values())
        return any(name not in other or distance(one, other[name]) > allowed for name, one in full.items())


def _outputs(fixture: Fixture, batch: Any) -> list[Tensor]:
    """Return the outputs of the model calls that the loss makes, in order."""
    run, calls = UpdateRun(fixture), ModuleCalls()
    model = run.trained.model
    for norm in find_batchnorms(model, run.trained.objective.criterion_module):
        norm.training = False
    seed_everything()
    with run.running("the loss"), torch.no_grad(), calls.attach({"": model}):
        run.terms(copy.deepcopy(batch))
    return calls.top_outputs


def _outputs_differ(one: Tensor, other: Tensor) -> bool:
    scale = max(largest_entry([one]), 1e-30)
    return not distance(one, other) <= _OUTPUT_TOLERANCE.get(one.dtype, _HALF_OUTPUT_TOLERANCE) * scale
