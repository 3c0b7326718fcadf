"""The traces of one workload: those that were made, those that follow from them, and cards that share them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from autoaccum.devices.base import Inspection
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.simulated.simulation_requests import CountCost, ListAlike, TraceParts, Tracer, UseCard
from autoaccum.devices.trial_requests import Inspect, PartsRequest
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

_Result = TypeVar("_Result")

Choose = Callable[[Callable[[int], Trace]], tuple[int, ...]]
"""Plans by a function that extrapolates the trace of a size; returns the parts that would confirm the plan, or raises.
"""


@dataclass
class _Traces:
    """The traces of one way to run an update.

    Attributes:
        made: Those that were made, by their parts.
        affine: The function that extrapolates others; None: not known yet, or refuted.
        at: `affine.at`, which keeps its traces.
        refuted: Whether larger sizes do not follow from small ones.
        messages: What was learnt on the way: why sizes are not extrapolated, and whether the loss compares samples.
        cost: The cost of an update, once it is counted.
    """

    made: dict[tuple[int, ...], Trace] = field(default_factory=dict)
    affine: AffineTrace | None = None
    at: Callable[..., Trace] | None = None
    refuted: bool = False
    messages: list[Message] = field(default_factory=list)
    cost: UpdateCost | None = None

    def refute(self, why: Message) -> None:
        """Extrapolate no more."""
        self.affine = self.at = None
        self.refuted = True
        self.messages.append(why)


class TraceCache:
    """Calls a tracer as rarely as possible and keeps its traces; after a failure it starts a new one.

    Attributes:
        rank_samples: Samples per update; no larger size is traced.
        step: The number of samples of which every micro-batch is a multiple.
        needs_whole_batch: Whether the parts of an update need each other: each schedule is traced whole, and none is
            extrapolated.
        grad_sync, savers: As in `PartsRequest`: traces of each way are kept apart.
        confirms: False if parts of two sizes are extrapolated too, and those of a fresh trial.
        replays: The replays of all cards that share the tracer (`run_on_cards`); None: one card has it to itself.
        alike: The other cards that have answered alike so far, so that these traces are theirs, too.

    Args:
        make_tracer: Starts a process that traces the workload on the card.
        tracer: Such a process, if there is one.
    """

    def __init__(
        self,
        make_tracer: Callable[[], Tracer],
        rank_samples: int,
        *,
        confirms: bool = True,
        replays: Replays | None = None,
        alike: tuple[Card, ...] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self._make_tracer, self._tracer = make_tracer, tracer
        self.rank_samples, self.confirms, self.replays, self.alike = rank_samples, confirms, replays, alike
        self.step = 1
        self.needs_whole_batch = False
        self.grad_sync: GradSync | None = None
        self.savers: tuple[str, ...] | None = None
        self.findings: tuple[Message, ...] = ()
        self._by_way: dict[tuple[tuple[str, ...] | None, GradSync | None], _Traces] = {}
        self._inspections: dict[tuple[str, ...] | None, Inspection] = {}

    @property
    def messages(self) -> list[Message]:
        """What was learnt from the traces with these savers (`_Traces.messages`)."""
        ways = [traces for (savers, _), traces in self._by_way.items() if savers == self.savers]
        return [told for traces in ways for told in traces.messages]

    @property
    def _traces(self) -> _Traces:
        """The traces of the way in use."""
        return self._by_way.setdefault((self.savers, self.grad_sync), _Traces())

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """The `small_sizes`; the last one is left out where the plan's own parts, traced instead, agree."""
        return small_sizes(self.step)

    def inspect(self, deadline: Deadline) -> Inspection:
        """Inspect the workload in the tracer, and learn which multiples its micro-batches need."""
        if self.savers not in self._inspections:
            self._inspections[self.savers] = self.call(Inspect(savers=self.savers), deadline)
        inspection = self._inspections[self.savers]
        self.step = inspection.multiple_of
        self.needs_whole_batch = inspection.workload.whole_batch is not None
        return inspection

    def count_cost(self, deadline: Deadline) -> UpdateCost:
        """Return what an update by small micro-batches costs, of two sizes where possible."""
        if self._traces.cost is None:
            pairs = self._sizes[:2], (self.step, 2 * self.step)
            pair = next((pair for pair in pairs if max(pair) <= self.rank_samples), None)
            self._traces.cost = self.ask(
                CountCost, (self.rank_samples,) if pair is None else (*pair, pair[0]), deadline
            )
        return self._traces.cost

    def ask(self, kind: type[PartsRequest[Reply]], parts: tuple[int, ...], deadline: Deadline, **fields: Any) -> Reply:
        """Return the reply of the tracer to a request about `parts`, run in the way in use."""
        way: dict[str, Any] = {
            "needs_whole_batch": self.needs_whole_batch,
            "grad_sync": self.grad_sync,
            "savers": self.savers,
        }
        return self.call(kind(parts=parts, **way, **fields), deadline)

    def call(self, request: Request[Reply], deadline: Deadline) -> Reply:
        """Call the tracer and start it if there is none; after a failure the next call starts a new one."""
        try:
            if self._tracer is None:
                self._tracer = self._make_tracer()
            reply = self._tracer.call(request, deadline.left_seconds)
            self.findings = self._tracer.findings
            if self.alike:
                names = self._tracer.call(ListAlike())
                self.alike = tuple(card for card in self.alike if card.name in names)
            return reply
        except DoesNotFitError as error:  # The host ran out of memory, not the card.
            self.end_tracer()
            raise NotMeasuredError(
                error.message, hint="trace on a machine with more memory, or take a smaller --max-micro-batch"
            ) from None
        except AutoaccumError:
            self.end_tracer()
            raise

    def make(self, parts: tuple[int, ...], deadline: Deadline) -> Trace:
        """Return the trace of exactly these parts, traced if it is not there yet."""
        if parts not in self._traces.made:
            self.keep(self.ask(TraceParts, parts, deadline))
        return self._traces.made[parts]

    def keep(self, made: Trace) -> None:
        """Keep a trace that was made. If it contradicts the extrapolated one, stop extrapolating."""
        traces = self._traces
        traces.made[made.parts] = made
        if traces.affine is not None and not _agrees(traces.affine, made):
            traces.refute(message("trace_differs", parts=list(made.parts), sizes=list(traces.affine.sizes)))

    @property
    def made_of_equal_parts(self) -> list[Trace]:
        """The traces that were made of two micro-batches of one size."""
        return [made for parts, made in self._traces.made.items() if len(parts) == 2 and parts[0] == parts[1]]

    def was_traced(self, trace: Trace) -> bool:
        """Return whether this trace was made by the tracer, not extrapolated."""
        return self._traces.made.get(trace.parts) is trace

    def traces_of(self, parts: tuple[int, ...], deadline: Deadline, *, fresh: bool) -> list[Trace]:
        """Return the traces for a trial of `parts`; for a fresh one the smallest part is traced, not extrapolated.

        They are those of consecutive pairs; of threes where gradients wait for the last part, since a part that is
        neither the first nor the last then adds to all of them and lets go of none.
        """
        length = len(parts) if self.needs_whole_batch else 3 if self.grad_sync == "last" else 2
        groups = dict.fromkeys(parts[at : at + length] for at in range(max(1, len(parts) - length + 1)))
        traces = []
        for group in sorted(groups, key=sum):  # The first trace that is made shows if the others can be extrapolated.
            as_traced = self.confirms and (group[0] != group[-1] or (fresh and min(group) == min(parts)))
            trace = None if as_traced or len(group) != 2 else self.extrapolate(group, deadline)
            traces.append(trace or self.make(group, deadline))
        return traces

    def extrapolate(self, pair: tuple[int, ...], deadline: Deadline, choose: Choose | None = None) -> Trace | None:
        """Return the extrapolated trace of two parts, or of two of one size; None if it cannot be extrapolated.

        The first call traces small sizes, if there is time left; `choose` chooses parts to check them by.
        """
        traces, sizes = self._traces, self._sizes
        if traces.refuted or self.needs_whole_batch or self.rank_samples < max(sizes) or min(pair) < min(sizes):
            return None
        try:
            if traces.affine is None or traces.at is None:
                if deadline.is_over:
                    return None
                traces.affine = self._fit(deadline, choose)
                traces.at = cache(traces.affine.at)
            if len(set(pair)) > 1 and traces.affine.of_second is None:
                return None
            return traces.at(*dict.fromkeys(pair))
        except NotAffineError as error:
            traces.refute(message("not_extrapolated", error=error.message))
            return None

    def _fit(self, deadline: Deadline, choose: Choose | None) -> AffineTrace:
        """Fit the traces of two sizes, checked by a third trace: of other parts if they can tell more, else of a size.

        Raises:
            NotAffineError: Three sizes are not affine.
        """
        first, second, third = self._sizes
        traces = [self.make((size, size), deadline) for size in (first, second)]
        affine = None
        if not self.confirms:
            with suppress(NotAffineError):  # Two parts of different sizes are told apart.
                affine = tell_parts_apart(fit_affine_trace(traces), self.make((second, third), deadline))
        elif choose is not None:
            affine = self._fit_checked(traces, choose, deadline)
        if affine is None:
            traces.append(self.make((third, third), deadline))
            if grows_quadratically(traces):
                self._traces.messages.append(message("compares_samples"))
            affine = fit_affine_trace(traces)
        return affine

    def _fit_checked(self, traces: list[Trace], choose: Choose, deadline: Deadline) -> AffineTrace | None:
        """Fit two traces, and check them by that of the parts that `choose` chooses; None if it cannot, or disagrees.

        A plan traces those parts anyway, and they tell as much as another small size.
        """
        try:
            affine = fit_affine_trace(traces)
            pair = choose(affine.at)[-2:]
        except AutoaccumError:
            return None
        if len(pair) != 2 or pair in self._traces.made or min(pair) < min(affine.sizes):
            return None
        if _agrees(affine, self.make(pair, deadline)):
            return affine
        del self._traces.made[pair]  # The trial of it, if there is one, tells of the difference.
        return None

    def close(self) -> None:
        """End the tracer's process, unless other cards share it; the next device chooses anew how updates run."""
        self.grad_sync = self.savers = None
        if self.replays is None:
            self.end_tracer()

    def end_tracer(self) -> None:
        """End the tracer's process; what was asked of the card in a failed call is not known, so no card is alike."""
        tracer, self._tracer, self.alike = self._tracer, None, ()
        if tracer is not None:
            tracer.close()

    def hand_on(self, card: Card, others: tuple[Card, ...]) -> Tracer | None:
        """Return the tracer, for another card from now on; None if it has ended, or keeps what this card answered."""
        with suppress(AutoaccumError):
            if self._tracer is not None and self._tracer.call(UseCard(card=card, others=others)):
                return self._tracer
        self.end_tracer()
        return None


