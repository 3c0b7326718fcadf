"""One batch, cut in one way: the full batch's update beside the accumulated one, under the same random draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from autoaccum.accumulation.draws.joins import DrawMismatch
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import NotMeasuredError
from autoaccum.verification.laboratory.chance import calmed, host_state, seeded_otherwise, whose
from autoaccum.verification.laboratory.mixing import draws_mix
from autoaccum.verification.laboratory.outcomes import UNCHANGED, Change, Outcome
from autoaccum.verification.laboratory.pairs import Pair, PairMaker
from autoaccum.verification.laboratory.runs import run_full, run_part, run_update
from autoaccum.verification.laboratory.specimen import Specimen
from autoaccum.workload.batches import split_batch
from autoaccum.workload.weights import Objective

_KEPT = 3
"""Pairs of updates beside the unchanged one: each holds gradients and parameters twice."""


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
        self._maker = PairMaker(specimen, self._batch, self.parts, self.sizes)
        self._pairs: dict[Change, Pair] = {}
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
        whose_host = self.host_freedom()
        return () if pair.is_calm else (*pair.draws.sites, *([f"{whose_host} generators"] if whose_host else []))

    @cached_property
    def draws_mix(self) -> bool | None:
        """Whether random draws mix samples, as far as that can be told; see `mixing`."""
        return draws_mix(self.specimen, self._batch)

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
        """Whose generators change the full batch's gradient, and draw otherwise for parts; None where none does.

        They draw where no one sees it, so that what they draw cannot be given to another run.
        """
        pair = self._pair(UNCHANGED)
        if not pair.uses_host:
            return None
        seed_everything()
        with pair.joined(), seeded_otherwise(self.specimen.generators):
            before = host_state()
            other = run_full(self.specimen, self._batch, UNCHANGED, pair.draws.end_part)
            names = whose(before, self.specimen.generators)
        return names if self._maker.differ(pair.full, other) else None

    def part(self, index: int, change: Change = UNCHANGED) -> Outcome:
        """The loss and the gradient of one part alone, under its draws, multiplied by no share; run anew each time."""
        pair = self._pair(change)
        seed_everything()
        try:
            with calmed() if pair.is_calm else pair.draws.of_part(index):
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
        seed_everything()
        return run_update(self.specimen, gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """The parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.specimen.fresh().model.named_parameters()}

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
