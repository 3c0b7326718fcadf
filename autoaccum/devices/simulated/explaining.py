"""Where the memory of a step goes, what would change that, and how it grows: put together from traces and replays."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from autoaccum.devices.explanation import Account, Change, CurvePoint
from autoaccum.devices.simulated.breakdown import break_down
from autoaccum.devices.simulated.curve import curve_points
from autoaccum.devices.simulated.demand import Demand
from autoaccum.devices.simulated.holdings import holdings_at, moments
from autoaccum.devices.simulated.labels import LabelledTrace
from autoaccum.devices.simulated.ledger import Ledger
from autoaccum.devices.simulated.replays import Replays
from autoaccum.devices.simulated.timeline import draw_timeline
from autoaccum.devices.simulated.trace import Trace
from autoaccum.devices.simulated.tracer import CHECKPOINT, CHUNKED, ChangeFailed, Offer
from autoaccum.devices.simulated.traces import Traces
from autoaccum.errors import AutoaccumError, NotMeasuredError, first_line
from autoaccum.units import format_bytes

_EXPANDING = "expandable_segments"


class Clock:
    """What is left of a limit on time; none is left for ever."""

    def __init__(self, limit_seconds: float | None) -> None:
        self._end = None if limit_seconds is None else time.monotonic() + limit_seconds

    @property
    def left_seconds(self) -> float | None:
        """More than 0; None: nothing limits it."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True)
