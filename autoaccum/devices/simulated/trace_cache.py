"""The traces of one workload: those that were made, those that follow from them, and cards that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from autoaccum.devices.base import Inspection
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.simulated.simulation_requests import CountCost, ListAlike, TraceParts, UseCard
from autoaccum.devices.trial_requests import Inspect
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError
from autoaccum.messages import Message, message
from autoaccum.options import GradSync
from autoaccum.simulation.allocator.replay import Replays
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import Trace, UpdateCost
from autoaccum.simulation.tracing.trace_scaling import (
    AffineTrace,
    NotAffineError,
    fit_affine_trace,
    grows_quadratically,
    tell_parts_apart,
)

_Device = TypeVar("_Device")
_Result = TypeVar("_Result")
_SIZES, _MULTIPLES = (2, 5, 3), (1, 3, 2)
"""Sizes that are traced to extrapolate others; or factors of the least size, if micro-batches must be multiples of it.
The last one is left out where the plan's own parts, traced instead, agree with the other two. A single sample is not
traced: it often runs other operators, since its dimension is squeezed or broadcast."""

Choose = Callable[[Callable[[int], Trace]], tuple[int, ...]]
"""Plans by a function that extrapolates the trace of a size; returns the parts that would confirm the plan, or raises.
"""


class TracingProcess(Protocol):
    """What traces a workload on a card by requests, such as `simulation_requests.Tracer`."""

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Return the reply to a request."""
        ...

    def close(self) -> None:
        """End its process."""
        ...


@dataclass
class _Traces:
    """The traces of one way to run an update, and what they have told so far, as in `TraceCache`."""

    can_extrapolate: bool
    made: dict[tuple[int, ...], Trace] = field(default_factory=dict)
    affine: AffineTrace | None = None
    extrapolated: dict[tuple[int, ...], Trace] = field(default_factory=dict)
    notes: list[Message] = field(default_factory=list)
    warnings: list[Message] = field(default_factory=list)
    grows_quadratically: bool = False


