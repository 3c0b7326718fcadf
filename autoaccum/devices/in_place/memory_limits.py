"""Memory limits of trials in place: the memory is limited and measured in a process that goes on afterwards."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from autoaccum.devices.base import Trial
from autoaccum.devices.budget import AvailableMemory, choose_budget, limit_slack
from autoaccum.devices.card_memory import CardReport
from autoaccum.devices.card_meter import CardMeter, start_error
from autoaccum.devices.cuda import choose_card_budget, describe_card
from autoaccum.devices.host_memory import data_limit, read_host_memory, read_process_memory
from autoaccum.devices.in_place.saved_state import LiveStateSize
from autoaccum.devices.meters import HostMeter
from autoaccum.devices.trial_record import Reading
from autoaccum.errors import UsageError
from autoaccum.serialization import read_record
from autoaccum.units import KIB, MIB, MemorySize, format_bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)."""
_TIGHT_BYTES = 64 * KIB
_SETTLED = {_MMAP_THRESHOLD: 32 * MIB, _TRIM_THRESHOLD: 64 * MIB}
"""The values that glibc itself sets once a process has freed a block of 32 MiB; they cannot be read."""
_VARIABLES = {_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}


@contextmanager
def tight_heap() -> Iterator[None]:
    """Have malloc map and unmap every block from 64 KiB on separately within, as in the children of other devices.

    glibc would otherwise keep freed tensors in pieces, out of reach of `malloc_trim`, and reuse them in the next trial:
    peaks would differ by tens of MiB, and would not show the memory that was kept. Afterwards both thresholds are those
    of the environment, or the values that glibc sets in a process that frees large tensors. Other C libraries are left
    alone.
    """
    _set_thresholds(dict.fromkeys(_SETTLED, _TIGHT_BYTES))
    try:
        yield
    finally:
        _set_thresholds({name: _from_environment(variable) or _SETTLED[name] for name, variable in _VARIABLES.items()})


