"""One batch, cut in one way: the full batch's update beside the accumulated one, under the same random draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autoaccum.accumulation.calm import calm
from autoaccum.accumulation.draws import DrawMismatch, Draws
from autoaccum.accumulation.shares import has_weight
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.verification.outcomes import UNCHANGED, Change, Outcome
from autoaccum.verification.runs import run_accumulated, run_full, run_own, run_part, run_update
from autoaccum.verification.specimen import Specimen
from autoaccum.workload.batches import split_batch
from autoaccum.workload.weights import Objective

_APART, _APART_NARROW = 1e-8, 2e-2
"""Relative to the largest entry; in float64, and in other precisions."""

_MOST_RECORDINGS = 8


@dataclass
class _Pair:
    """Both updates under one change, and the draws they share; None where draws are held or there are none."""

    full: Outcome
    accumulated: Outcome
    draws: Draws | None


class Laboratory:
    """Runs experiments on one batch; every run begins with a fresh copy and the same seeds, and updates are made once.

    Random draws are recorded in the accumulated run and joined for the full one. Where their shapes forbid that, both
    runs are made with draws that do nothing, and `mismatch` says why.

    Attributes:
        sizes: The parts, in samples.
        parts: The batch as it is cut.
        mismatch: Why draws could not be joined; None where they could.

    Args:
        specimen: What is verified.
        batch: The whole batch, on the CPU as the workload makes it.
        sizes: How it is cut.
    """

    def __init__(self, specimen: Specimen, batch: Any, sizes: Sequence[int]) -> None:
        self.specimen, self.sizes = specimen, tuple(sizes)
        self._given = batch
        self._batch = specimen.prepare_batch(batch)
        self.parts: list[Any] = split_batch(self._batch, self.sizes)
        self.mismatch: DrawMismatch | None = None
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
        return () if pair is None or pair.draws is None else pair.draws.shared

    @property
    def draw_sites(self) -> tuple[str, ...]:
        """Where random numbers are drawn, and were joined for the full batch."""
        draws = self._pair(UNCHANGED).draws
        return () if draws is None else draws.sites

    def full(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the whole batch."""
        return self._pair(change).full

    def full_again(self, change: Change = UNCHANGED) -> Outcome:
        """The same once more, to see whether it is the same."""
        pair = self._pair(change)
        self._seed()
        with calm() if pair.draws is None else pair.draws.joined():
            return run_full(self.specimen, self._batch, change, _end_of(pair.draws))

    def accumulated(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the Accumulator."""
        return self._pair(change).accumulated

    def own(self, change: Change = UNCHANGED) -> Outcome:
        """One update by the workload's own `accumulate`."""
        if change not in self._owns:
            draws = self._pair(change).draws
            self._seed()
            with calm() if draws is None else draws.in_order():
                self._owns[change] = run_own(self.specimen, self.parts, change, _end_of(draws))
        return self._owns[change]

    def part(self, index: int, change: Change = UNCHANGED) -> Outcome:
        """The loss and the gradient of one part alone, under its draws, multiplied by no share; run anew each time."""
        draws = self._pair(change).draws
        self._seed()
        with calm() if draws is None else draws.of_part(index):
            return run_part(self.specimen, self.parts[index], change)

    def with_sizes(self, sizes: Sequence[int]) -> Laboratory:
        """The same batch cut otherwise."""
        return Laboratory(self.specimen, self._given, sizes)

    def with_specimen(self, specimen: Specimen) -> Laboratory:
        """The same batch, cut alike, of another specimen, such as one in float64."""
        return Laboratory(specimen, self._given, self.sizes)

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
        """The parameters after one step of the optimizer with these gradients."""
        self._seed()
        return run_update(self.specimen, gradients)

    def initial(self) -> Mapping[str, Tensor]:
        """The parameters before any update."""
        return {name: parameter.detach() for name, parameter in self.specimen.fresh().model.named_parameters()}

    def _pair(self, change: Change) -> _Pair:
        if change not in self._pairs:
            self._pairs[change] = self._calm(change) if change.calm or self.mismatch else self._joined(change)
        return self._pairs[change]

    def _calm(self, change: Change) -> _Pair:
        begin = Draws(self.sizes).begin_part  # Which rewinds what calm() leaves as it is, Python's and NumPy's.
        self._seed()
        with calm():
            accumulated = run_accumulated(self.specimen, self._batch, self.parts, change, begin, _end_of(None))
        self._seed()
        with calm():
            return _Pair(run_full(self.specimen, self._batch, change, _end_of(None)), accumulated, None)

    def _joined(self, change: Change) -> _Pair:
        pair = self._try(change, innermost=False)
        if not isinstance(pair, _Pair):
            self.mismatch = pair
            return self._calm(change)
        if pair.draws is None or not pair.draws.unsure or not self._differ(pair):
            return pair
        other = self._try(change, innermost=True)
        if isinstance(other, _Pair) and not self._differ(other):
            return other
        held = self._calm(change)
        if self._differ(held):
            return pair
        sites = ", ".join(pair.draws.unsure)
        self.mismatch = DrawMismatch(f"{sites} draws rows of which shapes do not tell whose they are")
        return held

    def _try(self, change: Change, *, innermost: bool) -> _Pair | DrawMismatch:
        """Both updates under joined draws; of those found to be shared, the next recording takes the first's."""
        draws, mismatch = Draws(self.sizes, innermost=innermost), DrawMismatch("which draws are shared never settles")
        for _ in range(_MOST_RECORDINGS):
            shared = draws.shared
            self._seed()
            with draws.recording():
                accumulated = self._accumulated(draws, change)
            self._seed()
            try:
                with draws.joined():
                    full = run_full(self.specimen, self._batch, change, draws.end_part)
            except DrawMismatch as error:
                if draws.shared == shared:
                    return error
                continue
            if draws.shared == shared:
                return _Pair(full, accumulated, draws)
        return mismatch

    def _differ(self, pair: _Pair) -> bool:
        """Whether gradients are further apart than rounding in any sum brings them."""
        bound = _APART if self.specimen.precision == "fp64" else _APART_NARROW
        full, other = pair.full.gradients, pair.accumulated.gradients
        known = [(one, other[name]) for name, one in full.items() if one is not None and one.numel()]
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
                draws.begin_part(index)
                run_part(self.specimen, part, replace(change, weights=None, summed=False))

    def _seed(self) -> None:
        seed_everything()


def _end_of(draws: Draws | None) -> Callable[[], None]:
    return (lambda: None) if draws is None else draws.end_part