def small_sizes(step: int) -> tuple[int, int, int]:
    """Return the sizes that are traced to extrapolate others, multiples of `step`.

    A single sample is not traced: it often runs other operators, since its dimension is squeezed or broadcast.
    """
    return (2, 5, 3) if step == 1 else (step, 3 * step, 2 * step)


def _agrees(affine: AffineTrace, made: Trace) -> bool:
    """Return whether a trace equals the extrapolated one; the last update may have blocks of either size."""
    if len(made.parts) != 2 or min(made.parts) < min(affine.sizes):
        return True
    try:
        tell_parts_apart(affine, made)
    except NotAffineError:
        return False
    return True


def run_on_cards(
    cards: Sequence[Card],
    run: Callable[[Card, TraceCache], _Result],
    make_tracer: Callable[[Card, tuple[Card, ...]], Tracer],
    rank_samples: int,
    *,
    confirms: bool = False,
    kind: type[TraceCache] = TraceCache,
) -> Generator[tuple[Card, _Result], None, None]:
    """Run something on each card; cards that answer alike share their traces, and come together.

    One process makes the traces of all cards, unless it keeps what a card has answered. It ends with the generator.

    Args:
        cards: The cards.
        run: Returns the result of a card, from its traces.
        make_tracer: Starts a process that traces the workload on a card, of which others may share the traces.
        rank_samples: As of `TraceCache`.
        confirms: As of `TraceCache`.
        kind: The class of the traces.
    """
    waiting, replays = list(cards), Replays()
    traces: TraceCache | None = None
    try:
        while waiting:
            first, *others = waiting
            alike = tuple(others)
            tracer = None if traces is None else traces.hand_on(first, alike)
            start = partial(make_tracer, first, alike)
            traces = kind(start, rank_samples, confirms=confirms, replays=replays, alike=alike, tracer=tracer)
            for card in (first, *others):
                if card in (first, *traces.alike):
                    result = run(card, traces)
                    if card in (first, *traces.alike):  # Else its traces have told it from the first one.
                        waiting.remove(card)
                        yield card, result
    finally:
        if traces is not None:
            traces.end_tracer()
