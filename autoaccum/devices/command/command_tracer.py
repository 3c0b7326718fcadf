"""Traces of a command on a simulated card: each is a run of the command, in processes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.command.command_runs import (
    CommandRun,
    Observations,
    check_ran,
    inspection_of,
)
from autoaccum.devices.command.settings import ProcessReport
from autoaccum.devices.simulated.simulation_requests import (
    CountCost,
    LabelParts,
    ListAlike,
    SuggestChanges,
    TraceParts,
    Tracer,
    UseCard,
)
from autoaccum.devices.simulated.trace_cache import Choose, TraceCache
from autoaccum.devices.trial_requests import Inspect, PartsRequest
from autoaccum.messages import message
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import Amount, Trace, UpdateCost
from autoaccum.simulation.tracing.trace_scaling import AffineTrace, fit_affine_trace
from autoaccum.sources.command import takes_iter_size

_SAME_BYTES = 0.01
"""The share by which the tensors of a run may differ from those that small runs let expect."""


class CommandTracer(Tracer):
    """Answers the requests of `simulation_requests` by runs of a command on a simulated card.

    The runs of the two small sizes that others are extrapolated from begin together.

    Args:
        settings: The settings that all trials share.
        card: The card.
        others: Cards that may share the traces.
    """

    def __init__(self, settings: TrialSettings, card: Card, others: tuple[Card, ...] = ()) -> None:
        self._settings, self._card, self._others = settings, card, others
        self._observations = Observations.of(settings)
        self._running: dict[tuple[tuple[int, ...], str], CommandRun] = {}
        self._known: dict[tuple[int, ...], ProcessReport] = {}
        self._alike = {other.name for other in others}

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Answer a request.

        Raises:
            WorkloadError: The command fails, or does not do what it is told.
            NotMeasuredError: It cannot be simulated, or took too long.
        """
        answer: Any = self._answer(request, limit_seconds)
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End all runs."""
        while self._running:
            self._running.popitem()[1].close()

    def _answer(self, request: Request[Any], limit_seconds: float | None) -> Any:
        if isinstance(request, Inspect):
            step = self._settings.options.spec.get("multiple_of") or 1
            small = [self._observations.parts(size) for size in small_sizes(step)]
            for parts in small:
                if max(parts) <= self._settings.rank_samples:
                    self._running[parts, "trace"] = self._start(parts)
            report = self._report(small[0] if self._running else self._observations.parts(1), limit_seconds)
            assert report.simulated is not None
            seen = report.simulated
            return inspection_of(self._settings, report, cautions=seen.notices, notes=seen.notes)
        if isinstance(request, ListAlike):
            return tuple(self._alike)
        if isinstance(request, UseCard):
            return False
        if isinstance(request, SuggestChanges):
            return ()
        assert isinstance(request, PartsRequest)
        parts = request.parts
        if isinstance(request, CountCost):
            return self._count_cost(parts, limit_seconds)
        purpose = "label" if isinstance(request, LabelParts) else "trace"
        report = self._report(self._told(parts), limit_seconds, purpose)
        assert report.simulated is not None
        if isinstance(request, TraceParts):
            assert report.simulated.trace is not None
            return dataclasses.replace(report.simulated.trace, parts=parts)
        assert isinstance(request, LabelParts)
        labelled = report.simulated.labelled
        assert labelled is not None
        return dataclasses.replace(labelled, trace=dataclasses.replace(labelled.trace, parts=parts))

    def _count_cost(self, parts: tuple[int, ...], limit_seconds: float | None) -> UpdateCost:
        """Return the cost of an update, told from runs of the two sizes of `parts`."""
        told = [self._observations.parts(size) for size in sorted(set(parts))]
        for each in told:
            self._running[each, "cost"] = self._start(each, "cost")
        costs = []
        for each in told:
            simulated = self._report(each, limit_seconds, "cost").simulated
            assert simulated is not None
            assert simulated.cost is not None
            costs.append(simulated.cost)
        return costs[0] if len(costs) == 1 else tell_cost(costs, [max(each) for each in told])

    def _told(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the parts that the command can be told."""
        return parts if self._observations.source.takes_iter_size else parts[:1]

    def _start(self, parts: tuple[int, ...], purpose: str = "trace") -> CommandRun:
        watch: dict[str, Any] = {"card": self._card, "others": self._others, "purpose": purpose}
        return CommandRun(self._settings, parts, world_size=self._settings.options.world_size, **watch)

    def _report(self, parts: tuple[int, ...], limit_seconds: float | None, purpose: str = "trace") -> ProcessReport:
        """Return the report of a run of these parts, which begins now if it has not begun."""
        if purpose == "trace" and parts in self._known:
            return self._known[parts]
        run = self._running.pop((parts, purpose), None) or self._start(parts, purpose)
        owner = f"the simulated {self._card.name}"
        report = check_ran(*run.finish(owner, limit_seconds), owner)
        assert report.simulated is not None
        if (error := self._observations.check(parts, report)) is not None:
            raise error
        self._alike &= set(report.simulated.alike)
        if purpose == "trace":
            self._known[parts] = report
        return report


