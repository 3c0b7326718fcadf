"""The simulated device: predicts trials on a card by replaying traces in a model of PyTorch's allocator."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from autoaccum.devices.base import (
    Capability,
    ChooseParts,
    Device,
    Forecast,
    Inspection,
    Outcome,
    Prediction,
    Trial,
)
from autoaccum.devices.budget import CARD_RESERVE, AvailableMemory, Deadline, choose_budget
from autoaccum.devices.explanation import MemoryReport
from autoaccum.devices.simulated.simulation_requests import LabelParts, Tracer
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message, message
from autoaccum.options import GradSync
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings, read_settings
from autoaccum.simulation.cards import Card, CardRates, all_cards, card_rates, context_memory
from autoaccum.simulation.trace_records import Trace, UpdateCost
from autoaccum.spec import DeviceFacts
from autoaccum.units import MIB, MemorySize, format_bytes

if TYPE_CHECKING:
    from autoaccum.devices.simulated.breakdown import MemoryBreakdown
    from autoaccum.simulation.allocator.replay import Replayer, Replays


_BEST_FIRST: Final[tuple[Outcome, ...]] = ("ok", "tight", "oom")
_NCCL_BYTES = 688 * MIB
"""What NCCL allocates for a group of ranks outside PyTorch's allocator, as reported for groups of four A100s with
NVLink (NVIDIA/nccl#964). It grows with the number of channels, and not with that of ranks beyond two machines
(NVIDIA/nccl#864)."""


class SimulatedDevice(Device):
    """Predicts trials on a card that does not have to be present.

    The budget limits the segments that PyTorch's caching allocator would get from the driver. A trial replays the trace
    of its parts in an allocator of that capacity: the outcome is `ok` if the replay succeeds, `tight` if every update
    would have to release cached memory and retry, and `oom` if it fails. Peaks come from a replay without a limit.
    Traces of larger sizes are extrapolated from small ones where all sizes are affine in the batch. A fresh trial is
    traced with its own parts (`Trial.fresh`); with more than two, the pairs with the smallest part are traced. Parts
    that need each other are always traced together.

    Args:
        traces: Starts a process that traces the workload on the card; or traces that are shared with other devices, and
            closed by their owner.
        share: Samples per update on this rank.
        torch_version: The tracer's release of PyTorch, such as (2, 15).
        memory, reserve: See `choose_budget`.
        communicators: The groups of ranks that exchange tensors, for each of which NCCL takes memory of its own.
        environment: Environment variables with settings of PyTorch's allocator and of CUDA; None: this process's.
        replays: Replays that are shared with other devices.

    Raises:
        UsageError: The budget is more than the card has, or a setting cannot be simulated.
    """

    capabilities = frozenset[Capability]({"explain", "predict"})

    def __init__(
        self,
        card: Card,
        traces: Callable[[], Tracer] | TraceCache,
        *,
        share: int,
        torch_version: tuple[int, int],
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
        communicators: int = 0,
        environment: Mapping[str, str] | None = None,
        replays: Replays | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        if environment.get("CUDA_MODULE_LOADING", "LAZY") != "LAZY":
            raise UsageError("CUDA_MODULE_LOADING=EAGER is not simulated", hint="unset it: PyTorch loads lazily")
        self._card, self._context = card, context_memory(card)
        self._settings = read_settings(environment, card.total_bytes)
        self._free_bytes = max(0, card.total_bytes - self._context.bytes)
        bound = f"{card.name} (simulated, {format_bytes(self._context.bytes)} of it for its context)"
        supply = AvailableMemory(card.total_bytes, self._free_bytes, bound)
        self._limit_bytes = choose_budget(supply, memory, reserve, default_reserve=CARD_RESERVE)
        self._shares_traces = isinstance(traces, TraceCache)
        self._traces = traces if isinstance(traces, TraceCache) else TraceCache(traces, share)
        self._torch_version = torch_version
        self._nccl_bytes = communicators * _NCCL_BYTES
        self._is_sharded = False
        self._replays = replays

    @property
    def name(self) -> str:
        """The card and `(simulated)`, such as `rtx3090 (simulated)`."""
        return f"{self._card.name} (simulated)"

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes."""
        return self._limit_bytes

    @property
    def allocator_settings(self) -> dict[str, Any]:
        """The allocator's settings that differ from PyTorch's defaults."""
        return _changes(self._settings)

    def describe(self) -> DeviceFacts:
        """As `Device`, with the assumed properties of the card."""
        card = self._card
        return DeviceFacts(
            name=self.name,
            kind="simulated",
            card=card.title if card in all_cards() else None,
            total_bytes=card.total_bytes,
            free_bytes=self._free_bytes,
            properties={
                "capability": list(card.capability),
                "multiprocessors": card.multiprocessors,
                "source": card.source,
                "context_bytes": self._context.bytes,
                "context_uncertainty_bytes": self._context.uncertainty_bytes,
                "context_source": self._context.source,
                "limit_bytes": self.limit_bytes,
                "allocator": self.allocator_settings,
                "enforced_by": "replay of the caching allocator with that capacity",
                "peak": "the most the replayed allocator holds where nothing limits it, whole segments",
            },
        )

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load the workload and check what can be checked without computing values."""
        inspection = self._traces.inspect(limit_seconds)
        self._is_sharded = inspection.parallel == "fsdp2"
        return inspection

    def use_grad_sync(self, grad_sync: GradSync | None) -> None:
        """As `Device`."""
        self._traces.grad_sync = grad_sync

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `Device`."""
        self._traces.savers = savers

    @property
    def rates(self) -> CardRates:
        """As `Device`."""
        return card_rates(self._card)

    def count_cost(self, *, limit_seconds: float | None = None) -> UpdateCost:
        """As `Device`, by one update of small micro-batches, the second one larger."""
        return self._traces.count_cost(limit_seconds)

    def _run_trial(self, parts: tuple[int, ...], fresh: bool, limit_bytes: int, limit_seconds: float | None) -> Trial:
        """Predict a trial; if `fresh`, from a trace of these very parts."""
        began = time.monotonic()
        try:
            traces = self._traces.traces_of(parts, fresh, limit_seconds)
        except (WorkloadError, NotMeasuredError) as error:
            return _failed(error, parts, time.monotonic() - began, limit_seconds)
        trial = predict_trial(self._replayer, traces, limit_bytes)
        traced = any(self._traces.was_traced(trace) for trace in traces)
        return dataclasses.replace(
            trial,
            parts=parts,
            fresh=traced or (fresh and not self._traces.confirms),
            seconds=time.monotonic() - began,
            host_bytes=max((trace.host_bytes for trace in traces if trace.host_bytes), default=None),
        )

    def forecast(self, *, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> Forecast:
        """Trace small sizes, which trials need anyway, and forecast the peaks of larger ones from them."""
        if choose is not None:
            self._traces.choose = lambda at: choose(
                lambda size: predict_trial(self._replayer, [at(size)], self.limit_bytes)
            )
        deadline = Deadline(limit_seconds)
        if not deadline.is_over:
            with suppress(WorkloadError, NotMeasuredError):  # The trial of that size reports why.
                self.fit(deadline.left_seconds)
        return Forecast(peak_bytes=partial(self._peak_bytes, deadline=deadline), alone=tuple(self._traces.notes))

    def fit(self, limit_seconds: float | None = None) -> str | None:
        """Trace small sizes; return why larger ones do not follow from them, None if they do.

        Raises:
            WorkloadError, NotMeasuredError: They cannot be traced.
        """
        trace = self._traces.extrapolate(max(2, self._traces.step), limit_seconds=limit_seconds)
        return None if trace is not None else "; ".join(map(str, self._traces.notes)) or "there are too few samples"

    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """Return the prediction for `parts` after a fresh trial of them, whether they fit or not."""
        traces = self._traces.traces_of(parts, fresh=True)
        min_budget_bytes = self._replayer.min_budget_bytes(traces, self.limit_bytes)
        sized = max(map(self._replayer.with_sizes, traces), key=lambda sized: sized.uncertainty_bytes)
        uncertainty_bytes = self._context.uncertainty_bytes + sized.uncertainty_bytes + self._nccl_bytes
        measurable = not self._is_sharded  # Trials on a card run no model that ranks shard.
        warnings = list[Message]()
        if self._traces.grows_quadratically and len(parts) > 1:
            warnings.append(message("compares_samples"))
        if 0 <= (room_bytes := self.limit_bytes - min_budget_bytes) < uncertainty_bytes:
            reserve = -(-uncertainty_bytes // (100 * MIB)) * 100
            warnings.append(
                message(
                    "narrow_fit",
                    room_bytes=room_bytes,
                    uncertainty_bytes=uncertainty_bytes,
                    reserve=f"{reserve}MiB" if 2 * reserve * MIB < self.limit_bytes else None,
                    measurable=measurable,
                )
            )
        covered = message(
            "uncertainty",
            uncertainty_bytes=uncertainty_bytes,
            context_bytes=self._context.bytes,
            workspace_bytes=sized.uncertainty_bytes,
            rules=list(sized.guessed),
            nccl_bytes=self._nccl_bytes,
        )
        card = self._card
        return Prediction(
            min_budget_bytes=min_budget_bytes,
            uncertainty_bytes=uncertainty_bytes,
            warnings=(*warnings, *self._traces.warnings),
            notes=(
                message("predicted", uncertainty_bytes=uncertainty_bytes, measurable=measurable),
                *_notes_on_values(traces),
                *self._traces.notes,
                *(() if card.measured else (message("card_assumed", card=card.title, source=card.source),)),
                covered,
            ),
        )

    def explain(
        self,
        parts: tuple[int, ...],
        *,
        limit_seconds: float | None = None,
        context_bytes: int | None = None,
        **options: bool,
    ) -> MemoryReport:
        """Explain the memory of `parts` after a fresh trial of them; `options` are those of `Explainer.explain`.

        `context_bytes`: what the process holds outside of the allocator, if that was measured.
        """
        from autoaccum.devices.simulated.explainer import Explainer

        deadline = Deadline(limit_seconds)
        traces = self._traces.traces_of(parts, True, deadline.left_seconds)
        outside_bytes = self._context.bytes if context_bytes is None else context_bytes
        explainer = Explainer(self.name, outside_bytes, self.limit_bytes, self._traces, self._replayer)
        return explainer.explain(traces, deadline, **options)

    def break_down(self, parts: tuple[int, ...], settings: AllocatorSettings) -> tuple[MemoryBreakdown, int]:
        """Return the memory of an update by exactly these parts, and its peak under these settings of the allocator.

        Raises:
            WorkloadError, NotMeasuredError: The parts cannot be traced.
        """
        from autoaccum.devices.simulated.breakdown import MemoryBreakdown
        from autoaccum.simulation.allocator.replay import Replayer

        labelled = self._traces.call(LabelParts(parts=parts, **self._traces.way))
        settings = dataclasses.replace(settings, total_bytes=self._card.total_bytes)
        replayer = Replayer(self._card, settings, self._torch_version)
        sized = replayer.with_sizes(labelled.trace)
        return MemoryBreakdown(labelled, sized), replayer.peak_bytes(labelled.trace)

    def close(self) -> None:
        """End the tracer's process, if it runs, unless it is shared."""
        if self._shares_traces:
            self._traces.choose = self._traces.grad_sync = self._traces.savers = None
        else:
            self._traces.close()

    @cached_property
    def _replayer(self) -> Replayer:
        from autoaccum.simulation.allocator.replay import Replayer  # Later, so that the tracer starts sooner.

        return Replayer(self._card, self._settings, self._torch_version, self._replays)

    def _peak_bytes(self, size: int, deadline: Deadline) -> int | None:
        """Return the peak of a size that can be extrapolated, maybe of a card with equal kernels; None for others."""
        if deadline.is_over and not self._traces.is_fitted:
            return None
        try:
            trace = self._traces.extrapolate(size, limit_seconds=deadline.left_seconds)
        except (WorkloadError, NotMeasuredError):
            return None  # The trial of that size reports why.
        return None if trace is None else self._replayer.about_peak_bytes(trace)


def predict_trial(replayer: Replayer, traces: Sequence[Trace], limit_bytes: int) -> Trial:
    """Return the trial of an update within a limit from the traces of its parts: the worst outcome, the highest peaks.

    Its peaks are those without a limit; if it does not fit, maybe those of another card with equal kernels.
    """
    trials = [_predict_part(replayer, trace, limit_bytes) for trace in traces]
    return dataclasses.replace(
        max(trials, key=lambda trial: _BEST_FIRST.index(trial.outcome)),
        peak_allocated_bytes=max(trial.peak_allocated_bytes or 0 for trial in trials),
        peak_reserved_bytes=max(trial.peak_reserved_bytes or 0 for trial in trials),
    )


def _predict_part(replayer: Replayer, trace: Trace, limit_bytes: int) -> Trial:
    sized, unlimited, held = replayer.replay(trace, limit_bytes)
    trial = Trial(
        parts=trace.parts,
        outcome="ok",
        peak_allocated_bytes=unlimited.peak_allocated_bytes,
        peak_reserved_bytes=unlimited.peak_reserved_bytes,
        allocator_retries=held.retries,
    )
    if held.failed_at is not None:
        phase = sized.phase_at(held.failed_at)
        message = (
            f"micro-batch {max(trace.parts)} does not fit: {phase} requests {format_bytes(held.requested_bytes)} "
            f"more; without a limit it takes {format_bytes(unlimited.peak_reserved_bytes)}"
        )
        return dataclasses.replace(trial, outcome="oom", phase=phase, message=message)
    if held.repeat_retries:
        message = "every update would release the cache and allocate again"
        return dataclasses.replace(trial, outcome="tight", message=message)
    return trial


def _notes_on_values(traces: Sequence[Trace]) -> list[Message]:
    """Return a note for the plan on values that the step read and the CPU computed."""
    trace = max(traces, key=lambda trace: trace.reads)
    return [message("values_read", reads=trace.reads, samples=trace.batch)] if trace.reads else []


def _changes(settings: AllocatorSettings) -> dict[str, Any]:
    """Return the settings that differ from PyTorch's defaults."""
    defaults = dataclasses.asdict(AllocatorSettings(total_bytes=settings.total_bytes))
    return {name: value for name, value in dataclasses.asdict(settings).items() if value != defaults[name]}


def _failed(
    error: WorkloadError | NotMeasuredError, parts: tuple[int, ...], seconds: float, limit_seconds: float | None
) -> Trial:
    late = limit_seconds is not None and seconds >= limit_seconds
    if isinstance(error, WorkloadError):
        return Trial(parts=parts, outcome="error", message=str(error), traceback=error.user_traceback, fault="user")
    return Trial(parts=parts, outcome="error", message=str(error), fault="measurement", timed_out=late)
