"""Explanations of where the memory of a step goes, and of the card at hand: put together from traces and replays."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from autoaccum.devices.card_memory import CardMemory, CardReport
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.explanation import Account, Change, CurvePoint, Foresight
from autoaccum.devices.simulated.allocator.replay import Replayer, SizedTrace
from autoaccum.devices.simulated.allocator.settings import read_settings
from autoaccum.devices.simulated.cards import Card, context_memory, installed_card
from autoaccum.devices.simulated.explain.breakdown import MemoryBreakdown, explain_peak, holdings_at, moments
from autoaccum.devices.simulated.explain.curves import curve_points, make_timeline
from autoaccum.devices.simulated.trace import LabelledTrace, Trace
from autoaccum.devices.simulated.tracing.trace_cache import (
    CHECKPOINT,
    ChangeFailedError,
    SuggestedChange,
    TraceCache,
    Tracer,
)
from autoaccum.errors import AutoaccumError, NotMeasuredError, first_line
from autoaccum.units import format_bytes

_EXPANDING = SuggestedChange(
    "expandable_segments",
    "segments that grow in place of fixed ones (PYTORCH_ALLOC_CONF=expandable_segments:True)",
)


class Deadline:
    """The rest of a limit on time; without a limit it is endless."""

    def __init__(self, limit_seconds: float | None) -> None:
        self._end = None if limit_seconds is None else time.monotonic() + limit_seconds

    @property
    def left_seconds(self) -> float | None:
        """More than 0; None: nothing limits it."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True)
class Explainer:
    """Accounts for schedules of one workload on one simulated card, which `card` names as `Explanation.card` does."""

    card: str
    context_bytes: int
    limit_bytes: int
    traces: TraceCache
    replayer: Replayer

    def account(
        self,
        made: Sequence[Trace],
        deadline: Deadline,
        *,
        changes: bool = True,
        curve: bool = False,
        detail: bool = False,
    ) -> Account:
        """Account for the one of `made`, the traces a schedule rests on, whose peak is the highest.

        With `changes` it simulates what would change the peak, with `curve` it tells how the peak grows with the
        micro-batch, and with `detail` all that is held, to be compared (`Account.holdings`, `Account.moments`), in
        place of by how much each module's share grows with the batch.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: They cannot be traced again; or, for the detail, took other
                memory then.
        """
        trace = max(made, key=self.replayer.peak_bytes)
        labelled = self._labelled(trace, deadline)
        if detail:
            labelled = self._settled(trace, labelled, deadline)
        breakdown = MemoryBreakdown(labelled, self.replayer.with_sizes(labelled.trace))
        explanation = explain_peak(
            breakdown,
            card=self.card,
            peak_bytes=self.replayer.peak_bytes(labelled.trace),
            context_bytes=self.context_bytes,
            growth=None if detail else self._growth(trace, deadline),
        )
        timeline = make_timeline(breakdown, self.replayer.reserved_bytes(labelled.trace))
        found, notes = self._all_changes(trace, labelled, deadline) if changes else ((), ())
        return Account(
            explanation=dataclasses.replace(explanation, changes=found),
            timeline=timeline,
            curve=self._curve(max(trace.parts), deadline) if curve else (),
            notes=notes,
            holdings=holdings_at(breakdown, breakdown.peak_at) if detail else (),
            moments=moments(breakdown) if detail else (),
        )

    def _labelled(self, trace: Trace, deadline: Deadline) -> LabelledTrace:
        return self.traces.ask(lambda tracer: tracer.labelled(trace.parts, limit_seconds=deadline.left_seconds))

    def _settled(self, trace: Trace, labelled: LabelledTrace, deadline: Deadline) -> LabelledTrace:
        """The trace that others of the same parts are like; the first may be another, by what it keeps for later.

        Raises:
            NotMeasuredError: There is none, since each is another.
        """
        if labelled.trace == trace:
            return labelled
        again = self._labelled(trace, deadline)
        if again.trace != labelled.trace:
            once, twice = (format_bytes(self.replayer.peak_bytes(each.trace)) for each in (labelled, again))
            took = "the same memory in other pieces" if once == twice else f"other memory ({once}, then {twice})"
            raise NotMeasuredError(
                f"the same micro-batches, traced twice, took {took}",
                hint="seed what is random, and keep nothing from call to call",
            )
        self.traces.keep(again.trace)
        return again

    def _curve(self, size: int, deadline: Deadline) -> tuple[CurvePoint, ...]:
        most, limit_bytes = max(self.traces.share, size), self.limit_bytes
        with suppress(AutoaccumError):
            follow = partial(self._follow, deadline=deadline)
            return curve_points(follow, self.replayer, size=size, most=most, limit_bytes=limit_bytes)
        return ()

    def _follow(self, size: int, *, deadline: Deadline) -> Trace | None:
        """The trace of a size that follows from small ones, if there is time to trace those."""
        return None if deadline.is_over else self.traces.follow(size, deadline.left_seconds)

    def _growth(self, trace: Trace, deadline: Deadline) -> tuple[SizedTrace, SizedTrace] | None:
        """Return what the events of `trace` ask for at two sizes."""
        size = max(trace.parts)
        pair: tuple[Trace | None, Trace | None] = None, None
        with suppress(AutoaccumError):
            if len(trace.parts) > 1:
                pair = self._follow(size, deadline=deadline), self._follow(2 * size, deadline=deadline)
            elif size > max(2, self.traces.step) and not deadline.is_over:  # Other events, since nothing accumulates.
                pair = self.traces.make((size - self.traces.step,), deadline.left_seconds), trace
        one, other = pair
        return (
            None if one is None or other is None else (self.replayer.with_sizes(one), self.replayer.with_sizes(other))
        )

    def _all_changes(
        self, trace: Trace, labelled: LabelledTrace, deadline: Deadline
    ) -> tuple[tuple[Change, ...], tuple[str, ...]]:
        """Return what each change gives, the most saving first; and a sentence where not all could be asked."""
        if labelled.trace != trace:  # What differs by itself would be told as what a change does.
            return (), (
                "what would change the peak is not known: the same micro-batches, traced twice, took other memory",
            )
        found: list[Change] = []
        said: tuple[str, ...] = ()
        if expanding := self.replayer.expanding():
            found.append(self._compare(_EXPANDING, trace, trace, expanding))
        try:
            offers = self.traces.ask(lambda tracer: tracer.changes(limit_seconds=deadline.left_seconds))
        except AutoaccumError as error:
            offers, said = (), (f"what else would change the peak is not known ({first_line(error)})",)
        recomputes = any(origin.role == "recomputed" for origin in labelled.origins)
        for offer in offers:
            if offer.name == CHECKPOINT and recomputes:
                continue  # It is so already.
            if deadline.is_over:
                said = (f"the limit on time ended the changes before {offer.name}",)
                break
            found.append(self._change(offer, trace, deadline))
        return tuple(sorted(found, key=_saving)), said

    def _change(self, offer: SuggestedChange, trace: Trace, deadline: Deadline) -> Change:
        try:
            changed = self.traces.ask(
                lambda tracer: tracer.changed(trace.parts, offer.name, limit_seconds=deadline.left_seconds)
            )
        except (ChangeFailedError, AutoaccumError) as error:
            return Change(name=offer.name, what=offer.what, message=first_line(error))
        return self._compare(offer, trace, changed, self.replayer)

    def _compare(self, offer: SuggestedChange, trace: Trace, changed: Trace, replayer: Replayer) -> Change:
        peak_bytes = replayer.peak_bytes(changed)
        return Change(
            name=offer.name,
            what=offer.what,
            peak_bytes=peak_bytes,
            saved_bytes=self.replayer.peak_bytes(trace) - peak_bytes,
            least_bytes=replayer.least_bytes(changed, self.limit_bytes),
        )


