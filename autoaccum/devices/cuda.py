"""A CUDA card: a child process with a budget for its allocator, which reports its peaks and retries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import Capability, ChooseParts, Forecast, TrialSettings
from autoaccum.devices.budget import CARD_RESERVE, AvailableMemory, choose_budget
from autoaccum.devices.card_memory import CardReport
from autoaccum.devices.child_device import ChildDevice
from autoaccum.devices.explanation import MemoryReport
from autoaccum.errors import AutoaccumError, first_line
from autoaccum.serialization import read_record
from autoaccum.units import MemorySize, format_bytes

if TYPE_CHECKING:
    from autoaccum.devices.simulated.simulated_device import SimulatedDevice
    from autoaccum.devices.simulated.simulation_requests import Tracer
    from autoaccum.simulation.cards import Card

_MOST_NAMED = 5
_MAX_FORECAST_SECONDS = 60.0


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

    capabilities = frozenset[Capability]({"grow", "explain"})

    def __init__(self, settings: TrialSettings, *, index: int = 0) -> None:
        super().__init__(settings)
        self._index = index
        self._report: CardReport | None = None

    @property
    def name(self) -> str:
        """`cuda:N`."""
        return f"cuda:{self._index}"

    def describe(self) -> Mapping[str, Any]:
        """Return the plan's record: the card, its free memory and the holders of the rest when the budget was chosen.

        None stands for what is not known (see `CardReport`).
        """
        limit_bytes = self.limit_bytes
        assert self._report is not None
        return {"name": self.name, "kind": "cuda", **describe_card(self._report), "limit_bytes": limit_bytes}

    def explain(self, parts: tuple[int, ...], *, limit_seconds: float | None = None, **options: bool) -> MemoryReport:
        """As `Device.explain`, by a simulation of this card in another process; its output is not shown."""
        with self.simulation() as card:
            card.use_savers(self._savers)
            assert self._report is not None
            context_bytes = self._report.context_bytes
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
        return Forecast(notes=(f"the search began without a simulation of the card ({first_line(why)})",))

    def simulation(self) -> SimulatedDevice:
        """As `Device`."""
        from autoaccum.devices.card_memory import installed_card
        from autoaccum.devices.environment import read_torch_release
        from autoaccum.devices.simulated.simulated_device import SimulatedDevice
        from autoaccum.simulation.cards import context_memory

        limit_bytes = self.limit_bytes
        assert self._report is not None
        card = installed_card(self._report.memory)
        return SimulatedDevice(
            card,
            lambda: self._make_tracer(card),
            share=self._settings.share,
            torch_version=read_torch_release(),
            memory=MemorySize(bytes=min(limit_bytes, card.total_bytes - context_memory(card).bytes)),
        )

    def _make_tracer(self, card: Card) -> Tracer:
        from autoaccum.devices.simulated.simulation_requests import Tracer

        return Tracer(replace(self._settings, on_output=lambda line: None), card)

    def _choose_budget(self, facts: Mapping[str, Any]) -> int:
        self._report = read_record(facts["card"], CardReport)
        return choose_card_budget(self._report, self._settings.options.memory, self._settings.options.reserve)


def choose_card_budget(report: CardReport, memory: MemorySize | None = None, reserve: MemorySize | None = None) -> int:
    """Return the budget in bytes (see `choose_budget`), including the memory that this process's allocator holds.

    Raises:
        UsageError: Nothing is left, or `memory` is more than is free; the message names the holders of the rest.
    """
    card = report.memory
    available = AvailableMemory(card.total_bytes, card.available_bytes, f"cuda:{card.index} ({card.name})")
    return choose_budget(available, memory, reserve, default_reserve=CARD_RESERVE, holders=name_holders(report))


def describe_card(report: CardReport) -> dict[str, Any]:
    """Return the plan's record of a card, and of how its trials are limited and measured."""
    memory = report.memory
    return {
        "index": memory.index,
        "card": memory.name,
        "uuid": memory.uuid,
        "capability": list(memory.capability),
        "multiprocessors": memory.multiprocessors,
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "context_bytes": report.context_bytes,
        "used_by_others_bytes": report.used_by_others_bytes,
        "other_processes": None if report.others is None else [asdict(process) for process in report.others],
        "driver": report.driver,
        "nvml_missing": report.nvml_missing,
        "enforced_by": "torch.cuda.set_per_process_memory_fraction",
        "peak": "the most PyTorch's allocator held, whole segments",
    }


def name_holders(report: CardReport) -> str:
    """Name the processes that hold the card's memory, as the end of a sentence; empty if there are none."""
    if report.others is None:
        return f"; who holds the rest is not known ({report.nvml_missing or 'the driver does not tell'})"
    known = sorted(report.others, key=lambda process: -(process.used_bytes or 0))
    named = []
    for process in known[:_MOST_NAMED]:
        held = "some" if process.used_bytes is None else format_bytes(process.used_bytes)
        named.append(f"process {process.pid} holds {held}")
    return "; " + ", ".join(named) if named else ""
