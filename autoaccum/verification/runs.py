"""One batch, cut in one way: the full batch's update beside the accumulated one, under the same random draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import autocast
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.company.module_calls import Recorder, following
from autoaccum.accumulation.draws.draws import Draws
from autoaccum.accumulation.draws.host_draws import HostDraws
from autoaccum.accumulation.draws.joins import DrawMismatch
from autoaccum.accumulation.shares import has_weight
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import AutoaccumError, NotMeasuredError
from autoaccum.verification.comparing import distance, largest_entry
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.host_generators import calmed, host_state, seeded_otherwise, whose
from autoaccum.verification.updates import (
    UNCHANGED,
    Change,
    Outcome,
    Run,
    run_accumulated,
    run_full,
    run_own,
    run_part,
    run_update,
    users_code,
)
from autoaccum.workload.batches import batch_size, join_batches, split_batch
from autoaccum.workload.weights import Objective

_KEPT = 3
"""Pairs of updates beside the unchanged one: each holds gradients and parameters twice."""


class Runs:
    """Runs experiments on one batch; every run begins with a fresh copy and the same seeds, and updates are made once.

    Random draws are recorded in the accumulated run and joined for the full one. Where their shapes forbid that, both
    runs are made with draws that do nothing, and `mismatch` says why. Python's and NumPy's generators are rewound for
    each part; where that makes a difference, parts go on where the one before has ended.

    Attributes:
        sizes: The parts, in samples.
        parts: The batch as it is cut.
        mismatch: Why draws could not be joined; None where they could.

    Args:
        fixture: What is verified.
        batch: The whole batch, on the CPU as the workload makes it.
        sizes: How it is cut.
        held: Why draws do nothing from the start; None where they are joined.
    """

    def __init__(self, fixture: Fixture, batch: Any, sizes: Sequence[int], held: DrawMismatch | None = None) -> None:
        self.fixture, self.sizes = fixture, tuple(sizes)
        self._given = batch
        self._batch = fixture.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self._batch, self.sizes)
        self.mismatch = self._held = held
        self._maker = PairMaker(fixture, self._batch, self.parts, self.sizes)
        self._pairs: dict[Change, Pair] = {}
        self._owns: dict[Change, Outcome] = {}

    @property
    def batch(self) -> Any:
        """The whole batch as runs are given it."""
        return self._batch

    @property
    def objective(self) -> Objective:
        """The workload's own."""
        return self.fixture.workload.objective

    @property
    def shared_draws(self) -> tuple[str, ...]:
        """Draws without a dimension of samples, as `aten.normal_ (model.py:31)`: the first part's serve for all."""
        pair = self._pairs.get(UNCHANGED)
        return () if pair is None or pair.is_calm else pair.draws.shared

    @property
    def draw_sites(self) -> tuple[str, ...]:
        """Where random numbers are drawn, and were joined for the full batch."""
        pair = self._pair(UNCHANGED)
        whose_host = self.host_freedom()
        return () if pair.is_calm else (*pair.draws.sites, *([f"{whose_host} generators"] if whose_host else []))

    @cached_property
    def draws_mix(self) -> bool | None:
        """Whether random draws mix samples, as far as that can be told; see `mixing`."""
        return draws_mix(self.fixture, self._batch)

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
                return run_full(self.fixture, self._batch, change, pair.draws.end_part)
        except DrawMismatch as error:
            raise _not_matched("the full batch", error) from error

    def accumulated(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the Accumulator."""
        return self._pair(change).accumulated

    def own(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the workload's own `accumulate`.

        Raises:
            NotMeasuredError: It draws otherwise than the Accumulator does; see `for_own`.
        """
        try:
            return self._own(change)
        except DrawMismatch as error:
            raise _not_matched("accumulate()", error) from error

    def for_own(self) -> Runs:
        """This one; where the draws of the workload's own loop cannot be matched, one where all draws do nothing."""
        try:
            self._own(UNCHANGED)
        except DrawMismatch as error:
            return Runs(self.fixture, self._given, self.sizes, error)
        return self

    def host_freedom(self) -> str | None:
        """Whose generators change the full batch's gradient, and draw otherwise for parts; None where none does.

        They draw where no one sees it, so that what they draw cannot be given to another run.
        """
        pair = self._pair(UNCHANGED)
        if not pair.uses_host:
            return None
        seed_everything()
        with pair.joined(), seeded_otherwise(self.fixture.generators):
            before = host_state()
            other = run_full(self.fixture, self._batch, UNCHANGED, pair.draws.end_part)
            names = whose(before, self.fixture.generators)
        return names if self._maker.differ(pair.full, other) else None

    def part(self, index: int, change: Change = UNCHANGED) -> Outcome:
        """The loss and the gradient of one part alone, under its draws, multiplied by no share; run anew each time."""
        pair = self._pair(change)
        seed_everything()
        try:
            with calmed() if pair.is_calm else pair.draws.of_part(index):
                return run_part(self.fixture, self.parts[index], change, lambda own: pair.draws.take(index, own))
        except DrawMismatch as error:
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
        return run_update(self.fixture, gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """The parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.fixture.fresh().model.named_parameters()}

    def _pair(self, change: Change) -> Pair:
        if change not in self._pairs:
            if change.calm or self.mismatch:
                made = self._maker.calm(change)
            else:
                made, self.mismatch = self._maker.joined(change, lambda: self.draws_mix)
            self._make_room()
            self._pairs[change] = made
        return self._pairs[change]

    def _make_room(self) -> None:
        """Drop what was made first, but for the unchanged."""
        while len(self._pairs) > _KEPT:
            oldest = next(change for change in self._pairs if change != UNCHANGED)
            del self._pairs[oldest]
            self._owns.pop(oldest, None)

    def _own(self, change: Change) -> Outcome:
        pair = self._pair(change)
        if change not in self._owns:
            self._owns[change] = self._maker.own(pair, change)
        return self._owns[change]


def _not_matched(what: str, error: DrawMismatch) -> NotMeasuredError:
    return NotMeasuredError(f"{what} draws otherwise than when it was recorded ({error})")


_APART, _APART_NARROW = 1e-8, 2e-2
"""Relative to the largest entry; in float64, and in other precisions."""

_MOST_RECORDINGS = 8


@dataclass(frozen=True)
class Pair:
    """Both updates under one change.

    Attributes:
        full: By the whole batch.
        accumulated: By the Accumulator.
        draws: What both share; of calm ones only what Python's and NumPy's generators do.
        is_calm: Whether random operations do nothing.
        uses_host: Whether the full one may have drawn otherwise from Python's or NumPy's generators than parts did.
    """

    full: Outcome
    accumulated: Outcome
    draws: Draws
    is_calm: bool
    uses_host: bool

    def joined(self) -> AbstractContextManager[None]:
        """Around another full run."""
        return calmed() if self.is_calm else self.draws.joined()


class PairMaker:
    """Makes both updates of one batch.

    Args:
        fixture: What is verified.
        batch: The whole batch, as runs are given it.
        parts: The same, cut.
        sizes: Of the parts, in samples.
    """

    def __init__(self, fixture: Fixture, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        self._fixture, self._batch, self._parts, self._sizes = fixture, batch, parts, sizes
        self._may_draw = bool(fixture.generators or fixture.keeps_generators)

    def calm(self, change: Change) -> Pair:
        """With random operations that do nothing."""
        pair = self._try_calm(change, onward=False)
        if not pair.uses_host or not self.differ(pair.full, pair.accumulated):
            return pair
        other = self._try_calm(change, onward=True)
        return pair if self.differ(other.full, other.accumulated) else other

    def _try_calm(self, change: Change, *, onward: bool) -> Pair:
        draws = Draws(self._sizes, host=HostDraws(self._fixture.generators, onward=onward))
        seed_everything()
        with calmed():
            accumulated = run_accumulated(self._fixture, self._batch, self._parts, change, draws.take, draws.end_part)
        seed_everything()
        with calmed():
            full, uses_host = self._full(change, draws)
        return Pair(full, accumulated, draws, is_calm=True, uses_host=uses_host)

    def joined(self, change: Change, draws_mix: Callable[[], bool | None]) -> tuple[Pair, DrawMismatch | None]:
        """Under joined draws; under calm ones where those cannot be joined, and why.

        Args:
            change: What is otherwise.
            draws_mix: Whether draws mix samples.
        """
        pair = self._try(change)
        if not isinstance(pair, Pair):
            return self.calm(change), pair
        unsure = ", ".join(pair.draws.unsure)
        if not self.differ(pair.full, pair.accumulated) or not (pair.draws.sites or pair.uses_host):
            return pair, None
        for innermost in (False, True) if unsure else (False,):
            for onward in (False, True) if pair.uses_host else (False,):
                other = self._try(change, innermost=innermost, onward=onward) if innermost or onward else pair
                if isinstance(other, Pair) and not self.differ(other.full, other.accumulated):
                    return other, None
        held = self.calm(change) if pair.draws.sites else pair
        if self.differ(held.full, held.accumulated) or (not unsure and draws_mix() is not False):
            return pair, None
        sites = unsure or ", ".join(pair.draws.sites)
        return held, DrawMismatch(f"{sites} draws rows of which shapes do not tell whose they are")

    def _try(self, change: Change, *, innermost: bool = False, onward: bool = False) -> Pair | DrawMismatch:
        """Both updates under joined draws; of those found to be shared, the next recording takes the first's."""
        host = HostDraws(self._fixture.generators, onward=onward)
        draws = Draws(self._sizes, innermost=innermost, host=host)
        mismatch = DrawMismatch("which draws are shared never settles")
        for _ in range(_MOST_RECORDINGS):
            shared = draws.shared
            seed_everything()
            host.ends.clear()
            with draws.recording():
                accumulated = self._accumulated(draws, change)
            ends = set(host.ends)
            seed_everything()
            try:
                with draws.joined():
                    full, uses_host = self._full(change, draws)
            except DrawMismatch as error:
                if draws.shared == shared:
                    return error
                continue
            if draws.shared == shared:
                # Onward, an order of all samples takes as many numbers as those of the parts.
                is_matched = not onward and ends == {host.ends[-1]} and not self._fixture.keeps_generators
                return Pair(full, accumulated, draws, is_calm=False, uses_host=uses_host and not is_matched)
        return mismatch

    def _full(self, change: Change, draws: Draws) -> tuple[Outcome, bool]:
        """The full update, and whether Python's or NumPy's generators may have been drawn from."""
        before = host_state()
        full = run_full(self._fixture, self._batch, change, draws.end_part)
        return full, self._may_draw or host_state() != before

    def own(self, pair: Pair, change: Change) -> Outcome:
        """The workload's own loop under the draws of a pair, given in whichever way makes it equal.

        Where none does, as the parts were taken, if each was given its draws once: it can only be the loop, then.

        Raises:
            DrawMismatch: It draws otherwise than they did.
        """
        draws = pair.draws
        ways = (calmed,) if pair.is_calm else (draws.as_taken, draws.in_order, draws.joined_elsewhere)
        plain: Outcome | None = None
        mismatch = DrawMismatch("it is not known which part it draws for, or when")
        for way in ways if pair.is_calm or draws.sites else ways[:1]:
            seed_everything()
            try:
                with way():
                    outcome = run_own(self._fixture, self._parts, change, draws.take, draws.end_part)
            except DrawMismatch as error:
                mismatch = error
                continue
            if not self.differ(pair.full, outcome):
                return outcome
            if pair.is_calm or (way == draws.as_taken and draws.is_plain):
                plain = outcome
        if plain is None:
            raise mismatch
        return plain

    def differ(self, full: Outcome, other: Outcome) -> bool:
        """Whether gradients are further apart than rounding in any sum brings them."""
        bound = _APART if self._fixture.precision == "fp64" else _APART_NARROW
        allowed = bound * largest_entry(full.gradients.values())
        known = [(one, other.gradients[name]) for name, one in full.gradients.items() if one is not None]
        return any(two is None or distance(one, two) > allowed for one, two in known)

    def _accumulated(self, draws: Draws, change: Change) -> Outcome:
        begin, end = draws.begin_part, draws.end_part
        outcome = run_accumulated(self._fixture, self._batch, self._parts, change, begin, end)
        self._draw_for_left_out(draws, change)
        return outcome

    def _draw_for_left_out(self, draws: Draws, change: Change) -> None:
        """Parts of weight zero do not run, and the full batch draws for their samples too."""
        for index, part in enumerate(self._parts):
            if not has_weight(self._fixture.workload.objective.weight(part)):
                begin = partial(draws.begin_part, index)
                run_part(self._fixture, part, replace(change, weights=None, summed=False), begin)


_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_ROUNDING = 5e-2


def draws_mix(fixture: Fixture, batch: Any) -> bool | None:
    """Whether outputs of some samples change where others change places, under the very same draws.

    Two forwards of the whole batch: in the second, the samples of its first half have exchanged places, so that all
    shapes and lengths are there as before. BatchNorm is at rest. What is mixed behind the model's outputs is not seen.

    Args:
        fixture: What is verified.
        batch: As runs are given it, of at least four samples.

    Returns:
        None where no output has a dimension of samples, or the user's code raises.
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
        (_last_rows(one, samples, half), _last_rows(other, samples, half))
        for one, other in zip(still, moved, strict=False)
        if one.shape == other.shape and samples in one.shape
    ]
    return any(_differ(one, other) for one, other in rows) if rows else None


def _outputs(fixture: Fixture, batch: Any) -> list[Tensor]:
    """What the loss is given by the calls it makes, in order."""
    run, recorder = Run(fixture, Change()), Recorder()
    model = run.trained.model
    for norm in find_batchnorms(model, run.trained.objective.criterion_module):
        norm.training = False
    seed_everything()
    cast = autocast(fixture.precision, fixture.device)
    with run.running(), users_code("the loss"), torch.no_grad(), following(model, recorder), cast:
        run.trained.objective.terms(model, copy.deepcopy(batch))
    return [tensor for call, tensors in recorder.outputs.items() if call.depth == 0 for tensor in tensors]


def _last_rows(tensor: Tensor, samples: int, start: int) -> Tensor:
    dim = list(tensor.shape).index(samples)
    return tensor.narrow(dim, start, samples - start)


def _differ(one: Tensor, other: Tensor) -> bool:
    scale = max(float(one.abs().max()), 1e-30) if one.numel() else 1.0
    apart = float((one - other).abs().max()) if one.numel() else 0.0
    return not apart <= _ROUNDING.get(one.dtype, _HALF_ROUNDING) * scale