class TraceCache:
    """Calls a tracer as rarely as possible and keeps its traces; after a failure it starts a new one.

    Attributes:
        choose: Chooses the parts to check the next extrapolation by, if set.
        share: Samples per update; no larger size is traced.
        step: The number of samples of which every micro-batch is a multiple.
        needs_whole_batch: Whether the parts of an update need each other: each schedule is traced whole, and none is
            extrapolated.
        grad_sync, savers: As in `PartsRequest`: traces of each way are kept apart.
        confirms: False if parts of two sizes are extrapolated too, and those of a fresh trial.
    """

    def __init__(
        self,
        make_tracer: Callable[[], TracingProcess],
        share: int,
        savers: tuple[str, ...] | None = None,
        *,
        confirms: bool = True,
    ) -> None:
        self._make_tracer, self.share, self.confirms = make_tracer, share, confirms
        self.choose: Choose | None = None
        self._tracer: TracingProcess | None = None
        self._sizes: tuple[int, ...] = _SIZES
        self.step = 1
        self.needs_whole_batch = False
        self.grad_sync: GradSync | None = None
        self.savers = savers
        self._by_way: dict[tuple[GradSync | None, tuple[str, ...] | None], _Traces] = {}
        self._inspections: dict[tuple[str, ...] | None, Inspection] = {}
        self._costs: dict[CountCost, UpdateCost] = {}

    @property
    def way(self) -> dict[str, Any]:
        """The fields of a `PartsRequest` beside its parts."""
        return {"needs_whole_batch": self.needs_whole_batch, "grad_sync": self.grad_sync, "savers": self.savers}

    @property
    def is_fitted(self) -> bool:
        """Whether traces are extrapolated without making another."""
        return self._traces.affine is not None

    @property
    def notes(self) -> list[Message]:
        """Sentences for the plan on sizes that cannot be extrapolated from small ones."""
        return [note for traces in self._with_these_savers for note in traces.notes]

    @property
    def warnings(self) -> list[Message]:
        """The same, if trials had relied on the extrapolation before."""
        return [warning for traces in self._with_these_savers for warning in traces.warnings]

    @property
    def grows_quadratically(self) -> bool:
        """True if some block grows with the square of the micro-batch."""
        return any(traces.grows_quadratically for traces in self._with_these_savers)

    @property
    def _with_these_savers(self) -> list[_Traces]:
        return [traces for (_, savers), traces in self._by_way.items() if savers == self.savers]

    @property
    def _traces(self) -> _Traces:
        """The traces of the way in use."""
        can_extrapolate = self.share >= max(self._sizes) and not self.needs_whole_batch
        return self._by_way.setdefault((self.grad_sync, self.savers), _Traces(can_extrapolate))

    def inspect(self, limit_seconds: float | None = None) -> Inspection:
        """Inspect the workload in the tracer, and learn which multiples its micro-batches need."""
        if self.savers not in self._inspections:
            self._inspections[self.savers] = self.call(Inspect(savers=self.savers), limit_seconds)
        inspection = self._inspections[self.savers]
        if inspection.multiple_of > 1:
            self.step = inspection.multiple_of
            self._sizes = tuple(self.step * factor for factor in _MULTIPLES)
        self.needs_whole_batch = inspection.workload.whole_batch is not None
        return inspection

    def make(self, parts: tuple[int, ...], limit_seconds: float | None = None) -> Trace:
        """Return the trace of exactly these parts, traced if it is not there yet."""
        if parts not in self._traces.made:
            self.keep(self.call(TraceParts(parts=parts, **self.way), limit_seconds))
        return self._traces.made[parts]

    def count_cost(self, limit_seconds: float | None = None) -> UpdateCost:
        """Return what an update by small micro-batches costs, of two sizes where possible."""
        pairs = self._sizes[:2], (self.step, 2 * self.step)
        pair = next((pair for pair in pairs if max(pair) <= self.share), None)
        request = CountCost(parts=(self.share,) if pair is None else (*pair, pair[0]), **self.way)
        if request not in self._costs:
            self._costs[request] = self.call(request, limit_seconds)
        return self._costs[request]

    def keep(self, made: Trace) -> None:
        """Keep a trace that was made. If it contradicts the extrapolated one, stop extrapolating."""
        self._traces.made[made.parts] = made
        if self._traces.affine is not None and not _agrees(self._traces.affine, made):
            sizes = list(self._traces.affine.sizes)
            self._traces.affine, self._traces.can_extrapolate = None, False
            self._traces.warnings.append(message("trace_differs", parts=list(made.parts), sizes=sizes))

    def traces_of(self, parts: tuple[int, ...], fresh: bool, limit_seconds: float | None = None) -> list[Trace]:
        """Return the traces for a trial of `parts`; for a fresh one the smallest part is traced, not extrapolated.

        They are those of consecutive pairs; of threes where gradients wait for the last part, since a part that is
        neither the first nor the last then adds to all of them and lets go of none.
        """
        length = 3 if self.grad_sync == "last" else 2
        several = len(parts) > length and not self.needs_whole_batch
        pairs = {parts[at : at + length]: None for at in range(len(parts) - length + 1)} if several else {parts: None}
        traces, deadline = [], Deadline(limit_seconds)
        for pair in sorted(pairs, key=sum):  # The first trace that is made shows if the others can be extrapolated.
            as_traced = self.confirms and (pair[0] != pair[-1] or (fresh and min(pair) == min(parts)))
            extrapolates = len(pair) == 2 and not as_traced
            trace = self.extrapolate(*pair, limit_seconds=deadline.left_seconds) if extrapolates else None
            traces.append(trace or self.make(pair, deadline.left_seconds))
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
        return self._traces.made.get(trace.parts) is trace

    def extrapolate(self, *pair: int, limit_seconds: float | None = None) -> Trace | None:
        """Return the extrapolated trace of two parts, or of two of one size; None if it cannot be extrapolated."""
        if not self._traces.can_extrapolate or min(pair) < min(self._sizes):
            return None
        try:
            self._traces.affine = affine = self._traces.affine or self._fit_affine(limit_seconds)
            if len(set(pair)) > 1 and affine.of_second is None:
                return None
            return self._extrapolate(affine, *dict.fromkeys(pair))
        except NotAffineError as error:
            self._traces.affine, self._traces.can_extrapolate = None, False
            self._traces.notes.append(message("not_extrapolated", error=error.message))
            return None

    def _fit_affine(self, limit_seconds: float | None) -> AffineTrace:
        deadline, choose = Deadline(limit_seconds), self.choose
        self.choose = None

        def make(parts: tuple[int, ...]) -> Trace:
            return self.make(parts, deadline.left_seconds)

        *first, last = [(size, size) for size in self._sizes]
        traces = [make(parts) for parts in first]
        if not self.confirms:
            affine = self._fit_pairs(traces, make)
        else:
            affine = None if choose is None else self._fit_checked(traces, choose, make)
        if affine is None:
            traces.append(make(last))
            self._traces.grows_quadratically = grows_quadratically(traces)
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
        if len(pair) == 2 and pair not in self._traces.made and min(pair) >= min(affine.sizes):
            if _agrees(affine, make(pair)):
                return affine
            del self._traces.made[pair]  # The trial of it, if there is one, tells of the difference.
        self._traces.extrapolated.clear()
        return None

    def _fit_pairs(self, traces: list[Trace], make: Callable[[tuple[int, ...]], Trace]) -> AffineTrace | None:
        """Fit two traces, and check them by one of two parts, of the second and the third size; None if it disagrees.

        It tells as much as another small size, and the parts apart.
        """
        try:
            return tell_parts_apart(fit_affine_trace(traces), make(self._sizes[1:]))
        except NotAffineError:
            return None

    def _extrapolate(self, affine: AffineTrace, *parts: int) -> Trace:
        if parts not in self._traces.extrapolated:
            self._traces.extrapolated[parts] = affine.at(*parts)
        return self._traces.extrapolated[parts]

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