class CommandTraces(TraceCache):
    """The traces of a command, which runs whole for each.

    Two small sizes give all others, and the run that confirms a size checks them.
    """

    def traces_of(self, parts: tuple[int, ...], deadline: Deadline, *, fresh: bool) -> list[Trace]:
        """As `TraceCache.traces_of`."""
        size, is_alike = max(parts), len(parts) > 1 or not self._takes_iter_size
        trace = self.extrapolate((size, size), deadline) if is_alike and not (fresh and self.confirms) else None
        return [trace or self.make(parts, deadline)]

    def keep(self, made: Trace) -> None:
        """As `TraceCache.keep`; one whose tensors take other memory than expected ends the extrapolation."""
        traces, size = self._traces, max(made.parts)
        traces.made[made.parts] = made
        is_alike = len(made.parts) > 1 or not self._takes_iter_size  # One part needs no room for summed gradients.
        if traces.affine is None or size <= max(traces.affine.sizes) or not is_alike:
            return
        expected, seen = (_most_held(trace) for trace in (traces.affine.at(size), made))
        if abs(expected - seen) > _SAME_BYTES * seen:
            traces.refute(message("trace_differs", parts=list(made.parts), sizes=list(traces.affine.sizes)))

    @property
    def _takes_iter_size(self) -> bool:
        """Whether the small runs had two micro-batches in an update."""
        return takes_iter_size(self._inspections[self.savers].workload.command)

    def _fit(self, deadline: Deadline, choose: Choose | None) -> AffineTrace:
        return fit_affine_trace([self.make((size, size), deadline) for size in small_sizes(self.step)])


def small_sizes(step: int) -> tuple[int, int]:
    """Return the two sizes that others are extrapolated from, multiples of `step`.

    >>> small_sizes(1), small_sizes(8)
    ((2, 5), (8, 24))
    """
    return (2, 5) if step == 1 else (step, 3 * step)


def tell_cost(costs: Sequence[UpdateCost], sizes: Sequence[int]) -> UpdateCost:
    """Return the cost of an update from those of two sizes, each of which takes all that parts cost for its samples.

    >>> costs = [UpdateCost(flops=Amount(sample=n), moved_bytes=Amount(), host_bytes=Amount()) for n in (14.0, 12.0)]
    >>> tell_cost(costs, [2, 4]).flops
    Amount(sample=10.0, part=8.0, update=0.0)
    """
    first, second = sizes

    def amount(name: str) -> Amount:
        small, large = (getattr(cost, name) for cost in costs)
        sample = (large.sample * second - small.sample * first) / (second - first)
        return Amount(sample=sample, part=max(0.0, (small.sample - sample) * first), update=small.update)

    names = ("flops", "moved_bytes", "card_bytes", "kernels")
    return dataclasses.replace(costs[0], **{name: amount(name) for name in names})


def _most_held(trace: Trace) -> int:
    """Return the most bytes that tensors hold at once, without workspaces."""
    held = most = 0
    for event in trace.events:
        size = trace.sizes[event if event >= 0 else ~event]
        if isinstance(size, int) and size > 0:
            held += size if event >= 0 else -size
            most = max(most, held)
    return most
