"""Traces of a command on a simulated card: each is a run of the command, in processes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, TypeAlias

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.command.command_runs import CommandRun, check_ran, inspection_of
from autoaccum.devices.command.observations import Observations
from autoaccum.devices.command.settings import ProcessReport, SimulatedRun
from autoaccum.devices.simulated.simulation_requests import (
    CountCost,
    LabelParts,
    ListAlike,
    SuggestChanges,
    Tracer,
    UseCard,
)
from autoaccum.devices.simulated.trace_cache import Choose, TraceCache, small_sizes
from autoaccum.devices.trial_requests import Inspect, PartsRequest
from autoaccum.errors import WorkloadError
from autoaccum.messages import message
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import Amount, Trace, UpdateCost
from autoaccum.simulation.tracing.trace_scaling import AffineTrace, fit_affine_trace
from autoaccum.sources.command import CommandSource

Purpose: TypeAlias = Literal["trace", "label", "cost"]

_SAME_BYTES = 0.01
"""The share by which the tensors of a run may differ from those that small runs let expect."""


class CommandTracer(Tracer):
    """Answers the requests of `simulation_requests` by runs of a command on a simulated card.

    The runs of the two small sizes that others are extrapolated from begin together.

    Args:
        settings: The settings that all trials share.
        observations: What earlier runs have told.
        card: The card.
        others: Cards that may share the traces.
    """

    def __init__(
        self, settings: TrialSettings, observations: Observations, card: Card, others: tuple[Card, ...] = ()
    ) -> None:
        self._settings, self._observations, self._card, self._others = settings, observations, card, others
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
            small = self._begin(small_sizes(step)[:2], "trace", limit_seconds)
            report, seen = self._report(small[0] if small else self._observations.parts(step), "trace", limit_seconds)
            return inspection_of(self._settings, report, cautions=seen.notices, notes=seen.notes)
        if isinstance(request, ListAlike):
            return tuple(self._alike)
        if isinstance(request, UseCard):
            return False
        if isinstance(request, SuggestChanges):
            return ()
        assert isinstance(request, PartsRequest)
        if isinstance(request, CountCost):
            return self._count_cost(sorted({*request.parts}), limit_seconds)
        if isinstance(request, LabelParts):
            return self._report(request.parts, "label", limit_seconds)[1].labelled
        return self._report(request.parts, "trace", limit_seconds)[1].trace

    def _count_cost(self, sizes: Sequence[int], limit_seconds: float | None) -> UpdateCost:
        """Return the cost of an update, told from runs of one or two sizes."""
        told = self._begin(sizes, "cost", limit_seconds)
        costs = [cost for parts in told if (cost := self._report(parts, "cost", limit_seconds)[1].cost) is not None]
        return costs[0] if len(costs) == 1 else tell_cost(costs, sizes)

    def _begin(self, sizes: Sequence[int], purpose: Purpose, limit_seconds: float | None) -> list[tuple[int, ...]]:
        """Begin the runs of these sizes, as far as there are samples, and return their parts."""
        told = [self._observations.parts(size) for size in sizes if size <= self._settings.rank_samples]
        for parts in told:
            self._running[parts, purpose] = self._start(parts, purpose, limit_seconds)
        return told

    def _start(self, parts: tuple[int, ...], purpose: Purpose, limit_seconds: float | None) -> CommandRun:
        watch: dict[str, Any] = {"card": self._card, "others": self._others, "purpose": purpose}
        world_size = self._settings.options.world_size
        return CommandRun(self._settings, parts, limit_seconds, world_size=world_size, **watch)

    def _report(
        self, parts: tuple[int, ...], purpose: Purpose, limit_seconds: float | None
    ) -> tuple[ProcessReport, SimulatedRun]:
        """Return the report of a run of these parts, which begins now if it has not begun, and what it recorded."""
        report = self._known.get(parts) if purpose == "trace" else None
        if report is None:
            owner = f"the simulated {self._card.name}"
            run = self._running.pop((parts, purpose), None) or self._start(parts, purpose, limit_seconds)
            with closing(run):
                trial, seen = run.finish(owner)
            report = check_ran(self._observations.judge(trial, seen), seen, owner)
            self.findings = self._observations.warnings(parts, report) or self.findings
            if report.simulated and report.simulated.trace and not report.simulated.trace.events:
                hint = "let it train on cuda, by an option of its own such as --device cuda"
                raise WorkloadError(f"the script puts nothing on the simulated {self._card.name}", hint=hint)
        assert report.simulated is not None
        self._alike &= set(report.simulated.alike)
        if purpose == "trace":
            self._known[parts] = report
        return report, report.simulated


class CommandTraces(TraceCache):
    """The traces of a command, which runs whole for each.

    Two small sizes give all others, and the run that confirms a size checks them.
    """

    def traces_of(self, parts: tuple[int, ...], deadline: Deadline, *, fresh: bool) -> list[Trace]:
        """As `TraceCache.traces_of`."""
        if fresh and self.confirms:
            return [self.make(parts, deadline)]
        alike = self._small_parts(max(parts))
        trace = self.extrapolate(alike, deadline) if parts[:2] == alike else None
        return [trace or self.make(parts, deadline)]

    def keep(self, made: Trace) -> None:
        """As `TraceCache.keep`; one whose tensors take other memory than expected ends the extrapolation."""
        traces, size = self._traces, max(made.parts)
        traces.made[made.parts] = made
        if traces.affine is None or size <= max(traces.affine.sizes) or made.parts[:2] != self._small_parts(size):
            return
        expected, seen = (_most_held(trace) for trace in (traces.affine.at(size), made))
        if abs(expected - seen) > _SAME_BYTES * seen:
            traces.refute(message("trace_differs", parts=list(made.parts), sizes=list(traces.affine.sizes)))

    def _small_parts(self, size: int) -> tuple[int, ...]:
        """Return the parts of small runs: two if the command can be told; one part needs no room for a sum."""
        command = CommandSource.of(self._inspections[self.savers].workload.command)
        return (size, size) if command.takes_iter_size else (size,)

    def _fit(self, deadline: Deadline, choose: Choose | None) -> AffineTrace:
        return fit_affine_trace([self.make(self._small_parts(size), deadline) for size in self._sizes[:2]])


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