class Accountant:
    """Accounts for schedules of one workload on one simulated card.

    Attributes:
        card: What is simulated, as `Explanation.card`.
        context_bytes: What the process holds outside of the allocator.
        limit_bytes: The budget.
        traces: Of the workload.
        replays: On the card.
    """

    card: str
    context_bytes: int
    limit_bytes: int
    traces: Traces
    replays: Replays

    def account(
        self, made: Sequence[Trace], clock: Clock, *, changes: bool, curve: bool, detail: bool = False
    ) -> Account:
        """Account for the one of `made` whose peak is the highest.

        Args:
            made: The traces a schedule rests on.
            clock: For traces beside those.
            changes: Simulate what would change the peak, too.
            curve: Tell how the peak grows with the micro-batch, too.
            detail: Tell all that is held, to be compared (`Account.holdings`, `Account.moments`), in place of by how
                much each module's share grows with the batch.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: They cannot be traced again; or, for the detail, took other
                memory then.
        """
        trace = max(made, key=self.replays.peak_bytes)
        labelled = self.traces.labelled(trace.parts, clock.left_seconds)
        if detail:
            labelled = self._settled(trace, labelled, clock)
        ledger = Ledger(labelled, self.replays.weigh(labelled.trace))
        explanation = break_down(
            ledger,
            card=self.card,
            peak_bytes=self.replays.peak_bytes(labelled.trace),
            context_bytes=self.context_bytes,
            growth=None if detail else self._growth(trace, clock),
        )
        timeline = draw_timeline(ledger, self.replays.reserved_bytes(labelled.trace))
        found, notes = self._all_changes(trace, labelled, clock) if changes else ((), ())
        return Account(
            explanation=dataclasses.replace(explanation, changes=found),
            timeline=timeline,
            curve=self._curve(max(trace.parts), clock) if curve else (),
            notes=notes,
            holdings=holdings_at(ledger, ledger.peak_at) if detail else (),
            moments=moments(ledger) if detail else (),
        )

    def _settled(self, trace: Trace, labelled: LabelledTrace, clock: Clock) -> LabelledTrace:
        """The trace that others of the same parts are like; figures rest on it from then on.

        The first may be another, by what is kept from call to call (a cached mask, the last outputs), or since it
        followed from those of other sizes.

        Raises:
            NotMeasuredError: There is none, since each is another.
        """
        if labelled.trace == trace:
            return labelled
        again = self.traces.labelled(trace.parts, clock.left_seconds)
        if again.trace != labelled.trace:
            once, twice = (format_bytes(self.replays.peak_bytes(each.trace)) for each in (labelled, again))
            took = "the same memory in other pieces" if once == twice else f"other memory ({once}, then {twice})"
            raise NotMeasuredError(
                f"the same micro-batches, traced twice, took {took}",
                hint="seed what is random, and keep nothing from call to call",
            )
        self.traces.keep(again.trace)
        return again

    def _curve(self, size: int, clock: Clock) -> tuple[CurvePoint, ...]:
        most, limit_bytes = max(self.traces.share, size), self.limit_bytes
        with suppress(AutoaccumError):
            follow = partial(self._follow, clock=clock)
            return curve_points(follow, self.replays, size=size, most=most, limit_bytes=limit_bytes)
        return ()

    def _follow(self, size: int, *, clock: Clock) -> Trace | None:
        """The trace of a size that follows from small ones, if there is time to trace those."""
        return None if clock.is_over else self.traces.follow(size, clock.left_seconds)

    def _growth(self, trace: Trace, clock: Clock) -> tuple[Demand, Demand] | None:
        """What the events of `trace` ask for at two sizes."""
        size = max(trace.parts)
        pair: tuple[Trace | None, Trace | None] = None, None
        with suppress(AutoaccumError):
            if len(trace.parts) > 1:
                pair = self._follow(size, clock=clock), self._follow(2 * size, clock=clock)
            elif (
                size > max(2, self.traces.step) and not clock.is_over
            ):  # Nothing accumulates, so that the events are others.
                pair = self.traces.make((size - self.traces.step,), clock.left_seconds), trace
        one, other = pair
        return None if one is None or other is None else (self.replays.weigh(one), self.replays.weigh(other))

    def _all_changes(
        self, trace: Trace, labelled: LabelledTrace, clock: Clock
    ) -> tuple[tuple[Change, ...], tuple[str, ...]]:
        """What each change gives, the most saving first; and a sentence where not all could be asked."""
        if labelled.trace != trace:  # What differs by itself would be told as what a change does.
            return (), (
                "what would change the peak is not known: the same micro-batches, traced twice, took other memory",
            )
        if clock.is_over:
            return (), ("the limit on time was over before what would change the peak was asked",)
        found = list(self._expanded(trace))
        left: list[str] = []
        said: tuple[str, ...] = ()
        try:
            offers = self.traces.changes(clock.left_seconds)
        except AutoaccumError as error:
            offers, said = (), (f"what else would change the peak is not known ({first_line(error)})",)
        recomputes = any(origin.role == "recomputed" for origin in labelled.origins)
        for offer in offers:
            if offer.name == CHECKPOINT and recomputes:
                continue  # It is so already.
            if clock.is_over:
                left.append(offer.name)
            else:
                change = self._change(offer, trace, clock)
                if offer.name != CHUNKED or _saves_much(change):
                    found.append(change)
        if left:
            said = (f"the limit on time ended the changes before {', '.join(left)}",)
        return tuple(sorted(found, key=_saving)), said

    def _expanded(self, trace: Trace) -> Iterator[Change]:
        """What another allocator would make of the same requests."""
        replays = self.replays.expanding()
        if replays is not None:
            what = "segments that grow in place of fixed ones (PYTORCH_ALLOC_CONF=expandable_segments:True)"
            yield self._compare(Offer(_EXPANDING, what), trace, trace, replays)

    def _change(self, offer: Offer, trace: Trace, clock: Clock) -> Change:
        try:
            changed = self.traces.changed(trace.parts, offer.name, clock.left_seconds)
        except (ChangeFailed, AutoaccumError) as error:
            return Change(name=offer.name, what=offer.what, message=first_line(error))
        return self._compare(offer, trace, changed, self.replays)

    def _compare(self, offer: Offer, trace: Trace, changed: Trace, replays: Replays) -> Change:
        peak_bytes = replays.peak_bytes(changed)
        return Change(
            name=offer.name,
            what=offer.what,
            peak_bytes=peak_bytes,
            saved_bytes=self.replays.peak_bytes(trace) - peak_bytes,
            least_bytes=replays.least_bytes(changed, self.limit_bytes),
        )


def _saves_much(change: Change) -> bool:
    """Whether a tenth of the peak goes; what is much work to write is not offered for less."""
    return change.saved_bytes is not None and 9 * change.saved_bytes >= (change.peak_bytes or 0)


def _saving(change: Change) -> tuple[float, float]:
    """The larger the saving the smaller, and among equal ones by the least budget."""
    if change.saved_bytes is None or change.least_bytes is None:
        return math.inf, math.inf
    return -change.saved_bytes, change.least_bytes
