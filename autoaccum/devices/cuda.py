"""A CUDA card: a child process with a budget for its allocator, which reports its peaks and retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import ChooseParts, Forecast, Inspection, TrialSettings
from autoaccum.devices.budget import CARD_RESERVE, AvailableMemory
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child_device import ChildDevice
from autoaccum.devices.explanation import MemoryReport
from autoaccum.devices.nvml import CardAnswers, CardProcess
from autoaccum.devices.simulated.simulation_requests import Tracer, start_tracing
from autoaccum.errors import AutoaccumError, UsageError, first_line
from autoaccum.messages import message
from autoaccum.serialization import read_record
from autoaccum.spec import DeviceFacts
from autoaccum.units import MemorySize, format_bytes

if TYPE_CHECKING:
    from autoaccum.devices.simulated.simulated_device import SimulatedDevice
    from autoaccum.simulation.cards import Card

_MOST_NAMED = 5
_MAX_FORECAST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class InstalledCard:
    """A card and its memory at one moment, with a context of this process on it; None stands for what is not known.

    Attributes:
        index: The index among the cards that are visible to this process, as in `cuda:N`.
        name: The name of the model, such as `NVIDIA GeForce RTX 3090`.
        total_bytes: The total memory, which PyTorch's memory fractions are of.
        free_bytes: The memory that the driver has free (cudaMemGetInfo).
        reserved_bytes: The memory that PyTorch's allocator in this process holds.
        capability: Compute capability, such as (8, 6).
        multiprocessors: The number of multiprocessors.
        uuid: The uuid without its prefix.
        allowed_bytes: The limit that the allocator already has (`set_per_process_memory_fraction`, or
            `PYTORCH_ALLOC_CONF=per_process_memory_fraction:...`); None without a limit.
        driver: The driver's version.
        nvml_missing: The reason why there is nothing from NVML; None if there is.
        context_bytes: The memory of this process outside of the allocator: its context and CUDA's libraries. NVML does
            not know this process in a container with pids of its own.
        others: Other processes on the card.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None
    allowed_bytes: int | None = None
    driver: str | None = None
    nvml_missing: str | None = None
    context_bytes: int | None = None
    others: tuple[CardProcess, ...] | None = None

    @property
    def available(self) -> AvailableMemory:
        """What PyTorch's allocator in this process can hold at most: its own memory and the free memory."""
        allowed_bytes = self.total_bytes if self.allowed_bytes is None else self.allowed_bytes
        free_bytes = min(allowed_bytes, self.reserved_bytes + self.free_bytes)
        bound = f"cuda:{self.index} ({self.name})"
        return AvailableMemory(self.total_bytes, free_bytes, bound, CARD_RESERVE, self.holders)

    @property
    def held_outside_bytes(self) -> int:
        """The memory of other processes and of this process's context."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def used_by_others_bytes(self) -> int | None:
        """The memory of other processes and the driver; None if this process's context is not known."""
        return None if self.context_bytes is None else max(0, self.held_outside_bytes - self.context_bytes)

    @property
    def holders(self) -> str:
        """The processes that hold the card's memory, as the end of a sentence; empty if there are none."""
        if self.others is None:
            return f"; who holds the rest is not known ({self.nvml_missing or 'the driver does not tell'})"
        largest = sorted(self.others, key=lambda process: -(process.used_bytes or 0))[:_MOST_NAMED]
        held = ("some" if process.used_bytes is None else format_bytes(process.used_bytes) for process in largest)
        named = [f"process {process.pid} holds {size}" for process, size in zip(largest, held, strict=True)]
        return "; " + ", ".join(named) if named else ""

    def describe(self, device: str, limit_bytes: int) -> DeviceFacts:
        """Return what a plan records of the card, as `device`, and of how its trials are limited and measured."""
        same = ("index", "multiprocessors", "uuid", "driver", "nvml_missing", "context_bytes")
        return DeviceFacts(
            name=device,
            kind="cuda",
            card=self.name,
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes,
            used_by_others_bytes=self.used_by_others_bytes,
            properties={
                **{name: getattr(self, name) for name in same},
                "other_processes": None if self.others is None else [asdict(process) for process in self.others],
                "capability": list(self.capability),
                "limit_bytes": limit_bytes,
                "enforced_by": "torch.cuda.set_per_process_memory_fraction",
                "peak": "the most PyTorch's allocator held, whole segments",
            },
        )

    def to_simulate(self) -> Card:
        """Return this card as one that can be simulated."""
        from autoaccum.simulation.cards import Card

        return Card(
            name=self.name,
            title=self.name,
            total_bytes=self.total_bytes,
            capability=self.capability,
            multiprocessors=self.multiprocessors,
            source=f"cuda:{self.index} itself",
        )

    def with_processes(self, nvml: CardAnswers, *, own_pid: int) -> InstalledCard:
        """Return the card with what NVML says of it; this process is the one with `own_pid`."""
        processes = nvml.processes or ()
        own = next((process for process in processes if process.pid == own_pid), None)
        used_bytes = 0 if own is None else own.used_bytes or 0
        return replace(
            self,
            driver=nvml.driver,
            nvml_missing=nvml.missing,
            context_bytes=used_bytes - self.reserved_bytes if used_bytes > self.reserved_bytes else None,
            others=None if own is None else tuple(process for process in processes if process != own),
        )


