"""One batch, split in one way: the full batch's update and the accumulated one, with the same random numbers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.coupling_probe import ModuleCalls
from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.accumulation.rng_replay import HostRngReplay, ReplayMismatch, RngRecording, host_rng_states
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
    """Makes the runs of one batch, each from a fresh copy and the same seeds; every update is made once.

    Random numbers are recorded in the accumulated run and replayed in the full one. Where their shapes do not allow
    that, both runs use neutral values, and `mismatch` says why. Python's and NumPy's generators are reset for each
    part; where that makes a difference, parts continue from where the part before ended.

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
        self._user_loops: dict[Ablation, UpdateResult] = {}

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
        """True if random numbers mix samples, None if that is unknown; see the function `rng_mixes_samples`."""
        return rng_mixes_samples(self.fixture, self.batch)

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
        if ablation not in self._user_loops:
            seed_everything()
            with pair.held():
                self._user_loops[ablation] = self._loop(ablation)
        return self._user_loops[ablation]

    def _loop(self, ablation: Ablation) -> UpdateResult:
        return UpdateRun(self.fixture, ablation).user_loop(self.parts, lambda: None)

    def for_user_loop(self) -> PairedRuns:
        """Return runs for the user's loop: with neutral random numbers if any are drawn, as their order is unknown."""
        draws = self._pair(UNCHANGED).draws
        return PairedRuns(self.fixture, self._given, self.sizes, _ANY_ORDER) if draws.sites else self

    @property
    def uses_host_rng(self) -> bool:
        """Whether the full batch may draw other numbers from Python's or NumPy's generators than the parts."""
        return self._pair(UNCHANGED).uses_host_rng

    def part(self, index: int, ablation: Ablation = UNCHANGED) -> UpdateResult:
        """Run one part alone as in a user's loop, and return its loss and gradient, not weighted."""
        seed_everything()
        with self._pair(ablation).held():
            return UpdateRun(self.fixture, ablation).part(self.parts[index])

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
        """Return the parameters after one optimizer step with these gradients."""
        seed_everything()
        return UpdateRun(self.fixture).update(gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """Return the parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.fixture.fresh().model.named_parameters()}

    def _pair(self, ablation: Ablation) -> Pair:
        if ablation not in self._pairs:
            self.fixture.deadline.check()
            if ablation.neutral_rng or self.mismatch:
                made = self._run_neutral(ablation)
            else:
                made, self.mismatch = self._run_replayed(ablation)
            while len(self._pairs) > _KEPT:
                oldest = next(ablation for ablation in self._pairs if ablation != UNCHANGED)
                del self._pairs[oldest]
                self._user_loops.pop(oldest, None)
            self._pairs[ablation] = made
        return self._pairs[ablation]

    def _run_neutral(self, ablation: Ablation) -> Pair:
        """Make both updates with neutral random numbers; host generators continue over parts if only that is equal."""
        made: list[Pair] = []
        for sequential in (False, True):
            draws = RngRecording(self.sizes, host=HostRngReplay(self.fixture.generators, sequential=sequential))
            seed_everything()
            with neutral_rng():
                accumulated = self._accumulate(ablation, draws)
            seed_everything()
            with neutral_rng():
                full, uses_host_rng = self._full(ablation, draws)
            made.append(Pair(full, accumulated, draws, is_neutral=True, uses_host_rng=uses_host_rng))
            if not uses_host_rng or not self._differ(full, accumulated):
                return made[-1]
        return made[0]

    def _accumulate(self, ablation: Ablation, draws: RngRecording) -> UpdateResult:
        run, host = UpdateRun(self.fixture, ablation), draws.host
        return run.accumulated(self.batch, self.parts, host.begin, host.go_on, draws.end_part)

    def _run_replayed(self, ablation: Ablation) -> tuple[Pair, ReplayMismatch | None]:
        """Make both updates with replayed random numbers; with neutral ones, and the reason, where that fails."""
        pair = self._try_replay(ablation)
        if not isinstance(pair, Pair):
            return self._run_neutral(ablation), pair
        if not self._differ(pair.full, pair.accumulated) or not (pair.draws.sites or pair.uses_host_rng):
            return pair, None
        other = self._try_replay(ablation, sequential=True) if pair.uses_host_rng else None
        if isinstance(other, Pair) and not self._differ(other.full, other.accumulated):
            return other, None
        held = self._run_neutral(ablation) if pair.draws.sites else pair
        is_known = math.isfinite(held.full.loss)  # Neutral values may mask all words: a mean over nothing.
        mixes = pair.draws.is_per_sample if self.rng_mixes_samples is None else self.rng_mixes_samples
        if not is_known or self._differ(held.full, held.accumulated) or mixes:
            return pair, None
        sites = ", ".join(pair.draws.sites)
        return held, ReplayMismatch(f"the shapes drawn in {sites} do not show which sample each row belongs to")

    def _try_replay(self, ablation: Ablation, *, sequential: bool = False) -> Pair | ReplayMismatch:
        """Make both updates with replayed random numbers; return the mismatch where they cannot be replayed."""
        host = HostRngReplay(self.fixture.generators, sequential=sequential)
        draws = RngRecording(self.sizes, host=host)
        seed_everything()
        with draws.record():
            run = UpdateRun(self.fixture, ablation)
            accumulated = run.accumulated(
                self.batch, self.parts, draws.begin_part, draws.go_on_with_part, draws.end_part
            )
            for index, part in enumerate(self.parts):
                if index not in draws.calls_by_part:  # It has no weight and did not run; the full batch draws for it.
                    draws.begin_part(index)
                    UpdateRun(self.fixture, replace(ablation, weights=())).part(part)
        ends = set(host.ends.values())
        seed_everything()
        try:
            with draws.replay_whole():
                full, uses_host_rng = self._full(ablation, draws)
        except ReplayMismatch as error:
            return error
        # If generators continue over parts, a shuffle of all samples takes as many numbers as those of the parts.
        is_matched = not sequential and ends == {host.ends[0]} and not self.fixture.keeps_generators
        return Pair(full, accumulated, draws, is_neutral=False, uses_host_rng=uses_host_rng and not is_matched)

    def _full(self, ablation: Ablation, draws: RngRecording) -> tuple[UpdateResult, bool]:
        """Return the full update, and whether Python's or NumPy's generators may have been used."""
        before = pickle.dumps(host_rng_states(()))
        full = UpdateRun(self.fixture, ablation).full(self.batch, draws.end_part)
        may_draw = bool(self.fixture.generators or self.fixture.keeps_generators)
        return full, may_draw or pickle.dumps(host_rng_states(())) != before

    def _differ(self, full: UpdateResult, other: UpdateResult) -> bool:
        """Return whether gradients differ by more than rounding."""
        bound = _GRADIENT_TOLERANCE if self.fixture.precision == "fp64" else _NARROW_GRADIENT_TOLERANCE
        allowed = bound * largest_entry(full.gradients.values())
        known = [(one, other.gradients[name]) for name, one in full.gradients.items() if one is not None]
        return any(two is None or distance(one, two) > allowed for one, two in known)


def rng_mixes_samples(fixture: Fixture, batch: Any) -> bool | None:
    """Return whether some samples' outputs change when other samples swap places, with the same random numbers.

    This distinguishes random numbers that mix samples, such as a shuffled partner, from those in another order. The
    batch is run twice; the second time the samples of its first half are rotated, so all shapes stay. BatchNorm is in
    eval mode. Samples that are mixed after the model's outputs are not noticed.

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
