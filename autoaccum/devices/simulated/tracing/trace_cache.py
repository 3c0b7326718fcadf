"""Traces of one workload: those that were made, and those that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

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
from autoaccum.devices.trial_requests import Inspect
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError

_SIZES, _MULTIPLES = (2, 5, 3), (1, 3, 2)
"""Of the traces a family is made of; or what multiplies the least size where micro-batches are multiples.
One of a single sample often has other operators than larger ones: what is squeezed away, broadcast, not normalised."""


class TraceCache:
    """Calls a tracer as little as possible, and keeps what it replied; after a failure another is started.

    Attributes:
        share: Samples per update: no larger sizes are traced.
        step: What micro-batches are multiples of.
        notes: Sentences on sizes that do not follow from small ones.
        warnings: Likewise, where that showed only when trials had relied on it.
        grows_quadratically: Whether something grows with the square of the micro-batch.
    """

    def __init__(self, make_tracer: Callable[[], Tracer], share: int) -> None:
        self._make_tracer, self.share = make_tracer, share
        self._tracer: Tracer | None = None
        self._made: dict[tuple[int, ...], Trace] = {}
        self._family: AffineTrace | None = None
        self._followed: dict[int, Trace] = {}
        self._sizes: tuple[int, ...] = _SIZES
        self.step = 1
        self._follows = share >= max(_SIZES)
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.grows_quadratically = False

    def inspect(self, limit_seconds: float | None = None) -> Inspection:
        """As the tracer does."""
        inspection = self.call(Inspect(), limit_seconds).inspection
        if inspection.multiple_of > 1:
            self.step = inspection.multiple_of
            self._sizes = tuple(self.step * factor for factor in _MULTIPLES)
            self._follows = self.share >= max(self._sizes)
        return inspection

    def make(self, parts: tuple[int, ...], limit_seconds: float | None = None) -> Trace:
        """The trace of just these parts; where the family tells another one, it is believed no more."""
        if parts not in self._made:
            self.keep(self.call(TraceParts(parts=parts), limit_seconds))
        return self._made[parts]

    def keep(self, made: Trace) -> None:
        """Take `made` for the trace of its parts; where the family tells another one, it is believed no more."""
        self._made[made.parts] = made
        if self._family is not None and not _agrees(self._family, made):
            self._family, self._follows = None, False
            self.warnings.append(
                f"the trace of {' + '.join(map(str, made.parts))} is not what those of"
                f" {', '.join(map(str, sorted(self._sizes)))}"
                " promised: every size that was tried after it was traced by itself, those before it may be a"
                " little off"
            )

    def of_schedule(self, parts: tuple[int, ...], fresh: bool, limit_seconds: float | None = None) -> list[Trace]:
        """The traces a trial of `parts` rests on; of a fresh one, the least part is in one that was made."""
        pairs = dict.fromkeys(pairwise(parts)) if len(parts) > 2 else {parts: None}
        traces = []
        for pair in sorted(pairs, key=sum):  # The one that is made first tells whether others follow.
            follows = len(set(pair)) == 1 and len(pair) == 2 and not (fresh and min(pair) == min(parts))
            trace = self.follow(pair[0], limit_seconds) if follows else None
            traces.append(trace or self.make(pair, limit_seconds))
        return traces

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Call the tracer, which is started where there is none; after a failure another is."""
        try:
            if self._tracer is None:
                self._tracer = self._make_tracer()
            return self._tracer.call(request, limit_seconds)
        except DoesNotFitError as error:  # The host, not the card.
            self.close()
            raise NotMeasuredError(
                error.message, hint="trace on a machine with more memory, or take a smaller --max-micro-batch"
            ) from None
        except AutoaccumError:
            self.close()
            raise

    def was_traced(self, trace: Trace) -> bool:
        """Return whether the tracer told just this one."""
        return self._made.get(trace.parts) is trace

    def follow(self, size: int, limit_seconds: float | None = None) -> Trace | None:
        """The trace of two parts of `size` as it follows from small ones; None where it does not."""
        if not self._follows or size < min(self._sizes):
            return None
        try:
            self._family = self._family or self._make_family(limit_seconds)
            if size not in self._followed:
                self._followed[size] = self._family.at(size)
            return self._followed[size]
        except NotAffineError as error:
            self._family, self._follows = None, False
            self.notes.append(f"every size was traced by itself, memory is not affine in the batch ({error.message})")
            return None

    def _make_family(self, limit_seconds: float | None) -> AffineTrace:
        began = time.monotonic()
        traces = []
        for size in self._sizes:
            left = None if limit_seconds is None else max(limit_seconds - (time.monotonic() - began), 0.001)
            traces.append(self.make((size, size), left))
        self.grows_quadratically = grows_quadratically(traces)
        return fit_affine_trace(traces)

    def close(self) -> None:
        """End the tracer's process."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()


def _agrees(family: AffineTrace, made: Trace) -> bool:
    """Return whether `made` is what follows for its parts; of a block in a smaller last part either size will do."""
    if len(made.parts) != 2 or min(made.parts) < min(family.sizes):
        return True
    try:
        large, small = (family.at(size) for size in (max(made.parts), min(made.parts)))
    except NotAffineError:
        return False
    sizes = zip(made.sizes, large.sizes, small.sizes, strict=False)
    return made.events == large.events and all(size in either for size, *either in sizes)
