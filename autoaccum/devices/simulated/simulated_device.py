"""The simulated device: predicts trials on a card by replaying traces in a model of PyTorch's allocator."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import ChooseParts, Forecast, Inspection, Prediction, Predictor, Sizes, Trial
from autoaccum.devices.budget import CARD_RESERVE, AvailableMemory, Deadline, choose_budget
from autoaccum.devices.explanation import MemoryReport
from autoaccum.devices.simulated.simulation_requests import TraceParts
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
    from autoaccum.simulation.allocator.replay import Replayer


_NCCL_BYTES = 688 * MIB
"""What NCCL allocates for a group of ranks outside PyTorch's allocator, as reported for groups of four A100s with
NVLink (NVIDIA/nccl#964). It grows with the number of channels, and not with that of ranks beyond two machines
(NVIDIA/nccl#864)."""


class SimulatedDevice(Predictor):
    """Predicts trials on a card that does not have to be present.

    The budget limits the segments that PyTorch's caching allocator would get from the driver. A trial replays the trace
    of its parts in an allocator of that capacity: the outcome is `ok` if the replay succeeds, `tight` if every update
    would have to release cached memory and retry, and `oom` if it fails. Peaks come from a replay without a limit.
    Traces of larger sizes are extrapolated from small ones where all sizes are affine in the batch. A fresh trial is
    traced with its own parts (`Trial.fresh`); with more than two, the pairs with the smallest part are traced. Parts
    that need each other are always traced together.

    Args:
        traces: The traces of the workload on the card, maybe shared with other devices.
        torch_version: The tracer's release of PyTorch, such as (2, 15).
        memory, reserve: See `choose_budget`.
        communicators: The groups of ranks that exchange tensors, for each of which NCCL takes memory of its own.
        environment: Environment variables with settings of PyTorch's allocator and of CUDA; None: this process's.

    Raises:
        UsageError: The budget is more than the card has, or a setting cannot be simulated.
    """

    explains = True

    def __init__(
        self,
        card: Card,
        traces: TraceCache,
        *,
        torch_version: tuple[int, int],
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
        communicators: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        if environment.get("CUDA_MODULE_LOADING", "LAZY") != "LAZY":
            raise UsageError("CUDA_MODULE_LOADING=EAGER is not simulated", hint="unset it: PyTorch loads lazily")
        self._card, self._context = card, context_memory(card)
        self._settings = read_settings(environment, card.total_bytes)
        self._free_bytes = max(0, card.total_bytes - self._context.bytes)
        bound = f"{card.name} (simulated, {format_bytes(self._context.bytes)} of it for its context)"
        available = AvailableMemory(card.total_bytes, self._free_bytes, bound, CARD_RESERVE)
        self._limit_bytes = choose_budget(available, memory, reserve)
        self.traces, self._torch_version = traces, torch_version
        self._nccl_bytes = communicators * _NCCL_BYTES
        self._is_sharded = False

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
        defaults = dataclasses.asdict(AllocatorSettings(total_bytes=self._settings.total_bytes))
        settings = dataclasses.asdict(self._settings)
        return {name: value for name, value in settings.items() if value != defaults[name]}

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
                "peak": "the most the replayed allocator holds with no limit, in whole segments",
            },
        )

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load the workload and check what can be checked without computing values."""
        inspection = self.traces.inspect(Deadline(limit_seconds))
        self._is_sharded = inspection.parallel == "fsdp2"
        return inspection

    def use_grad_sync(self, grad_sync: GradSync | None) -> None:
        """Let FSDP2 sum gradients so in all that follows; None: as the Accumulator does by default, with each part."""
        self.traces.grad_sync = grad_sync

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """As `Device`."""
        self.traces.savers = savers

    @property
    def rates(self) -> CardRates:
        """The rates of the card."""
        return card_rates(self._card)

    def count_cost(self, *, limit_seconds: float | None = None) -> UpdateCost:
        """Count the cost of an update with the savers in use, by one of small micro-batches, the second one larger.

        Raises:
            WorkloadError, NotMeasuredError: It cannot be traced.
        """
        return self.traces.count_cost(Deadline(limit_seconds))

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        """Predict a trial; if `fresh`, from a trace of these very parts."""
        began, deadline = time.monotonic(), Deadline(limit_seconds)
        try:
            if lengths:
                traces = [self.traces.ask(TraceParts, parts, deadline, lengths=lengths)]
            else:
                traces = self.traces.traces_of(parts, deadline, fresh=fresh)
        except (WorkloadError, NotMeasuredError) as error:
            failed = Trial(parts=parts, outcome="error", message=str(error), most_samples=error.most_samples)
            if isinstance(error, WorkloadError):
                return dataclasses.replace(failed, traceback=error.user_traceback, fault="user")
            return dataclasses.replace(failed, fault="measurement", timed_out=deadline.is_over)
        self.findings = self.traces.findings
        return dataclasses.replace(
            predict_trial(self.replayer, traces, self.limit_bytes),
            parts=parts,
            lengths=lengths,
            fresh=bool(lengths) or any(map(self.traces.was_traced, traces)) or (fresh and not self.traces.confirms),
            seconds=time.monotonic() - began,
            host_bytes=max((trace.host_bytes for trace in traces if trace.host_bytes), default=None),
        )

    def forecast(self, *, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> Forecast:
        """Trace small sizes, which trials need anyway, and forecast the peaks of larger ones from them."""
        deadline = Deadline(limit_seconds)
        with suppress(WorkloadError, NotMeasuredError):  # The trial of that size reports why.
            self.fit(limit_seconds, choose)
        return Forecast(peak_bytes=partial(self._peak_bytes, deadline=deadline), alone=self._not_extrapolated)

    def fit(self, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> str | None:
        """Trace small sizes; return why larger ones do not follow from them, None if they do.

        Raises:
            WorkloadError, NotMeasuredError: They cannot be traced.
        """

        def choose_parts(trace_of: Callable[[int], Trace]) -> tuple[int, ...]:
            assert choose is not None
            return choose(lambda size: predict_trial(self.replayer, [trace_of(size)], self.limit_bytes))

        size = max(2, self.traces.step)
        if self.traces.extrapolate((size,), Deadline(limit_seconds), choose and choose_parts) is not None:
            return None
        return "; ".join(map(str, self._not_extrapolated)) or "there are too few samples"

    @property
    def _not_extrapolated(self) -> tuple[Message, ...]:
        return tuple(told for told in self.traces.messages if told.code == "not_extrapolated")

    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """Return the prediction for `parts` after a fresh trial of them; raise the error in that trial's record."""
        traces = self.traces.traces_of(parts, Deadline(None), fresh=True)
        min_budget_bytes = self.replayer.min_budget_bytes(traces, self.limit_bytes)
        sized = max(map(self.replayer.with_sizes, traces), key=lambda sized: sized.uncertainty_bytes)
        uncertainty_bytes = self._context.uncertainty_bytes + sized.uncertainty_bytes + self._nccl_bytes
        measurable = not self._is_sharded  # Trials on a card run no model that ranks shard.
        most_reads = max(traces, key=lambda trace: trace.reads)
        warnings = [
            told
            for told in self.traces.messages
            if told.code == "trace_differs" or (told.code == "compares_samples" and len(parts) > 1)
        ]
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
        notes = [message("predicted", uncertainty_bytes=uncertainty_bytes, measurable=measurable)]
        if most_reads.reads:  # The CPU computed values that the step read.
            notes.append(message("values_read", reads=most_reads.reads, samples=most_reads.batch))
        notes += self._not_extrapolated
        if not self._card.measured:
            notes.append(message("card_assumed", card=self._card.title, source=self._card.source))
        notes.append(
            message(
                "uncertainty",
                uncertainty_bytes=uncertainty_bytes,
                context_bytes=self._context.bytes,
                workspace_bytes=sized.uncertainty_bytes,
                rules=list(sized.guessed),
                nccl_bytes=self._nccl_bytes,
            )
        )
        return Prediction(
            min_budget_bytes=min_budget_bytes,
            uncertainty_bytes=uncertainty_bytes,
            warnings=tuple(warnings),
            notes=tuple(notes),
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

        outside_bytes = self._context.bytes if context_bytes is None else context_bytes
        explainer = Explainer(
            self.traces,
            self.replayer,
            self.replayer_with,
            self.name,
            self.limit_bytes,
            outside_bytes,
            Deadline(limit_seconds),
        )
        return explainer.explain(parts, **options)

    def replayer_with(self, settings: AllocatorSettings) -> Replayer:
        """Return a replayer of this card under other settings of the allocator."""
        from autoaccum.simulation.allocator.replay import Replayer

        settings = dataclasses.replace(settings, total_bytes=self._card.total_bytes)
        return Replayer(self._card, settings, self._torch_version)

    def close(self) -> None:
        """End the tracer's process, if it runs and no other device shares its traces."""
        self.traces.close()

    @cached_property
    def replayer(self) -> Replayer:
        """Replays traces on the card."""
        from autoaccum.simulation.allocator.replay import Replayer  # Later, so that the tracer starts sooner.

        return Replayer(self._card, self._settings, self._torch_version, self.traces.replays)

    def _peak_bytes(self, size: int, deadline: Deadline) -> int | None:
        """Return the peak of a size, maybe of a card with equal kernels; None if it is not known.

        Where traces cannot be extrapolated, it is that of the line through the peaks of the largest two that were made.
        """
        try:
            trace = self.traces.extrapolate((size,), deadline)
        except (WorkloadError, NotMeasuredError):
            return None  # The trial of that size reports why.
        if trace is not None:
            return self.replayer.about_peak_bytes(trace)
        peaks = sorted((made.parts[0], self.replayer.peak_bytes(made)) for made in self.traces.made_of_equal_parts)
        if len(peaks) < 2:
            return None
        (smaller, low), (larger, high) = peaks[-2:]
        return low + (high - low) * (size - smaller) // (larger - smaller)


def predict_trial(replayer: Replayer, traces: Sequence[Trace], limit_bytes: int) -> Trial:
    """Return the trial of an update within a limit from the traces of its parts: the worst outcome, the highest peaks.

    Its peaks are those without a limit; if it does not fit, maybe those of another card with equal kernels.
    """
    replays = [(trace, *replayer.replay(trace, limit_bytes)) for trace in traces]
    worst = max(replays, key=lambda replay: 2 if not replay[3].fits else replay[3].repeat_retries > 0)
    trace, sized, unlimited, held = worst
    trial = Trial(
        parts=trace.parts,
        outcome="ok",
        peak_allocated_bytes=max(unlimited.peak_allocated_bytes for _, _, unlimited, _ in replays),
        peak_reserved_bytes=max(unlimited.peak_reserved_bytes for _, _, unlimited, _ in replays),
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
