"""The full batch's update beside the accumulated one, and the loop's of the user's own, under the same draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autoaccum.accumulation.draws.draws import Draws
from autoaccum.accumulation.draws.host_draws import HostDraws
from autoaccum.accumulation.draws.joins import DrawMismatch
from autoaccum.accumulation.shares import has_weight
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.verification.comparing import distance, largest_entry
from autoaccum.verification.laboratory.chance import calmed, host_state
from autoaccum.verification.laboratory.outcomes import Change, Outcome
from autoaccum.verification.laboratory.runs import run_accumulated, run_full, run_own, run_part
from autoaccum.verification.laboratory.specimen import Specimen

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
        specimen: What is verified.
        batch: The whole batch, as runs are given it.
        parts: The same, cut.
        sizes: Of the parts, in samples.
    """

    def __init__(self, specimen: Specimen, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        self._specimen, self._batch, self._parts, self._sizes = specimen, batch, parts, sizes
        self._may_draw = bool(specimen.generators or specimen.keeps_generators)

    def calm(self, change: Change) -> Pair:
        """With random operations that do nothing."""
        pair = self._try_calm(change, onward=False)
        if not pair.uses_host or not self.differ(pair.full, pair.accumulated):
            return pair
        other = self._try_calm(change, onward=True)
        return pair if self.differ(other.full, other.accumulated) else other

    def _try_calm(self, change: Change, *, onward: bool) -> Pair:
        draws = Draws(self._sizes, host=HostDraws(self._specimen.generators, onward=onward))
        seed_everything()
        with calmed():
            accumulated = run_accumulated(self._specimen, self._batch, self._parts, change, draws.take, draws.end_part)
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
        host = HostDraws(self._specimen.generators, onward=onward)
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
                is_matched = not onward and ends == {host.ends[-1]} and not self._specimen.keeps_generators
                return Pair(full, accumulated, draws, is_calm=False, uses_host=uses_host and not is_matched)
        return mismatch

    def _full(self, change: Change, draws: Draws) -> tuple[Outcome, bool]:
        """The full update, and whether Python's or NumPy's generators may have been drawn from."""
        before = host_state()
        full = run_full(self._specimen, self._batch, change, draws.end_part)
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
                    outcome = run_own(self._specimen, self._parts, change, draws.take, draws.end_part)
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
        bound = _APART if self._specimen.precision == "fp64" else _APART_NARROW
        allowed = bound * largest_entry(full.gradients.values())
        known = [(one, other.gradients[name]) for name, one in full.gradients.items() if one is not None]
        return any(two is None or distance(one, two) > allowed for one, two in known)

    def _accumulated(self, draws: Draws, change: Change) -> Outcome:
        begin, end = draws.begin_part, draws.end_part
        outcome = run_accumulated(self._specimen, self._batch, self._parts, change, begin, end)
        self._draw_for_left_out(draws, change)
        return outcome

    def _draw_for_left_out(self, draws: Draws, change: Change) -> None:
        """Parts of weight zero do not run, and the full batch draws for their samples too."""
        for index, part in enumerate(self._parts):
            if not has_weight(self._specimen.workload.objective.weight(part)):
                begin = partial(draws.begin_part, index)
                run_part(self._specimen, part, replace(change, weights=None, summed=False), begin)