class CudaDevice(ChildDevice):
    """Trials on one CUDA card.

    *The budget* counts the memory that PyTorch's caching allocator gets from the driver in the child, in whole
    segments (`set_per_process_memory_fraction`): model, gradients, optimizer state, micro-batches, activations,
    workspaces of cuBLAS, and tensors that the workload's module put on the card when it was imported. Not counted: the
    context with the kernels and libraries loaded into it (`context_bytes` in `describe`), allocations of other
    libraries, and the effective batch, which stays on the host. Beyond the budget the allocator raises
    `torch.OutOfMemoryError`.

    *The peak* (`peak_reserved_bytes`) is the most that the allocator held, as the limit counts it; the most that
    tensors held of it is `peak_allocated_bytes`. A trial that ran only after the allocator had released its cache is
    `tight`.

    *The processes* (see `ChildDevice`): before and after each trial, garbage is collected, the cache emptied and the
    peak reset. After any failure, a device-side assert included, the next trial has a fresh child and context.

    Args:
        settings: The settings that all trials share. A percentage as `memory` is one of the card's total; without
            `memory`, the budget is the memory that is free once PyTorch is warm. The default `reserve` is 0 if
            `memory` is given, else 2 % of the free memory, at least 256 MiB.
        index: The card's index among the visible cards.
    """

    explains = True

    def __init__(self, settings: TrialSettings, *, index: int = 0) -> None:
        super().__init__(settings)
        self._index = index
        self._card: InstalledCard | None = None
        self._tracing: ChildProcess | None = None

    @property
    def name(self) -> str:
        """`cuda:N`."""
        return f"cuda:{self._index}"

    def describe(self) -> DeviceFacts:
        """As `Device`: the card, its free memory and the holders of the rest when the budget was chosen."""
        return self._installed.describe(self.name, self.limit_bytes)

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`; meanwhile the process for a forecast imports PyTorch."""
        self._tracing = self._tracing or start_tracing(self._quiet_settings, self.name)
        return super().inspect(limit_seconds=limit_seconds)

    def close(self) -> None:
        """As `ChildDevice`."""
        tracing, self._tracing = self._tracing, None
        try:
            super().close()
        finally:
            if tracing is not None:
                tracing.end()

    def explain(self, parts: tuple[int, ...], *, limit_seconds: float | None = None, **options: bool) -> MemoryReport:
        """As `Device.explain`, by a simulation of this card in another process; its output is not shown."""
        with self.simulation() as card:
            card.use_savers(self._savers)
            context_bytes = self._installed.context_bytes
            return card.explain(parts, limit_seconds=limit_seconds, context_bytes=context_bytes, **options)

    def forecast(self, *, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> Forecast:
        """Forecast peaks by a simulation of this card in another process, which has ended before trials run."""
        self._use_child()
        seconds = min(_MAX_FORECAST_SECONDS, limit_seconds or _MAX_FORECAST_SECONDS)
        try:
            with self.simulation() as card:
                card.use_savers(self._savers)
                if (why := card.fit(seconds)) is None:
                    return Forecast(peak_bytes=card.forecast().peak_bytes)
        except AutoaccumError as error:
            why = error.message
        return Forecast(notes=(message("not_simulated", error=first_line(why)),))

    def simulation(self) -> SimulatedDevice:
        """As `Device`."""
        from autoaccum.devices.installed_torch import read_torch_release
        from autoaccum.devices.simulated.simulated_device import SimulatedDevice
        from autoaccum.devices.simulated.trace_cache import TraceCache
        from autoaccum.simulation.cards import context_memory

        card = self._installed.to_simulate()
        return SimulatedDevice(
            card,
            TraceCache(lambda: self._make_tracer(card), self._settings.rank_samples),
            torch_version=read_torch_release(),
            memory=MemorySize(bytes=min(self.limit_bytes, card.total_bytes - context_memory(card).bytes)),
        )

    def _make_tracer(self, card: Card) -> Tracer:
        process, self._tracing = self._tracing, None
        return Tracer(self._quiet_settings, card, process=process)

    @property
    def _quiet_settings(self) -> TrialSettings:
        return replace(self._settings, on_output=lambda line: None)

    @property
    def _installed(self) -> InstalledCard:
        """The card when the budget was chosen."""
        if self._card is None:
            self._use_child()
        assert self._card is not None
        return self._card

    def _available(self, facts: Mapping[str, Any]) -> AvailableMemory:
        self._card = read_record(facts["card"], InstalledCard)
        return self._card.available


def check_index(index: int, names: Sequence[str], visible: str | None) -> None:
    """Check the index of a card against the `names` of the visible cards, in CUDA's order.

    Raises:
        UsageError: There is no such card.

    >>> check_index(2, ["NVIDIA A100", "NVIDIA T4"], None)
    Traceback (most recent call last):
    autoaccum.errors.UsageError: there is no cuda:2, visible are NVIDIA A100, NVIDIA T4: \
take one of these, from cuda:0 on
    """
    if index < len(names):
        return
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if not names:
        raise UsageError(
            f"there is no cuda:{index}: no card is visible{hidden}",
            hint="nvidia-smi should list it, and the driver be new enough for this build of PyTorch",
        )
    hint = "take one of these, from cuda:0 on" if len(names) > 1 else "take cuda:0"
    raise UsageError(f"there is no cuda:{index}, visible are {', '.join(names)}{hidden}", hint=hint)
