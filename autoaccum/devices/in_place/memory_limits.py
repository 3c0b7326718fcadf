"""Where trials in place run: how that memory is limited and metered in a process that goes on afterwards."""

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
"""Where glibc moves both by itself once a process has freed a block of 32 MiB; it cannot be asked where they are."""

_VARIABLES = {_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}


@contextmanager
def tight_heap() -> Iterator[None]:
    """Within, blocks from 64 KiB on are mapped and unmapped one by one, as in the children of other devices.

    glibc would keep what tensors leave, in pieces and beyond what `malloc_trim` reaches, and give it to the next
    trial: peaks then differ by tens of MiB and miss what was there already. Afterwards both thresholds are what the
    environment says, or where glibc moves them in any process that frees large tensors. Other C libraries stay alone.
    """
    _set_thresholds(dict.fromkeys(_SETTLED, _TIGHT_BYTES))
    try:
        yield
    finally:
        _set_thresholds({name: _chosen(variable) or _SETTLED[name] for name, variable in _VARIABLES.items()})


def trim_heap() -> None:
    """Give free pages of the heap back to the kernel (malloc_trim(3)), where glibc can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(thresholds: dict[int, int]) -> None:
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            for name, size_bytes in thresholds.items():
                library.mallopt(name, size_bytes)


def _chosen(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def check_single_thread() -> None:
    """Refuse to limit this process's memory while other Python threads run in it: they would run out of it, too.

    Threads of torch's own, of OpenMP and the like do not count: what they do is part of the trial.

    Raises:
        UsageError: There are some; they are named.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread() and _runs(thread)]
    if not others:
        return
    named = ", ".join(f"{thread.name} ({type(thread).__name__})" for thread in others)
    raise UsageError(
        f"other Python threads run in this process and would share a trial's limit on memory: {named}",
        hint="end them first, or plan through a file, whose trials run elsewhere: autoaccum plan model.py",
    )


def _runs(thread: threading.Thread) -> bool:
    """Whether the kernel still knows `thread`; Python keeps foreign ones that have ended ("Dummy-1")."""
    number = thread.native_id
    return thread.is_alive() and (number is None or Path(f"/proc/{os.getpid()}/task/{number}").exists())


class HostMemoryLimit(HostMeter):
    """What this process takes of the host's memory above what it holds already.

    To be used within `tight_heap`. Whether a trial kept to its budget is told by its peak; RLIMIT_DATA, which would
    refuse at the budget, is set above it (`budget.limit_slack`). Libraries do not survive every refusal (oneDNN's
    backward of a convolution ends the process by SIGSEGV where a small block is refused, seen in 3 of 13 plans with
    torch 2.13), and this process is the user's. Far above the budget it is a large tensor that is refused, which
    PyTorch answers with an exception.

    A limit counts from what the process holds when a trial begins, without what the first job left for good (modules,
    compiled kernels), which a fresh process would need as well.
    """

    def __init__(self, live: LiveStateSize) -> None:
        super().__init__()
        self._live = live
        self._host: AvailableMemory | None = None
        self._kept_bytes: int | None = None
        self._room_bytes = 0

    def begin(self) -> Mapping[str, Any]:
        """As `HostMeter`."""
        trim_heap()
        return super().begin()

    def start(self) -> None:
        """Begin a new VmHWM, where the kernel allows it, with everything set aside already."""
        trim_heap()
        super().start()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """RLIMIT_DATA above what is held now, what of the budget is left beside the live objects, and the slack."""
        self._room_bytes = max(0, budget_bytes - self._live.held_bytes - (self._kept_bytes or 0))
        slack_bytes = limit_slack(self._room_bytes, read_host_memory().free_bytes)
        return data_limit(self._before.data_bytes + self._room_bytes + slack_bytes)

    def read(self) -> Reading:
        """The peak since `start`, live objects included."""
        reading = super().read()
        peak = reading.peak_reserved_bytes
        return replace(reading, peak_reserved_bytes=None if peak is None else self._live.held_bytes + peak)

    def measure_leftover(self) -> int:
        """What the last job did not give back, in resident bytes; that of the first job is remembered."""
        trim_heap()
        assert self._base is not None
        kept = max(0, read_process_memory().anonymous_bytes - self._base.anonymous_bytes)
        if self._kept_bytes is None:
            self._kept_bytes = kept
        return kept

    def choose_budget(self, facts: Mapping[str, Any], memory: MemorySize | None, reserve: MemorySize | None) -> int:
        """The budget in bytes: of what is free beside a copy, and what the live objects hold.

        Raises:
            UsageError: It cannot be had.
        """
        host = read_host_memory()
        free_bytes = max(0, host.free_bytes - self._live.copy_bytes) + self._live.held_bytes
        self._host = AvailableMemory(host.total_bytes, free_bytes, host.bound)
        return choose_budget(self._host, memory, reserve)

    def describe(self) -> dict[str, Any]:
        """The host, what training may have of it, and how it is enforced."""
        assert self._host is not None
        return {
            **asdict(self._host),
            "enforced_by": "the peak, and RLIMIT_DATA some way above, in this process",
            "peak": "what live objects hold, and VmHWM above what was resident before, and what is untouched",
        }

    def judge(self, trial: Trial, reading: Reading, around_evaluation: Sequence[Reading]) -> Trial:
        """Out of memory where the peak went beyond the budget."""
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
        """By how much a trial went beyond its budget; 0 when it did not, or nobody can tell."""
        return max(0, (reading.peak_reserved_bytes or 0) - self._live.held_bytes - self._room_bytes)


class CardMemoryLimit(CardMeter):
    """A card, with whatever else PyTorch's allocator in this process holds there."""

    def __init__(self, device: torch.device) -> None:
        try:
            torch.get_device_module("cuda").init()
        except (RuntimeError, AssertionError) as error:  # No driver that works; a build without CUDA.
            raise start_error(device, error) from error
        super().__init__(torch.cuda.current_device() if device.index is None else device.index)
        self._report: CardReport | None = None

    def choose_budget(self, facts: Mapping[str, Any], memory: MemorySize | None, reserve: MemorySize | None) -> int:
        """Of what is free and what this process's allocator holds, its cache released."""
        self._report = read_record(facts["card"], CardReport)
        return choose_card_budget(self._report, memory, reserve)

    def describe(self) -> dict[str, Any]:
        """The card, and who holds it."""
        assert self._report is not None
        return describe_card(self._report)

    def judge(self, trial: Trial, reading: Reading, around_evaluation: Sequence[Reading]) -> Trial:
        """The allocator sees all of it."""
        return trial


MemoryLimit: TypeAlias = "HostMemoryLimit | CardMemoryLimit"
"""A device's memory, as this process uses it."""


def make_memory_limit(device: torch.device, live: LiveStateSize) -> MemoryLimit:
    """The place that `device` is; on a card, CUDA starts if it has not."""
    return HostMemoryLimit(live) if device.type == "cpu" else CardMemoryLimit(device)
