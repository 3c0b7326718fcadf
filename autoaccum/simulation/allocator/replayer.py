"""Replays of traces on one card: whether a trial fits, its peak, and the least capacity it needs."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from autoaccum.devices.base import Outcome, Trial
from autoaccum.simulation.allocator.replay import ReplayResult, least_capacity, replay, reserved_over_time
from autoaccum.simulation.allocator.settings import AllocatorSettings
from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspace_rules import estimate
from autoaccum.simulation.operators.workspaces import Estimate
from autoaccum.simulation.trace_records import Phase, Trace, Workspace
from autoaccum.units import format_bytes

_BEST_FIRST: Final[tuple[Outcome, ...]] = ("ok", "tight", "oom")
_MAX_REPEATS = 8
"""The updates after which an allocator has settled, or never does: few of those observed took longer."""


@dataclass(frozen=True)
class SizedTrace:
    """A trace with the size of each block, workspaces included.

    Attributes:
        band_bytes: How far off the sum of the blocks alive may be, at most at any time.
        guessed: The rules with an unmeasured size, of blocks that count in the band.
        optional: Blocks that may find no memory, with the purpose of each (see `replay`).
    """

    trace: Trace
    sizes: tuple[int, ...]
    band_bytes: int
    guessed: tuple[str, ...]
    optional: Mapping[int, Workspace] = field(default_factory=dict)

    def phase_at(self, event: int) -> Phase:
        """Return the phase of an event; for a repeated update, that of the same event the first time."""
        last, end = self.trace.last_update, len(self.trace.events)
        if event >= end:
            event = last + (event - last) % (end - last)
        index = bisect_right(self.trace.phases, event, key=lambda phase: phase[0]) - 1
        return self.trace.phases[max(index, 0)][1]


class Replays:
    """The replays of traces, which cards have in common whose kernels take equal workspaces."""

    def __init__(self) -> None:
        self._workspaces: dict[Trace, tuple[Workspace, ...]] = {}
        self._sized: dict[tuple[Trace, tuple[Estimate, ...]], SizedTrace] = {}
        self._results: dict[tuple[Any, ...], list[ReplayResult]] = {}
        self._least: dict[tuple[Any, ...], int] = {}
        self._unlimited: dict[Trace, ReplayResult] = {}

    def unlimited(self, trace: Trace) -> ReplayResult | None:
        """Return the replay of a trace without a limit on the first card that had one; None if there was none."""
        return self._unlimited.get(trace)

    def with_sizes(self, trace: Trace, estimate_size: Callable[[Workspace], Estimate]) -> SizedTrace:
        """Return a trace with the size of each block; the same object for equal estimates of its workspaces."""
        if trace not in self._workspaces:
            self._workspaces[trace] = tuple(dict.fromkeys(size for size in trace.sizes if isinstance(size, Workspace)))
        estimates = {workspace: estimate_size(workspace) for workspace in self._workspaces[trace]}
        key = trace, tuple(estimates.values())
        if key not in self._sized:
            self._sized[key] = _with_sizes(trace, estimates)
        return self._sized[key]

    def replay(
        self, sized: SizedTrace, settings: AllocatorSettings, capacity: int | None, repeats: int = 1
    ) -> ReplayResult:
        """Replay as `replay` does, unless the result is that of an earlier one at another capacity."""
        known = self._results.setdefault((*_identity(sized, settings), capacity is None, repeats), [])
        for result in known:
            below = result.valid_below_bytes
            if capacity is None or (result.peak_reserved_bytes <= capacity and (below is None or capacity < below)):
                return result
        known.append(
            replay(
                sized.trace.events,
                sized.sizes,
                capacity=capacity,
                settings=settings,
                repeat_from=sized.trace.last_update,
                repeats=repeats,
                optional=sized.optional,
                streams=sized.trace.streams,
            )
        )
        if capacity is None:
            self._unlimited.setdefault(sized.trace, known[-1])
        return known[-1]

    def least_capacity(self, sized: SizedTrace, settings: AllocatorSettings, known: ReplayResult) -> int:
        """Return what `least_capacity` finds from a result at which the trace fits."""
        key = (*_identity(sized, settings), known)
        if key not in self._least:
            self._least[key] = least_capacity(
                sized.trace.events,
                sized.sizes,
                settings,
                sized.trace.last_update,
                known=known,
                optional=sized.optional,
                at=lambda capacity: self.replay(sized, settings, capacity),
            )
        return self._least[key]


def _identity(sized: SizedTrace, settings: AllocatorSettings) -> tuple[Any, ...]:
    """Return what decides a replay beside its capacity: the card's total only as far as a share of it is allowed."""
    return id(sized), dataclasses.replace(settings, total_bytes=None), settings.allowed_bytes