class CardFleet(Generic[_Device]):
    """The devices of many cards. Cards that answer alike share their traces, and one process makes all of them.

    Args:
        make_tracer: Starts the process that traces the workload on a card, of which others may share the traces.
        make_device: Makes the device of a card from traces, and from replays that cards may have in common.
        share, confirms: As of `TraceCache`.
    """

    def __init__(
        self,
        make_tracer: Callable[[Card, tuple[Card, ...]], TracingProcess],
        make_device: Callable[[Card, TraceCache, Replays], _Device],
        share: int,
        *,
        confirms: bool = False,
    ) -> None:
        self._make_tracer, self._make_device = make_tracer, make_device
        self._share, self._confirms = share, confirms
        self._replays = Replays()
        self._tracer: TracingProcess | None = None
        self._traced: _CardGroup | None = None

    def each(self, cards: Sequence[Card], use: Callable[[Card, _Device], _Result]) -> Iterator[tuple[Card, _Result]]:
        """Use the device of each card; those that no trace tells apart come together."""
        waiting = list(cards)
        while waiting:
            group = _CardGroup(self, waiting[0], waiting[1:])
            traces = TraceCache(lambda group=group: group, self._share, confirms=self._confirms)  # type: ignore[misc]
            for card in (group.card, *group.alike):
                if not group.is_alike(card):
                    continue
                result = use(card, self._make_device(card, traces, self._replays))
                if group.is_alike(card):  # Else what was traced for this card has told it from that of the group.
                    waiting.remove(card)
                    yield card, result

    def call(self, group: _CardGroup, request: Request[Reply], limit_seconds: float | None) -> Reply:
        """Call the process as the card of a group, and learn which cards would have had another answer."""
        if self._tracer is not None and self._traced is not group:
            if self._tracer.call(UseCard(card=group.card, others=group.alike)):
                self._traced = group
            else:  # Something in the process keeps an answer of another card.
                self.close()
        if self._tracer is None:
            self._tracer, self._traced = self._make_tracer(group.card, group.alike), group
        reply = self._tracer.call(request, limit_seconds)
        names = self._tracer.call(ListAlike())
        group.alike = tuple(card for card in group.alike if card.name in names)
        return reply

    def close(self) -> None:
        """End the process, if it runs."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()


class _CardGroup:
    """A card, and the cards that answered alike whatever was traced so far: the process of their `TraceCache`."""

    def __init__(self, fleet: CardFleet[Any], card: Card, others: Sequence[Card]) -> None:
        self._fleet, self.card, self.alike = fleet, card, tuple(others)

    def is_alike(self, card: Card) -> bool:
        return card == self.card or card in self.alike

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        return self._fleet.call(self, request, limit_seconds)

    def close(self) -> None:
        """End the process after a failure; what it was asked of the card is not known, so nothing is shared."""
        self.alike = ()
        self._fleet.close()
