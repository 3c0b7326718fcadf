"""One batch, split in one way: the full batch's update and the accumulated one, with the same random numbers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.coupling_probe import ModuleCalls
from autoaccum.accumulation.random_draws import (
    RandomCallMode,
    ReplayMismatch,
    RngRecording,
    host_rng_states,
    neutral_rng,
)
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.messages import Message, message
from autoaccum.sources.batches import batch_size, join_batches, split_batch
from autoaccum.sources.objective import Objective
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.rank_team import RankTeam
from autoaccum.verification.update_comparison import compare, distance, largest_entry
from autoaccum.verification.update_run import UNCHANGED, Ablation, AccumulatedUpdate, UpdateResult, UpdateRun
from autoaccum.verification.verification_result import Difference, Method

_MAX_PAIRS = 4
"""Pairs that are kept: each holds gradients and parameters twice."""


@dataclass(frozen=True)
class Pair:
    """Both updates under one ablation.

    Attributes:
        full: The update by the whole batch.
        accumulated: The update by the Accumulator, or by the user's loop.
        differences: How the second differs from the first.
        draws: The random numbers of both; with neutral ones only those of Python's and NumPy's generators.
        sites: The lines and modules that drew random numbers in the full batch's update.
        is_neutral: Random operations returned neutral values.
        uses_host_rng: The full batch may have drawn other numbers from Python's or NumPy's generators than the parts.
    """

    full: UpdateResult
    accumulated: UpdateResult
    differences: tuple[Difference, ...]
    draws: RngRecording
    sites: tuple[str, ...]
    is_neutral: bool
    uses_host_rng: bool

    @property
    def equal(self) -> bool:
        """Whether both updates are equal."""
        return all(difference.equal for difference in self.differences)

    @property
    def gradients_equal(self) -> bool:
        """Whether their gradients are."""
        return all(difference.equal for difference in self.differences if difference.quantity == "gradients")


class PairedRuns:
    """Makes the runs of one batch, each from a fresh copy and the same seeds.

    Random numbers are recorded in the Accumulator's run and replayed in the full one. Where their shapes do not allow
    that, both runs use neutral values, and `mismatch` says why; so they do for a loop, which may draw in any order, and
    over ranks, which each draw their own. Python's and NumPy's generators are reset for each part; where only that
    makes both equal, parts continue from where the part before ended.

    Args:
        fixture: What is trained.
        batch: The whole batch.
        sizes: The parts, in samples.
        method: What accumulates: the Accumulator, or the workload's own loop.
        team: The ranks that share the parts; None: this process runs all.
        micro_tokens: The token budget of the parts, which are then trimmed; None: samples are counted.

    Attributes:
        batch: The whole batch as it is passed to runs.
        parts: The parts of the batch.
        mismatch: Why random numbers could not be replayed; None where they could, or none are drawn.
    """

    def __init__(
        self,
        fixture: Fixture,
        batch: Any,
        sizes: Sequence[int],
        *,
        method: Method = "accumulator",
        team: RankTeam | None = None,
        micro_tokens: int | None = None,
    ) -> None:
        self.micro_tokens = micro_tokens
        self.fixture, self.sizes, self.method, self._team = fixture, tuple(sizes), method, team
        self.batch = fixture.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self.batch, self.sizes)
        self.mismatch: Message | None = None
        self._pairs: dict[Ablation, Pair] = {}

    def by_loop(self) -> PairedRuns:
        """Return the runs of the same parts by the workload's own loop."""
        return PairedRuns(self.fixture, self.batch, self.sizes, method="accumulate", team=self._team)

    def with_padding(self) -> PairedRuns:
        """Return the runs of the same parts, which keep the padding of the whole batch."""
        return PairedRuns(self.fixture, self.batch, self.sizes, team=self._team)

    @property
    def world_size(self) -> int:
        """How many ranks share the parts, in their order and as evenly as possible."""
        return 1 if self._team is None else self._team.size

    @property
    def objective(self) -> Objective:
        """The workload's objective."""
        return self.fixture.workload.objective

    @property
    def replayed_sites(self) -> tuple[str, ...]:
        """The lines and modules that drew random numbers which were replayed for the full batch."""
        pair = self.pair()
        return () if pair.is_neutral else pair.sites

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
            still, moved = (self._outputs(batch) for batch in (self.batch, join_batches([others, first, rest])))
        except AutoaccumError:
            return None
        rows = [
            [output.narrow(list(output.shape).index(samples), half, samples - half) for output in outputs]
            for outputs in zip(still, moved, strict=False)
            if outputs[0].shape == outputs[1].shape and samples in outputs[0].shape
        ]
        tolerance = self.fixture.tolerance
        return any(not distance(a, b) <= tolerance * largest_entry([a]) for a, b in rows) if rows else None

    def pair(self, ablation: Ablation = UNCHANGED) -> Pair:
        """Return both updates under an ablation.

        Raises:
            TimeIsOver: The deadline of the fixture has passed.
            WorkloadError: The user's code raised.
        """
        if ablation not in self._pairs:
            self.fixture.deadline.check()
            pair = self._make_pair(ablation)
            if len(self._pairs) == _MAX_PAIRS:
                del self._pairs[next(earlier for earlier in self._pairs if earlier != UNCHANGED)]
            self._pairs[ablation] = pair
        return self._pairs[ablation]

    def is_repeatable(self) -> bool:
        """Return whether the full batch gives the same update when it runs once more."""
        pair = self.pair()
        seed_everything()
        try:
            with neutral_rng() if pair.is_neutral else pair.draws.replay_whole():
                again = UpdateRun(self.fixture).full(self.batch, pair.draws)
        except ReplayMismatch:
            return False
        return all(difference.equal for difference in compare(pair.full, again, self.fixture.tolerance))

    def part(self, index: int, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Run one part alone as in a user's loop, and return its loss and gradient, not weighted."""
        seed_everything()
        with neutral_rng():
            return UpdateRun(self.fixture, ablation).part(self.parts[index])

    def _make_pair(self, ablation: Ablation) -> Pair:
        """Make both updates with replayed random numbers; with neutral ones where that fails, which `mismatch` says."""
        if self._team is not None or self.method == "accumulate":
            pair = self._run(ablation, neutral=True)
            if pair.sites:
                self.mismatch = message("draws_of_loop" if self._team is None else "draws_of_ranks")
            return pair
        if ablation.neutral_rng or self.mismatch is not None:
            return self._run(ablation, neutral=True)
        try:
            pair = self._run(ablation, neutral=False)
        except ReplayMismatch as error:
            self.mismatch = message("draws_not_replayed", error=str(error))
            return self._run(ablation, neutral=True)
        if not pair.sites or pair.gradients_equal:
            return pair
        neutral = self._run(ablation, neutral=True)
        is_known = math.isfinite(neutral.full.loss)  # Neutral values may mask all words: a mean over nothing.
        mixes = pair.draws.is_per_sample if self.rng_mixes_samples is None else self.rng_mixes_samples
        if not is_known or mixes or not neutral.gradients_equal:
            return pair
        self.mismatch = message("draws_unmatched", sites=list(pair.sites))
        return neutral

    def _run(self, ablation: Ablation, *, neutral: bool) -> Pair:
        """Make both updates; host generators continue over parts if only that makes them equal.

        Raises:
            ReplayMismatch: Random numbers cannot be replayed in the full batch.
        """
        pair = self._run_once(ablation, neutral, sequential=False)
        if pair.uses_host_rng and not pair.gradients_equal:
            with suppress(ReplayMismatch):
                other = self._run_once(ablation, neutral, sequential=True)
                return other if other.gradients_equal else pair
        return pair

    def _run_once(self, ablation: Ablation, neutral: bool, *, sequential: bool) -> Pair:
        fixture = self.fixture
        draws = RngRecording(self.sizes, fixture.generators, sequential=sequential)
        update = AccumulatedUpdate(fixture, ablation, self.method, self.batch, self.sizes, self.micro_tokens)
        sites: dict[str, None] = {}
        seed_everything()
        with neutral_rng() if neutral else draws.record():
            accumulated = update.make(draws) if self._team is None else self._team.run(update)
            for index in () if neutral else sorted(set(range(len(self.parts))) - draws.calls_by_part.keys()):
                draws.begin_part(index)  # It has no weight and did not run; the full batch draws for it.
                UpdateRun(fixture, replace(ablation, weights=())).part(self.parts[index])
        ends = set(draws.ends.values())
        seed_everything()
        noted = RandomCallMode(lambda call: sites.setdefault(call.site))
        with neutral_rng() if neutral else draws.replay_whole(), noted:
            before = pickle.dumps(host_rng_states(()))
            full = UpdateRun(fixture, ablation).full(self.batch, draws)
            keeps = fixture.keeps_generators
            uses = bool(fixture.generators) or keeps or pickle.dumps(host_rng_states(())) != before
        # If generators continue over parts, a shuffle of all samples takes as many numbers as those of the parts.
        is_matched = not neutral and not sequential and ends == {draws.ends[0]} and not keeps
        differences = compare(full, accumulated, fixture.tolerance)
        return Pair(full, accumulated, differences, draws, tuple(sites), neutral, uses_host_rng=uses and not is_matched)

    def _outputs(self, batch: Any) -> list[Tensor]:
        """Return the outputs of the model calls that the loss makes, in order."""
        run, calls = UpdateRun(self.fixture, Ablation(batchnorm="frozen")), ModuleCalls()
        seed_everything()
        with run.running("the loss"), torch.no_grad(), calls.attach({"": run.model}):
            run.terms(copy.deepcopy(batch))
        return calls.top_outputs