class Replayer:
    """Replays traces on one card under one release of PyTorch; cards may have the `replays` in common."""

    def __init__(
        self,
        card: Card,
        settings: AllocatorSettings,
        torch_version: tuple[int, int],
        replays: Replays | None = None,
    ) -> None:
        self._card, self._torch_version = card, torch_version
        self.settings, self._replays = settings, replays or Replays()
        self._estimates: dict[Workspace, Estimate] = {}
        self._known: dict[Trace, tuple[SizedTrace, ReplayResult]] = {}

    def with_sizes(self, trace: Trace) -> SizedTrace:
        """Return `trace` with the size of each block."""
        return self._unlimited(trace)[0]

    def peak_bytes(self, trace: Trace) -> int:
        """Return the largest number of bytes that the allocator reserves without a limit."""
        return self._unlimited(trace)[1].peak_reserved_bytes

    def least_bytes(self, traces: Sequence[Trace], limit_bytes: int) -> int:
        """Return the smallest capacity at which all traces fit: within a limit, or beyond it if they do not fit there.

        That of one is sought where it does not fit in what suffices for larger ones.
        """
        least = 0
        for trace in sorted(traces, key=self.peak_bytes, reverse=True):
            sized, unlimited = self._unlimited(trace)
            if least and self._replay_within(least, sized, unlimited, 1).fits:
                continue
            held = self._replay_within(limit_bytes, sized, unlimited)
            known = held if held.fits else unlimited
            least = max(least, self._replays.least_capacity(sized, self.settings, known))
        return least

    def held_bytes(self, trace: Trace, limit_bytes: int) -> int:
        """Return the largest number of bytes reserved within a limit, until the failure if `trace` does not fit."""
        return self._replay_within(limit_bytes, *self._unlimited(trace)).peak_reserved_bytes

    def reserved_bytes(self, trace: Trace) -> list[int]:
        """Return the bytes reserved after each event without a limit (`reserved_over_time`)."""
        sizes = self.with_sizes(trace).sizes
        return reserved_over_time(trace.events, sizes, self.settings, trace.last_update, streams=trace.streams)

    def expanding(self) -> Replayer | None:
        """Return a replayer with expandable segments; None if this one has them."""
        if self.settings.expandable_segments:
            return None
        settings = dataclasses.replace(self.settings, expandable_segments=True)
        return Replayer(self._card, settings, self._torch_version)

    def trial(self, trace: Trace, limit_bytes: int) -> Trial:
        """Return the trial of `trace` within a limit.

        Its peaks are those without a limit; if it does not fit, maybe those of another card with equal kernels.
        """
        elsewhere = None if trace in self._known else self._replays.unlimited(trace)
        if elsewhere is not None and elsewhere.peak_reserved_bytes > limit_bytes:
            sized, unlimited = self._replays.with_sizes(trace, self._estimate), elsewhere
            held = self._replay_within(limit_bytes, sized, unlimited)
            if held.fits:
                sized, unlimited = self._unlimited(trace)
        else:
            sized, unlimited = self._unlimited(trace)
            held = self._replay_within(limit_bytes, sized, unlimited)
        about: dict[str, Any] = {
            "parts": trace.parts,
            "peak_allocated_bytes": unlimited.peak_allocated_bytes,
            "peak_reserved_bytes": unlimited.peak_reserved_bytes,
            "allocator_retries": held.retries,
        }
        if held.failed_at is not None:
            phase = sized.phase_at(held.failed_at)
            message = (
                f"micro-batch {max(trace.parts)} does not fit: {phase} requests {format_bytes(held.requested_bytes)} "
                f"more; without a limit it takes {format_bytes(unlimited.peak_reserved_bytes)}"
            )
            return Trial(outcome="oom", phase=phase, message=message, **about)
        if held.repeat_retries:
            return Trial(outcome="tight", message="every update would release the cache and allocate again", **about)
        return Trial(outcome="ok", **about)

    def update(self, traces: Sequence[Trace], limit_bytes: int) -> Trial:
        """Return the trial of an update from the traces of its parts: the worst outcome, the highest peaks."""
        trials = [self.trial(trace, limit_bytes) for trace in traces]
        return dataclasses.replace(
            max(trials, key=lambda trial: _BEST_FIRST.index(trial.outcome)),
            peak_allocated_bytes=max(trial.peak_allocated_bytes or 0 for trial in trials),
            peak_reserved_bytes=max(trial.peak_reserved_bytes or 0 for trial in trials),
        )

    def _unlimited(self, trace: Trace) -> tuple[SizedTrace, ReplayResult]:
        """Return the sized trace, and its replay without a limit; both are cached."""
        if trace not in self._known:
            sized = self._replays.with_sizes(trace, self._estimate)
            self._known[trace] = sized, self._replays.replay(sized, self.settings, None)
        return self._known[trace]

    def _estimate(self, workspace: Workspace) -> Estimate:
        if workspace not in self._estimates:
            self._estimates[workspace] = estimate(workspace, self._card, self._torch_version)
        return self._estimates[workspace]

    def _replay_within(
        self, limit_bytes: int, sized: SizedTrace, unlimited: ReplayResult, repeats: int = _MAX_REPEATS
    ) -> ReplayResult:
        """Return the result within a limit; without one, an allocator has settled by the third update."""
        if unlimited.peak_reserved_bytes <= limit_bytes:
            return unlimited
        return self._replays.replay(sized, self.settings, limit_bytes, repeats)


def _with_sizes(trace: Trace, estimates: Mapping[Workspace, Estimate]) -> SizedTrace:
    sizes: list[int] = []
    bands: dict[int, int] = {}
    guessed: dict[str, None] = {}
    optional: dict[int, Workspace] = {}
    for block, size in enumerate(trace.sizes):
        if isinstance(size, int):
            sizes.append(size)
            continue
        found = estimates[size]
        sizes.append(found.bytes)
        bands[block] = found.band_bytes
        if found.optional:
            optional[block] = size
        if found.band_bytes and not found.measured:
            guessed[size.rule] = None
    changes = (bands.get(event, 0) - bands.get(~event, 0) for event in trace.events)
    return SizedTrace(trace, tuple(sizes), max(accumulate(changes), default=0), tuple(guessed), optional)
