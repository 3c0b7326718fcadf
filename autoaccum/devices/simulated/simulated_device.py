"""The memory that a simulated card has for trials."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from autoaccum.accumulation.coupling import COMPARES_SAMPLES
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.budget import CARD_HEADROOM, Supply, choose_budget
from autoaccum.devices.explanation import Account, Foresight, Prediction
from autoaccum.devices.simulated.allocator.replay import Replayer, SizedTrace
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings, read_settings
from autoaccum.devices.simulated.cards import Card, ContextMemory, all_cards, context_memory
from autoaccum.devices.simulated.explain.account import Deadline, Explainer
from autoaccum.devices.simulated.tracing.trace_cache import TraceCache, Tracer
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.units import MIB, MemorySize, format_bytes


def card_supply(card: Card, outside: ContextMemory, allowed_bytes: int | None) -> Supply:
    """A card's memory as `choose_budget` takes it: free is what is left beside the context, and allowed by settings."""
    free_bytes = max(0, card.total_bytes - outside.bytes)
    allowed = "" if allowed_bytes is None else ", and no more than per_process_memory_fraction allows"
    bound = f"{card.name} (simulated, {format_bytes(outside.bytes)} of it for its context{allowed})"
    return Supply(card.total_bytes, free_bytes if allowed_bytes is None else min(free_bytes, allowed_bytes), bound)


