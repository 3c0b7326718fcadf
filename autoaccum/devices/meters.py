"""Meters of memory: they limit the memory of a job and measure its peak, on the host or on a card."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from autoaccum.accumulation.out_of_memory import find_out_of_memory, is_context_dead
from autoaccum.devices.base import Trial
from autoaccum.devices.cuda import InstalledCard, check_index
from autoaccum.devices.host_memory import check_data_limit, data_limit, read_process_memory, reset_peak
from autoaccum.devices.nvml import ask_nvml
from autoaccum.errors import NotMeasuredError, UsageError, first_line
from autoaccum.units import MIB, format_bytes

_MOST_LEFTOVER_BYTES = 256 * MIB
"""What jobs may leave without having it counted against later ones: modules and kernels, but no leak."""
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


class HostMeter:
    """A meter of the host memory that this process takes (`devices.cpu.CpuDevice` says what counts).

    Attributes:
        device: The device that models are moved to.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.start()
        self._base, self._grants_all = self._before, True

    def open(self) -> None:
        """Make the device ready: raise NotMeasuredError unless the kernel holds a process to the limit."""
        check_data_limit()

    def begin(self) -> Mapping[str, Any]:
        """Take what is held now, with PyTorch warm, as the baseline; return the facts that a budget is chosen by."""
        self._base = read_process_memory()
        return {}

    def start(self) -> None:
        """Begin a new measurement of the peak: reset VmHWM."""
        reset_peak()
        self._before = read_process_memory()

    def begin_update(self) -> None:
        """Do nothing: the host's allocator has no cache, and never tries again."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Set RLIMIT_DATA within to the budget above what the process held at `start`.

        What earlier jobs left (late imports, kernels that oneDNN compiled) is granted in addition, but no leak: only a
        fresh process has exactly the budget.
        """
        held_bytes = min(self._before.data_bytes, self._base.data_bytes + _MOST_LEFTOVER_BYTES)
        self._grants_all = held_bytes == self._before.data_bytes
        return data_limit(held_bytes + budget_bytes)

    def peak_bytes(self) -> int:
        """Return the peak since `start`, as the limit counts memory."""
        return read_process_memory().peak_above(self._before)

    def record(self, parts: tuple[int, ...], limit_bytes: int, **fields: Any) -> Trial:
        """Return the record of a trial that ran to its end, held to `limit_bytes`; `fields` are further ones of it."""
        before, after = self._before, read_process_memory()
        peak_bytes, shared_bytes = after.peak_above(before), after.shared_bytes - before.shared_bytes
        if peak_bytes > limit_bytes and shared_bytes > 0:
            shared = f"{format_bytes(shared_bytes)} of it shared memory, which no limit stops"
            message = f"it ran, but held {format_bytes(peak_bytes)}, {shared}"
            fields |= {"outcome": "oom", "phase": "update", "message": message}
        elif peak_bytes > limit_bytes:
            # The kernel has held it to the limit; its count of resident pages is some 100 KiB coarse.
            peak_bytes = limit_bytes
        known = {"parts": parts, "outcome": "ok", "peak_reserved_bytes": peak_bytes, "fresh": self._grants_all}
        return Trial(**{**known, **fields})


class CardMeter:
    """A meter of the memory that this process takes of the card `index` (`devices.cuda` says what counts).

    Attributes:
        device: The device that models are moved to.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._retries_before = 0

    def open(self) -> None:
        """Make a context on the card, which `cuda` without an index means from then on.

        Raises:
            UsageError: The card is not visible, or the chosen allocator cannot be limited.
            NotMeasuredError: CUDA does not start.
        """
        try:
            names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
            check_index(self._index, names, os.environ.get("CUDA_VISIBLE_DEVICES"))
            check_allocator(os.environ, torch.cuda.get_allocator_backend())
            torch.cuda.set_device(self._index)
            torch.cuda.synchronize(self._index)
        except RuntimeError as error:
            raise NotMeasuredError(
                f"CUDA does not start on {self.device} ({first_line(error)})",
                hint="nvidia-smi should list the card and a driver that is new enough for this build of PyTorch",
            ) from error

    def begin(self) -> Mapping[str, Any]:
        """Return the facts that a budget is chosen by: the card, its memory, and who holds the rest."""
        card = read_card(self._index)
        return {"card": dataclasses.asdict(card.with_processes(ask_nvml(card.uuid), own_pid=os.getpid()))}

    def start(self) -> None:
        """Begin a new measurement: reset the peak to the memory that is held now.

        cuBLAS's workspaces, which the warm-up has left, are given back: in training they come with the first products,
        where they may lie in memory that is cached.
        """
        torch.cuda.current_device()  # Starts CUDA if nothing has yet.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._index)
        self.begin_update()

    def begin_update(self) -> None:
        """Count the allocator's retries from here on."""
        self._retries_before = self._statistic("num_alloc_retries")

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Hold the allocator within to the budget, which also counts memory left by loading and by earlier jobs."""
        return card_limit(self._index, budget_bytes)

    def peak_bytes(self) -> int:
        """Return the most that the allocator held since `start`, whole segments."""
        return self._statistic("reserved_bytes.all.peak")

    def record(self, parts: tuple[int, ...], limit_bytes: int, **fields: Any) -> Trial:
        """Return the record of a trial that ran to its end, held to `limit_bytes`; `fields` are further ones of it.

        A retry (`num_alloc_retries`) is a release of the cache after the driver, or the limit, refused memory; those
        since `begin_update` count. Only the allocator is read, so this also works when the context is dead. If other
        code resets the peak meanwhile, an earlier peak is lost.
        """
        counted = self._statistic("num_alloc_retries")
        retries = counted - self._retries_before if counted >= self._retries_before else counted
        trial = Trial(
            parts=parts,
            outcome="ok",
            peak_allocated_bytes=self._statistic("allocated_bytes.all.peak"),
            peak_reserved_bytes=self.peak_bytes(),
            allocator_retries=retries,
            **fields,
        )
        if not retries:
            return trial
        times = "once" if retries == 1 else f"{retries} times"
        message = f"it ran, but the allocator released its cache and tried again {times}"
        return dataclasses.replace(trial, outcome="tight", message=message)

    def _statistic(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self._index).get(name, 0))


def check_allocator(environment: Mapping[str, str], backend: str) -> None:
    """Raise UsageError unless the allocator caches and is PyTorch's own, so that it can be limited and measured."""
    if _NO_CACHING in environment or backend != "native":
        seen = f"{_NO_CACHING} is set" if _NO_CACHING in environment else f"the allocator is {backend!r}"
        raise UsageError(
            f"{seen}, so that no limit is kept and no peak told", hint="plan with PyTorch's own allocator, which caches"
        )


