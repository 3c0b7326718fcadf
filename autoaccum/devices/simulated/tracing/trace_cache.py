"""A cache of one workload's traces: those that were made, and those that are extrapolated from them."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoaccum.devices.base import Inspection
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.simulated.trace_records import Trace
from autoaccum.devices.simulated.tracing.trace_scaling import (
    AffineTrace,
    NotAffineError,
    fit_affine_trace,
    grows_quadratically,
)
from autoaccum.devices.trial_record import Inspect
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError
from autoaccum.options import Reduce

_SIZES, _MULTIPLES = (2, 5, 3), (1, 3, 2)
"""Sizes that are traced to extrapolate others; or factors of the least size, if micro-batches must be multiples of it.
The last one is left out where the plan's own parts, traced instead, agree with the other two. A single sample is not
traced: it often runs other operators, since its dimension is squeezed or broadcast."""

_Kept = tuple[dict[tuple[int, ...], Trace], AffineTrace | None, dict[int, Trace]]
Choose = Callable[[Callable[[int], Trace]], tuple[int, ...]]
"""Plans by a function that extrapolates the trace of a size; returns the parts that would confirm the plan, or raises.
"""


class TraceCache:
    """Calls a tracer as rarely as possible and keeps its traces; after a failure it starts a new tracer.

    Attributes:
        choose: Chooses the parts to check the next extrapolation by, if set.
        share: Samples per update; no larger size is traced.
        step: The number of samples of which every micro-batch is a multiple.
        notes: Sentences for the plan on sizes that cannot be extrapolated from small ones.
        warnings: The same, if trials had relied on the extrapolation before.
        grows_quadratically: True if some block grows with the square of the micro-batch.
        joined: True if the parts of an update need each other: each schedule is traced whole, and none extrapolated.
        reduce: As in `PartsRequest`: traces of each way are kept apart.
    """

    def __init__(self, make_tracer: Callable[[], Tracer], share: int) -> None:
        self._make_tracer, self.share = make_tracer, share
        self.choose: Choose | None = None
        self._tracer: Tracer | None = None
        self._made: dict[tuple[int, ...], Trace] = {}
        self._affine: AffineTrace | None = None
        self._extrapolated: dict[int, Trace] = {}
        self._sizes: tuple[int, ...] = _SIZES
        self.step = 1
        self._can_extrapolate = share >= max(_SIZES)
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.grows_quadratically = self.joined = False
        self.reduce: Reduce | None = None
        self._of_other_ways: dict[Reduce | None, _Kept] = {}

    def inspect(self, limit_seconds: float | None = None) -> Inspection:
        """Inspect the workload in the tracer, and learn which multiples its micro-batches need."""
        inspection = self.call(Inspect(), limit_seconds)
        if inspection.multiple_of > 1:
            self.step = inspection.multiple_of
            self._sizes = tuple(self.step * factor for factor in _MULTIPLES)
            self._can_extrapolate = self.share >= max(self._sizes)
        self.joined = inspection.joining is not None
        self._can_extrapolate = self._can_extrapolate and not self.joined
        return inspection

    def use_reduce(self, reduce: Reduce | None) -> None:
        """From now on, trace updates that sum gradients over ranks in this way."""
        self._of_other_ways[self.reduce] = self._made, self._affine, self._extrapolated
        self._made, self._affine, self._extrapolated = self._of_other_ways.get(reduce, ({}, None, {}))
        self.reduce = reduce

    def make(self, parts: tuple[int, ...], limit_seconds: float | None = None) -> Trace:
        """Return the trace of exactly these parts, traced if it is not there yet."""
        if parts not in self._made:
            request = TraceParts(parts=parts, joined=self.joined, reduce=self.reduce)
            self.keep(self.call(request, limit_seconds))
        return self._made[parts]

    def keep(self, made: Trace) -> None:
        """Keep a trace that was made. If it contradicts the extrapolated one, stop extrapolating."""
        self._made[made.parts] = made
        if self._affine is not None and not _agrees(self._affine, made):
            sizes = ", ".join(map(str, self._affine.sizes))
            self._affine, self._can_extrapolate = None, False
            self.warnings.append(
                f"the trace of {' + '.join(map(str, made.parts))} differs from the one that was extrapolated from sizes"
                f" {sizes}: later sizes were traced one by one, earlier peaks may be"
                " a little off"
            )

    def traces_of(self, parts: tuple[int, ...], fresh: bool, limit_seconds: float | None = None) -> list[Trace]:
        """Return the traces for a trial of `parts`; for a fresh one the smallest part is traced, not extrapolated.

        They are those of consecutive pairs; of threes where gradients wait for the last part, since a part that is
        neither the first nor the last then adds to all of them and lets go of none.
        """
        length = 3 if self.reduce == "last" else 2
        several = len(parts) > length and not self.joined
        pairs = {parts[at : at + length]: None for at in range(len(parts) - length + 1)} if several else {parts: None}
        traces = []
        for pair in sorted(pairs, key=sum):  # The first trace that is made shows if the others can be extrapolated.
            extrapolates = len(set(pair)) == 1 and len(pair) == 2 and not (fresh and min(pair) == min(parts))
            trace = self.extrapolate(pair[0], limit_seconds) if extrapolates else None
            traces.append(trace or self.make(pair, limit_seconds))
        return traces

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Call the tracer and start it if there is none; after a failure the next call starts a new one."""
        try:
            if self._tracer is None:
                self._tracer = self._make_tracer()
            return self._tracer.call(request, limit_seconds)
        except DoesNotFitError as error:  # The host ran out of memory, not the card.
            self.close()
            raise NotMeasuredError(
                error.message, hint="trace on a machine with more memory, or take a smaller --max-micro-batch"
            ) from None
        except AutoaccumError:
            self.close()
            raise

    def was_traced(self, trace: Trace) -> bool:
        """Return whether this trace was made by the tracer, not extrapolated."""
        return self._made.get(trace.parts) is trace

    def extrapolate(self, size: int, limit_seconds: float | None = None) -> Trace | None:
        """Return the extrapolated trace of two parts of `size`; None if it cannot be extrapolated."""
        if not self._can_extrapolate or size < min(self._sizes):
            return None
        try:
            self._affine = self._affine or self._fit_affine(limit_seconds)
            return self._extrapolate(self._affine, size)
        except NotAffineError as error:
            self._affine, self._can_extrapolate = None, False
            reason = f"since memory is not affine in the batch ({error.message})"
            self.notes.append(f"every size was traced by itself, {reason}")
            return None

    def _fit_affine(self, limit_seconds: float | None) -> AffineTrace:
        began = time.monotonic()
        choose, self.choose = self.choose, None

        def make(parts: tuple[int, ...]) -> Trace:
            left = None if limit_seconds is None else max(limit_seconds - (time.monotonic() - began), 0.001)
            return self.make(parts, left)

        *first, last = [(size, size) for size in self._sizes]
        traces = [make(parts) for parts in first]
        affine = None if choose is None else self._fit_checked(traces, choose, make)
        if affine is None:
            traces.append(make(last))
            self.grows_quadratically = grows_quadratically(traces)
            affine = fit_affine_trace(traces)
        return affine

    def _fit_checked(
        self, traces: list[Trace], choose: Choose, make: Callable[[tuple[int, ...]], Trace]
    ) -> AffineTrace | None:
        """Fit two traces, and check them by that of the parts that `choose` chooses; None if it cannot, or disagrees.

        A plan traces those parts anyway, and they tell as much as another small size.
        """
        try:
            affine = fit_affine_trace(traces)
            pair = choose(lambda size: self._extrapolate(affine, size))[-2:]
        except AutoaccumError:
            pair = ()
        if len(pair) == 2 and pair not in self._made and min(pair) >= min(affine.sizes):
            if _agrees(affine, make(pair)):
                return affine
            del self._made[pair]  # The trial of it, if there is one, tells of the difference.
        self._extrapolated.clear()
        return None

    def _extrapolate(self, affine: AffineTrace, size: int) -> Trace:
        if size not in self._extrapolated:
            self._extrapolated[size] = affine.at(size)
        return self._extrapolated[size]

    def close(self) -> None:
        """End the tracer's process."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()


def _agrees(affine: AffineTrace, made: Trace) -> bool:
    """Return whether a trace equals the extrapolated one; the last update may have blocks of either size."""
    if len(made.parts) != 2 or min(made.parts) < min(affine.sizes):
        return True
    try:
        first, second = (affine.at(size) for size in made.parts)
    except NotAffineError:
        return False
    if (made.events, made.phases, made.last_update) != (first.events, first.phases, first.last_update):
        return False
    before = 1 + max(made.events[: made.last_update], default=-1)
    sizes = zip(made.sizes, first.sizes, second.sizes, strict=True)
    return made.sizes[:before] == first.sizes[:before] and all(size in either for size, *either in sizes)