@dataclass(frozen=True)
class Band:
    """The band of one schedule on one card.

    It is a sum: what the process holds outside of the allocator, and the kernels' own memory that nobody has measured.
    """

    outside: ContextMemory
    sized: SizedTrace

    @property
    def bytes(self) -> int:
        """In all, either way."""
        return self.outside.band_bytes + self.sized.band_bytes

    def note(self) -> str:
        """That nothing ran, and how far off it may be, as a sentence for the plan."""
        return (
            f"nothing ran on a card: memory is predicted, give or take {format_bytes(self.bytes)}, and measured by the"
            " same command without --gpu, on the card"
        )

    def made_of(self) -> str:
        """Return what the band covers and what it does not, as a sentence for the plan."""
        parts = [f"the CUDA context ({format_bytes(self.outside.bytes)} assumed)"]
        if self.sized.band_bytes:
            rules = ", ".join(rule.replace("_", " ") for rule in self.sized.guessed) or "libraries"
            parts.append(f"workspaces that nobody measured ({rules}: {format_bytes(self.sized.band_bytes)})")
        return (
            f"the band of {format_bytes(self.bytes)} is for {' and '.join(parts)}, not for other programs on the card"
            " or batches larger than batch(size)"
        )

    def warning(self, limit_bytes: int, least_bytes: int) -> str | None:
        """A sentence where the budget leaves something above the least that is needed, and less than the band."""
        room_bytes = limit_bytes - least_bytes
        if not 0 <= room_bytes < self.bytes:
            return None
        reserve = -(-self.bytes // (100 * MIB)) * 100
        keep = f", or keep more (--reserve {reserve}MiB)" if 2 * reserve * MIB < limit_bytes else ""
        return (
            f"the budget leaves {format_bytes(room_bytes)} above the least that is needed, and the prediction may be "
            f"off by {format_bytes(self.bytes)}: measure on the card (--device cuda){keep}"
        )


class SimulatedDevice(AbstractContextManager["SimulatedDevice"]):
    """Trials on a card that need not be here; nothing runs on any.

    What counts against the budget is what PyTorch's caching allocator would get from the driver, whole segments. A
    trial replays the trace of its parts in an allocator of that capacity: `ok` where it goes through, `tight` where
    every update would release the cache and ask again, `oom` where it does not. The peaks are those of a replay that
    nothing limits. Traces of other sizes follow from small ones, where all sizes are affine in the batch; a fresh trial
    rests on a trace of just its parts (`Trial.fresh`), and one of more than two on any two that follow each other.

    Args:
        make_tracer: Starts what traces the workload on the card.
        share: Samples per update on this rank.
        torch_version: Of the tracer's torch, such as (2, 15).
        memory, reserve: As `choose_budget` takes them.
        environment: Where the settings of PyTorch's allocator and of CUDA's loading are; None: this process's.

    Raises:
        UsageError: The budget is more than the card has, or the settings are not simulated.
    """

    def __init__(
        self,
        card: Card,
        make_tracer: Callable[[], Tracer],
        *,
        share: int,
        torch_version: tuple[int, int],
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        if environment.get("CUDA_MODULE_LOADING", "LAZY") != "LAZY":
            raise UsageError("CUDA_MODULE_LOADING=EAGER is not simulated", hint="unset it: PyTorch loads lazily")
        self._card, self._outside = card, context_memory(card)
        self._settings = read_settings(environment).for_card(card.total_bytes)
        self._supply = card_supply(card, self._outside, self._settings.allowed_bytes)
        self._limit_bytes = choose_budget(self._supply, memory, reserve, headroom=CARD_HEADROOM)
        self._traces = TraceCache(make_tracer, share)
        self._replayer = Replayer(card, self._settings, torch_version)

    @property
    def name(self) -> str:
        """Such as `rtx3090 (simulated)`."""
        return f"{self._card.name} (simulated)"

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes."""
        return self._limit_bytes

    def describe(self) -> Mapping[str, Any]:
        """Return what the plan records: the card as it is assumed to be, and how the budget is enforced."""
        card = self._card
        return {
            "name": self.name,
            "kind": "simulated",
            "card": card.title if card in all_cards() else None,
            "capability": list(card.capability),
            "multiprocessors": card.multiprocessors,
            "source": card.source,
            "total_bytes": card.total_bytes,
            "free_bytes": self._supply.free_bytes,
            "context_bytes": self._outside.bytes,
            "context_band_bytes": self._outside.band_bytes,
            "context_source": self._outside.source,
            "limit_bytes": self.limit_bytes,
            "allocator": _changes(self._settings),
            "enforced_by": "replay of the caching allocator with that capacity",
            "peak": "the most the replayed allocator holds where nothing limits it, whole segments",
        }

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load and check the workload, as far as that goes without computing anything."""
        return self._traces.inspect(limit_seconds)

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """Predict one trial; `fresh` asks for a trace of just these parts."""
        began = time.monotonic()
        try:
            traces = self._traces.of_schedule(parts, fresh, limit_seconds)
        except (WorkloadError, NotMeasuredError) as error:
            seconds = time.monotonic() - began
            return dataclasses.replace(_failed(error, parts, seconds, limit_seconds), limit_bytes=limit_bytes)
        held_to_bytes = self.limit_bytes if limit_bytes is None else limit_bytes
        trial = self._replayer.update(traces, held_to_bytes)
        made = any(self._traces.was_traced(trace) for trace in traces)
        return dataclasses.replace(
            trial, parts=parts, limit_bytes=limit_bytes, fresh=made, seconds=time.monotonic() - began
        )

    def foresee(self, *, limit_seconds: float | None = None) -> Foresight:
        """The peaks of sizes that follow from small ones, which are traced now; trials need them all the same."""
        self._peak_bytes(max(2, self._traces.step))
        return Foresight(peak_bytes=self._peak_bytes)

    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """Return what is predicted of `parts`, of which a fresh trial is known, whether they fit or not."""
        traces = self._traces.of_schedule(parts, fresh=True)
        least_bytes = max(self._replayer.least_bytes(trace, self.limit_bytes) for trace in traces)
        band = max(
            (Band(self._outside, self._replayer.with_sizes(trace)) for trace in traces), key=lambda band: band.bytes
        )
        assumed = () if self._card.measured else (f"what is known of {self._card.title}: {self._card.source}",)
        cautions = [COMPARES_SAMPLES] if self._traces.grows_quadratically and len(parts) > 1 else []
        if caution := band.warning(self.limit_bytes, least_bytes):
            cautions.append(caution)
        return Prediction(
            least_bytes=least_bytes,
            band_bytes=band.bytes,
            warnings=(*cautions, *self._traces.warnings),
            notes=(band.note(), *self._traces.notes, *assumed, band.made_of()),
        )

    def explain(self, parts: tuple[int, ...], *, limit_seconds: float | None = None, **asked: bool) -> Account:
        """Account for `parts`, of which a fresh trial is known; `asked` as `Explainer.account` takes."""
        deadline = Deadline(limit_seconds)
        made = self._traces.of_schedule(parts, True, deadline.left_seconds)
        explainer = Explainer(self.name, self._outside.bytes, self.limit_bytes, self._traces, self._replayer)
        return explainer.account(made, deadline, **asked)

    def close(self) -> None:
        """End the tracer's process. Idempotent."""
        self._traces.close()

    def __exit__(self, *_: object) -> None:
        """Close, whatever happened."""
        self.close()

    def _peak_bytes(self, size: int) -> int | None:
        """The peak of a size that follows from small ones; None of others."""
        try:
            trace = self._traces.follow(size)
        except (WorkloadError, NotMeasuredError):
            return None  # The trial of that size tells why.
        return None if trace is None else self._replayer.peak_bytes(trace)


def _changes(settings: AllocatorSettings) -> dict[str, Any]:
    """The settings that are not as PyTorch has them by itself."""
    by_itself = AllocatorSettings().for_card(settings.total_bytes or 0)
    known = dataclasses.asdict(by_itself)
    return {name: value for name, value in dataclasses.asdict(settings).items() if value != known[name]}


def _failed(
    error: WorkloadError | NotMeasuredError, parts: tuple[int, ...], seconds: float, limit_seconds: float | None
) -> Trial:
    """The trial of what could not be traced."""
    late = limit_seconds is not None and seconds >= limit_seconds
    if isinstance(error, WorkloadError):
        return Trial(parts=parts, outcome="error", message=str(error), traceback=error.user_traceback, blames="user")
    return Trial(parts=parts, outcome="error", message=str(error), blames="measurement", timed_out=late)