def read_card(index: int) -> InstalledCard:
    """Read the properties and the free memory of card `index`; without card or driver, PyTorch raises RuntimeError."""
    properties = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    uuid = getattr(properties, "uuid", None)
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    return InstalledCard(
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        free_bytes=free_bytes,
        reserved_bytes=torch.cuda.memory_reserved(index),
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        uuid=None if uuid is None else str(uuid),
        allowed_bytes=None if fraction >= 1 else int(fraction * properties.total_memory),
    )


@contextmanager
def card_limit(index: int, limit_bytes: int) -> Iterator[None]:
    """Limit PyTorch's allocator within to `limit_bytes` of card `index`, including the memory it already holds.

    The allocator compares its memory from the driver, whole segments, with the limit, and raises
    `torch.OutOfMemoryError` if releasing its cache is not enough. A lower limit from before stays. The limit from
    before is restored at the end, unless the context is dead: then the process cannot use the card any more.
    """
    before = torch.cuda.get_per_process_memory_fraction(index)
    _, driver_bytes = torch.cuda.mem_get_info(index)
    # The fraction is one of the properties' total in newer releases, of the driver's in older ones.
    total_bytes = max(driver_bytes, torch.cuda.get_device_properties(index).total_memory)
    torch.cuda.set_per_process_memory_fraction(min(before, memory_fraction(limit_bytes, total_bytes)), index)
    try:
        yield
    finally:
        try:
            torch.cuda.set_per_process_memory_fraction(before, index)
        except RuntimeError as error:
            if not is_context_dead(error):
                raise


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return the fraction of `total_bytes` that PyTorch rounds to `limit_bytes` at most.

    PyTorch computes `static_cast<size_t>(fraction * static_cast<double>(total))`, setMemoryFraction in
    c10/cuda/CUDACachingAllocator.cpp.

    >>> memory_fraction(12 * 1024**3, 24 * 1024**3)
    0.5
    >>> memory_fraction(2**40, 2**30)
    1.0
    """
    fraction = min(1.0, max(0.0, limit_bytes / total_bytes))
    while int(fraction * float(total_bytes)) > max(0, limit_bytes):
        fraction = math.nextafter(fraction, 0.0)
    return fraction


Meter: TypeAlias = HostMeter | CardMeter
"""A meter of one device's memory, in the process that runs a workload there."""


def make_meter(device: str) -> Meter:
    """Make the meter of a child for `device`: `cpu` or `cuda:N`."""
    kind, _, index = device.partition(":")
    return HostMeter() if kind == "cpu" else CardMeter(int(index))


def warm_up(device: torch.device | str = "cpu") -> None:
    """Train small models of convolutions, attention and matrix products on `device`, and discard them.

    On a card this loads libraries and kernels, which take some hundred MiB outside of PyTorch's allocator. A step that
    the card does not support is skipped. The number of threads is fixed to PyTorch's choice.
    """
    torch.set_num_threads(torch.get_num_threads())
    device = torch.device(device)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    models = ((convolutions, (4, 3, 8, 8)), (attention, (2, 8, 32)), (nn.Linear(512, 512), (512, 512)))
    for model, shape in models:
        try:
            _train(model.to(device), torch.ones(shape, device=device))
        except RuntimeError as error:
            if device.type == "cpu" or find_out_of_memory(error) is not None or is_context_dead(error):
                raise
    synchronize_device(device)


def synchronize_device(device: torch.device | None) -> None:
    """Wait until `device` has finished its work, and raise its errors."""
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _train(model: nn.Module, inputs: torch.Tensor) -> None:
    """Make an update in fp32, and one under autocast."""
    optimizer = torch.optim.AdamW(model.parameters())
    lower = torch.bfloat16 if inputs.device.type == "cpu" or torch.cuda.is_bf16_supported(False) else torch.float16
    for enabled in (False, True):
        with torch.autocast(inputs.device.type, lower, enabled=enabled):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
