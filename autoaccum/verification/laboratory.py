"""One batch, cut in one way: the full batch's update beside the accumulated one, under the same random draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from autoaccum.accumulation.calm import calm
from autoaccum.accumulation.draws import DrawMismatch, Draws
from autoaccum.accumulation.host_draws import HostDraws
from autoaccum.accumulation.shares import has_weight
from autoaccum.errors import NotMeasuredError
from autoaccum.verification.chance import Chance
from autoaccum.verification.outcomes import UNCHANGED, Change, Outcome
from autoaccum.verification.runs import run_accumulated, run_full, run_own, run_part, run_update
from autoaccum.verification.specimen import Specimen
from autoaccum.workload.batches import split_batch
from autoaccum.workload.weights import Objective

_APART, _APART_NARROW = 1e-8, 2e-2
"""Relative to the largest entry; in float64, and in other precisions."""

_MOST_RECORDINGS = 8
_KEPT = 3
"""Pairs of updates beside the unchanged one: each holds gradients and parameters twice."""


@dataclass
class _Pair:
    """Both updates under one change.

    Attributes:
        full: By the whole batch.
        accumulated: By the Accumulator.
        draws: What both share; of calm ones only what Python's and NumPy's generators do.
        is_calm: Whether random operations do nothing.
        uses_host: Whether the full one may have drawn from Python's or NumPy's generators.
    """

    full: Outcome
    accumulated: Outcome
    draws: Draws
    is_calm: bool
    uses_host: bool

    def joined(self) -> AbstractContextManager[None]:
        """Around another full run."""
        return calm() if self.is_calm else self.draws.joined()


class Laboratory:
    """Runs experiments on one batch; every run begins with a fresh copy and the same seeds, and updates are made once.

    Random draws are recorded in the accumulated run and joined for the full one. Where their shapes forbid that, both
    runs are made with draws that do nothing, and `mismatch` says why. Python's and NumPy's generators are rewound for
    each part; where that makes a difference, parts go on where the one before has ended.

    Attributes:
        sizes: The parts, in samples.
        parts: The batch as it is cut.
        mismatch: Why draws could not be joined; None where they could.

    Args:
        specimen: What is verified.
        batch: The whole batch, on the CPU as the workload makes it.
        sizes: How it is cut.
        held: Why draws do nothing from the start; None where they are joined.
    """

    def __init__(self, specimen: Specimen, batch: Any, sizes: Sequence[int], held: DrawMismatch | None = None) -> None:
        self.specimen, self.sizes = specimen, tuple(sizes)
        self._given = batch
        self._batch = specimen.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self._batch, self.sizes)
        self.mismatch = self._held = held
        self._chance = Chance(specimen)
        self._pairs: dict[Change, _Pair] = {}
        self._owns: dict[Change, Outcome] = {}

    @property
    def batch(self) -> Any:
        """The whole batch as runs are given it."""
        return self._batch

    @property
    def objective(self) -> Objective:
        """The workload's own."""
        return self.specimen.workload.objective

    @property
    def shared_draws(self) -> tuple[str, ...]:
        """Draws without a dimension of samples, as `aten.normal_ (model.py:31)`: the first part's serve for all."""
        pair = self._pairs.get(UNCHANGED)
        return () if pair is None or pair.is_calm else pair.draws.shared

    @property
    def draw_sites(self) -> tuple[str, ...]:
        """Where random numbers are drawn, and were joined for the full batch."""
        pair = self._pair(UNCHANGED)
        return () if pair.is_calm else pair.draws.sites

    def full(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the whole batch."""
        return self._pair(change).full

    def full_again(self, change: Change = UNCHANGED) -> Outcome:
        """The same once more, to see whether it is the same.

        Raises:
            NotMeasuredError: It does not even draw the same.
        """
        pair = self._pair(change)
        self.seed()
        try:
            with pair.joined():
                return run_full(self.specimen, self._batch, change, pair.draws.end_part)
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

    def for_own(self) -> Laboratory:
        """This one; where the draws of the workload's own loop cannot be matched, one where all draws do nothing."""
        try:
            self._own(UNCHANGED)
        except DrawMismatch as error:
            return Laboratory(self.specimen, self._given, self.sizes, error)
        return self

    def host_freedom(self) -> str | None:
        """Whose generators change the full batch's gradient: Python's, NumPy's; None where none does.

        They draw where no one sees it, so that what they draw cannot be given to another run.
        """
        pair = self._pair(UNCHANGED)
        if not pair.uses_host:
            return None
        self.seed()
        with pair.joined():
            self._chance.seed_otherwise()
            before = self._chance.places()
            other = run_full(self.specimen, self._batch, UNCHANGED, pair.draws.end_part)
            words = self._chance.words(before, self._chance.places())
        return words if self._differ(pair.full, other) else None

    def part(self, index: int, change: Change = UNCHANGED) -> Outcome:
        """The loss and the gradient of one part alone, under its draws, multiplied by no share; run anew each time."""
        pair = self._pair(change)
        self.seed()
        try:
            with calm() if pair.is_calm else pair.draws.of_part(index):
                return run_part(self.specimen, self.parts[index], change, lambda own: pair.draws.take(index, own))
        except DrawMismatch as error:
            raise _not_matched("a part by itself", error) from error

    def with_sizes(self, sizes: Sequence[int]) -> Laboratory:
        """The same batch cut otherwise."""
        return Laboratory(self.specimen, self._given, sizes, self._held)

    def with_specimen(self, specimen: Specimen) -> Laboratory:
        """The same batch, cut alike, of another specimen, such as one in float64."""
        return Laboratory(specimen, self._given, self.sizes, self._held)

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
        """The parameters after one step of the optimizer with these gradients."""
        self.seed()
        return run_update(self.specimen, gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """The parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.specimen.fresh().model.named_parameters()}

    def seed(self) -> None:
        """Put all generators to where every run begins."""
        self._chance.seed()

    def _pair(self, change: Change) -> _Pair:
        if change not in self._pairs:
            made = self._calm(change) if change.calm or self.mismatch else self._joined(change)
            self._make_room()
            self._pairs[change] = made
        return self._pairs[change]

    def _make_room(self) -> None:
        """Drop what was made first, but for the unchanged."""
        while len(self._pairs) > _KEPT:
            oldest = next(change for change in self._pairs if change != UNCHANGED)
            del self._pairs[oldest]
            self._owns.pop(oldest, None)

    def _calm(self, change: Change) -> _Pair:
        pair = self._try_calm(change, onward=False)
        if not pair.uses_host or not self._differ(pair.full, pair.accumulated):
            return pair
        other = self._try_calm(change, onward=True)
        return pair if self._differ(other.full, other.accumulated) else other

    def _try_calm(self, change: Change, *, onward: bool) -> _Pair:
        draws = Draws(self.sizes, host=HostDraws(self._chance.named, onward=onward))
        self.seed()
        with calm():
            accumulated = run_accumulated(self.specimen, self._batch, self.parts, change, draws.take, draws.end_part)
        self.seed()
        with calm():
            full, uses_host = self._full(change, draws)
        return _Pair(full, accumulated, draws, is_calm=True, uses_host=uses_host)

    def _joined(self, change: Change) -> _Pair:
        pair = self._try(change)
        if not isinstance(pair, _Pair):
            self.mismatch = pair
            return self._calm(change)
        unsure = ", ".join(pair.draws.unsure)
        if not self._differ(pair.full, pair.accumulated) or not (unsure or pair.uses_host):
            return pair
        for innermost in (False, True) if unsure else (False,):
            for onward in (False, True) if pair.uses_host else (False,):
                other = self._try(change, innermost=innermost, onward=onward) if innermost or onward else pair
                if isinstance(other, _Pair) and not self._differ(other.full, other.accumulated):
                    return other
        held = self._calm(change) if unsure else pair
        if self._differ(held.full, held.accumulated):
            return pair
        self.mismatch = DrawMismatch(f"{unsure} draws rows of which shapes do not tell whose they are")
        return held

    def _try(self, change: Change, *, innermost: bool = False, onward: bool = False) -> _Pair | DrawMismatch:
        """Both updates under joined draws; of those found to be shared, the next recording takes the first's."""
        draws = Draws(self.sizes, innermost=innermost, host=HostDraws(self._chance.named, onward=onward))
        mismatch = DrawMismatch("which draws are shared never settles")
        for _ in range(_MOST_RECORDINGS):
            shared = draws.shared
            self.seed()
            with draws.recording():
                accumulated = self._accumulated(draws, change)
            self.seed()
            try:
                with draws.joined():
                    full, uses_host = self._full(change, draws)
            except DrawMismatch as error:
                if draws.shared == shared:
                    return error
                continue
            if draws.shared == shared:
                return _Pair(full, accumulated, draws, is_calm=False, uses_host=uses_host)
        return mismatch

    def _full(self, change: Change, draws: Draws) -> tuple[Outcome, bool]:
        """The full update, and whether Python's or NumPy's generators may have been drawn from."""
        before = self._chance.places()
        full = run_full(self.specimen, self._batch, change, draws.end_part)
        return full, self._chance.is_kept or self._chance.places() != before

    def _own(self, change: Change) -> Outcome:
        pair = self._pair(change)
        if change not in self._owns:
            self._owns[change] = self._try_own(pair, change)
        return self._owns[change]

    def _try_own(self, pair: _Pair, change: Change) -> Outcome:
        """The workload's own loop under the draws of a pair, given in whichever way makes it equal.

        Where none does, as the parts were taken, if each was given its draws once: it can only be the loop, then.
        """
        draws = pair.draws
        ways = (calm,) if pair.is_calm else (draws.as_taken, draws.in_order, draws.joined_elsewhere)
        plain: Outcome | None = None
        mismatch = DrawMismatch("it is not known which part it draws for, or when")
        for way in ways if pair.is_calm or draws.sites else ways[:1]:
            self.seed()
            try:
                with way():
                    outcome = run_own(self.specimen, self.parts, change, draws.take, draws.end_part)
            except DrawMismatch as error:
                mismatch = error
                continue
            if not self._differ(pair.full, outcome):
                return outcome
            if pair.is_calm or (way == draws.as_taken and draws.is_plain):
                plain = outcome
        if plain is None:
            raise mismatch
        return plain

    def _differ(self, full: Outcome, other: Outcome) -> bool:
        """Whether gradients are further apart than rounding in any sum brings them."""
        bound = _APART if self.specimen.precision == "fp64" else _APART_NARROW
        expected, found = full.gradients, other.gradients
        known = [(one, found[name]) for name, one in expected.items() if one is not None and one.numel()]
        scale = max((float(gradient.abs().max()) for gradient, _ in known), default=0.0)
        return any(one is None or float((gradient - one).abs().max()) > bound * scale for gradient, one in known)

    def _accumulated(self, draws: Draws, change: Change) -> Outcome:
        begin, end = draws.begin_part, draws.end_part
        outcome = run_accumulated(self.specimen, self._batch, self.parts, change, begin, end)
        self._draw_for_left_out(draws, change)
        return outcome

    def _draw_for_left_out(self, draws: Draws, change: Change) -> None:
        """Parts of weight zero do not run, and the full batch draws for their samples too."""
        for index, part in enumerate(self.parts):
            if not has_weight(self.objective.weight(part)):
                begin = partial(draws.begin_part, index)
                run_part(self.specimen, part, replace(change, weights=None, summed=False), begin)


def _not_matched(what: str, error: DrawMismatch) -> NotMeasuredError:
    return NotMeasuredError(f"{what} draws otherwise than when it was recorded ({error})")