def _saving(change: Change) -> tuple[float, float]:
    """The larger the saving the smaller, and among equal ones by the least budget."""
    if change.saved_bytes is None or change.least_bytes is None:
        return math.inf, math.inf
    return -change.saved_bytes, change.least_bytes


_MOST_SECONDS = 60.0
_PROBE = 2


def forecast_peaks(
    memory: CardMemory, make_tracer: Callable[[Card], Tracer], share: int, limit_seconds: float | None = None
) -> Foresight:
    """Return what peaks to expect on the card at hand; none where it cannot be simulated, whatever the reason.

    The traces are made now, so that no other process is left while trials run.
    """
    card = installed_card(memory)
    traces = TraceCache(lambda: make_tracer(card), share)
    try:
        replayer = _replays_at_hand(card)
        follows = traces.follow(_PROBE, min(_MOST_SECONDS, limit_seconds or _MOST_SECONDS))
    except AutoaccumError as error:
        return _none(error.message)
    finally:
        traces.close()
    if follows is None:
        return _none("; ".join(traces.notes) or "there are too few samples")

    def peak_bytes(size: int) -> int | None:
        trace = traces.follow(size)
        return None if trace is None else replayer.peak_bytes(trace)

    return Foresight(peak_bytes=peak_bytes)


def explain_installed_card(
    report: CardReport,
    make_tracer: Callable[[Card], Tracer],
    share: int,
    parts: tuple[int, ...],
    *,
    limit_bytes: int,
    limit_seconds: float | None = None,
    **asked: bool,
) -> Account:
    """Account for the memory of `parts`, which ran on the card at hand, by simulating it: it is predicted."""
    card, deadline = installed_card(report.memory), Deadline(limit_seconds)
    outside = context_memory(card).bytes if report.context_bytes is None else report.context_bytes
    traces = TraceCache(lambda: make_tracer(card), share)
    try:
        explainer = Explainer(f"{card.name} (simulated)", outside, limit_bytes, traces, _replays_at_hand(card))
        return explainer.account(traces.of_schedule(parts, True, deadline.left_seconds), deadline, **asked)
    finally:
        traces.close()


def _replays_at_hand(card: Card) -> Replayer:
    return Replayer(card, read_settings(os.environ).for_card(card.total_bytes), read_torch_release())


def _none(why: str) -> Foresight:
    return Foresight(notes=(f"the search began without a simulation of the card ({first_line(why)})",))