def trim_heap() -> None:
    """Return free pages of the heap to the kernel (malloc_trim(3)), with glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(thresholds: dict[int, int]) -> None:
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            for name, size_bytes in thresholds.items():
                library.mallopt(name, size_bytes)


def _from_environment(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def check_single_thread() -> None:
    """Check that no other Python threads run, since they would run out of memory under a trial's limit, too.

    Threads of torch, OpenMP and the like do not count: their work is part of the trial. Nor does tqdm's, which only
    looks at progress bars every ten seconds and stays once there was one.

    Raises:
        UsageError: There are other threads; the message names them.
    """
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and type(thread).__name__ != "TMonitor" and _runs(thread)
    ]
    if not others:
        return
    named = ", ".join(f"{thread.name} ({type(thread).__name__})" for thread in others)
    raise UsageError(
        f"other Python threads run in this process and would share a trial's limit on memory: {named}",
        hint="end them first, or plan through a file, whose trials run elsewhere: autoaccum plan model.py",
    )


def _runs(thread: threading.Thread) -> bool:
    """Return whether the kernel still has `thread`; Python keeps foreign threads that have ended ("Dummy-1")."""
    number = thread.native_id
    return thread.is_alive() and (number is None or Path(f"/proc/{os.getpid()}/task/{number}").exists())


class HostMemoryLimit(HostMeter):
    """A limit on the host memory that trials add to this process; use it within `tight_heap`.

    Whether a trial stayed within its budget follows from its peak. RLIMIT_DATA is set above the budget
    (`budget.limit_slack`), since some libraries crash when a small block is refused (oneDNN's backward of a
    convolution: SIGSEGV in 3 of 13 plans with torch 2.13), and this process is the user's. Above that limit it is a
    large tensor that is refused, and PyTorch raises.

    The limit counts from the memory that the process holds when a trial begins. The memory that the first job left
    (modules, compiled kernels) counts against the budget, since a fresh process would need it as well.
    """

    def __init__(self, live: LiveStateSize) -> None:
        super().__init__()
        self._live = live
        self._host: AvailableMemory | None = None
        self._first_leftover_bytes: int | None = None
        self._room_bytes = 0

    def begin(self) -> Mapping[str, Any]:
        """As `HostMeter.begin`."""
        trim_heap()
        return super().begin()

    def start(self) -> None:
        """Reset VmHWM, if the kernel allows it; the state is already saved by then."""
        trim_heap()
        super().start()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Set RLIMIT_DATA to the memory held now, plus the budget without the live objects, plus the slack."""
        self._room_bytes = max(0, budget_bytes - self._live.held_bytes - (self._first_leftover_bytes or 0))
        slack_bytes = limit_slack(self._room_bytes, read_host_memory().free_bytes)
        return data_limit(self._before.data_bytes + self._room_bytes + slack_bytes)

    def lap(self) -> int | None:
        """As `HostMeter.lap`, live objects included."""
        peak = super().lap()
        return None if peak is None else self._live.held_bytes + peak

    def read(self) -> Reading:
        """Return the peak since `start`, live objects included."""
        reading = super().read()
        peak = reading.peak_reserved_bytes
        return replace(reading, peak_reserved_bytes=None if peak is None else self._live.held_bytes + peak)

    def end_job(self) -> None:
        """Remember the resident bytes that the first job has not freed."""
        trim_heap()
        assert self._base is not None
        if self._first_leftover_bytes is None:
            self._first_leftover_bytes = max(0, read_process_memory().anonymous_bytes - self._base.anonymous_bytes)

    def choose_budget(self, facts: Mapping[str, Any], memory: MemorySize | None, reserve: MemorySize | None) -> int:
        """Return the budget in bytes, live objects included; raise UsageError if so much is not free beside a copy."""
        host = read_host_memory()
        free_bytes = max(0, host.free_bytes - self._live.copy_bytes) + self._live.held_bytes
        self._host = AvailableMemory(host.total_bytes, free_bytes, host.bound)
        return choose_budget(self._host, memory, reserve)

    def describe(self) -> dict[str, Any]:
        """Return the record of the host, the memory that training may take, and its enforcement."""
        assert self._host is not None
        return {
            **asdict(self._host),
            "enforced_by": "the peak, and RLIMIT_DATA some way above, in this process",
            "peak": "what live objects hold, and VmHWM above what was resident before, and what is untouched",
        }

    def classify(self, trial: Trial, reading: Reading, around_evaluation: Sequence[Reading]) -> Trial:
        """Return the trial, as out of memory if its peak exceeded the budget."""
        excess = self._excess(reading)
        if not (trial.ran and excess):
            return trial
        held = format_bytes(reading.peak_reserved_bytes or 0)
        before_and_after = [self._excess(one) > 0 for one in around_evaluation[:2]]
        return replace(
            trial,
            outcome="oom",
            phase="evaluation" if before_and_after == [False, True] else "update",
            message=f"micro-batch {trial.micro_batch} held {held}, {format_bytes(excess)} more than it may",
            peak_reserved_bytes=reading.peak_reserved_bytes,
        )

    def _excess(self, reading: Reading) -> int:
        """Return by how many bytes a trial exceeded its budget; 0 if it did not, or if that is not known."""
        return max(0, (reading.peak_reserved_bytes or 0) - self._live.held_bytes - self._room_bytes)


class CardMemoryLimit(CardMeter):
    """A limit on PyTorch's allocator in this process, for all that it holds on a card."""

    def __init__(self, device: torch.device) -> None:
        try:
            torch.get_device_module("cuda").init()
        except (RuntimeError, AssertionError) as error:  # No working driver, or a build without CUDA.
            raise start_error(device, error) from error
        super().__init__(torch.cuda.current_device() if device.index is None else device.index)
        self._report: CardReport | None = None

    def choose_budget(self, facts: Mapping[str, Any], memory: MemorySize | None, reserve: MemorySize | None) -> int:
        """Return the budget in bytes, of the free memory and that of this process's allocator with an empty cache."""
        self._report = read_record(facts["card"], CardReport)
        return choose_card_budget(self._report, memory, reserve)

    def describe(self) -> dict[str, Any]:
        """Return the record of the card, and of the processes on it."""
        assert self._report is not None
        return describe_card(self._report)

    def classify(self, trial: Trial, reading: Reading, around_evaluation: Sequence[Reading]) -> Trial:
        """Return the trial as it is: the allocator enforces the budget itself."""
        return trial


MemoryLimit: TypeAlias = "HostMemoryLimit | CardMemoryLimit"
"""The limit on a device's memory in this process."""


def make_memory_limit(device: torch.device, live: LiveStateSize) -> MemoryLimit:
    """Make the limit for `device`; on a card, this starts CUDA if needed."""
    return HostMemoryLimit(live) if device.type == "cpu" else CardMemoryLimit(device)
