"""Meters of memory: they limit the memory of a job and measure its peak, on the host or on a card."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from autoaccum.accumulation.out_of_memory import find_out_of_memory, is_context_dead
from autoaccum.devices.host_memory import ProcessMemory, check_data_limit, data_limit, read_process_memory, reset_peak
from autoaccum.devices.trial_record import Reading
from autoaccum.units import MIB

_MOST_LEFTOVER_BYTES = 256 * MIB
"""What jobs may leave without having it counted against later ones: modules and kernels, but no leak."""


class Meter(Protocol):
    """A meter of one device's memory, in the process that runs a workload there."""

    @property
    def device(self) -> torch.device:
        """The device that models are moved to."""

    def open(self) -> None:
        """Make the device ready; called when the workload is loaded.

        Raises:
            UsageError: There is no such device here.
            NotMeasuredError: Its memory cannot be limited here.
        """

    def begin(self) -> Mapping[str, Any]:
        """Take the memory that is held now, with PyTorch warm, as the baseline; return the facts for a budget."""

    def start(self) -> None:
        """Begin a new measurement of the peak."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Return a context in which memory beyond the budget is refused; call `start` before."""

    def lap(self) -> int:
        """Return the peak in bytes since `start` or the last lap. `read` still knows it."""

    def read(self) -> Reading:
        """Return the memory taken since `start`."""

    def rebase(self) -> None:
        """Let what jobs have left not count against later ones, where that can be told."""

    def end_job(self) -> None:
        """Remember what the first job has left, where it counts against later ones; called after each job."""


class HostMeter:
    """A meter of the host memory that this process takes (`devices.cpu.CpuDevice` says what counts)."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._base: ProcessMemory | None = None
        self._after_first_job: ProcessMemory | None = None
        self.start()

    def open(self) -> None:
        """Raise NotMeasuredError unless the kernel holds a process to the limit."""
        check_data_limit()

    def begin(self) -> Mapping[str, Any]:
        """Take the baseline."""
        self._base = read_process_memory()
        return {}

    def start(self) -> None:
        """Reset VmHWM."""
        reset_peak()
        self._before = read_process_memory()
        self._lapped_bytes, self._untouched_bytes = 0, self._before.untouched_bytes

    def lap(self) -> int:
        """Return the peak since `start` or the last lap."""
        now, before = read_process_memory(), self._before
        self._lapped_bytes = max(self._lapped_bytes, now.peak_above(before))
        # What oneDNN has reserved for kernels of other sizes is not this one's.
        peak = now.peak_above(replace(before, data_bytes=before.anonymous_bytes + self._untouched_bytes))
        self._untouched_bytes = now.untouched_bytes
        reset_peak()
        return peak

    def rebase(self) -> None:
        """Take the memory that is held now as the baseline: what jobs have left does not count against later ones."""
        now, base = read_process_memory(), self._base or self._before
        allowed_bytes = min(now.data_bytes, base.data_bytes + _MOST_LEFTOVER_BYTES)
        self._base, self._after_first_job = replace(now, data_bytes=allowed_bytes), None

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Set RLIMIT_DATA for a job to the budget above the baseline.

        Memory that the first job since the baseline left (such as late imports) counts against it, since a fresh
        process would need it as well. Memory that later jobs left is added to the limit: oneDNN reserves 256 KiB for
        each kernel it compiles and keeps those of other sizes.
        """
        base = self._base or self._before
        others = (
            0 if self._after_first_job is None else max(0, self._before.data_bytes - self._after_first_job.data_bytes)
        )
        return data_limit(base.data_bytes + min(others, _MOST_LEFTOVER_BYTES) + budget_bytes)

    def read(self) -> Reading:
        """Return the peak since `start`."""
        before, after = self._before, read_process_memory()
        return Reading(
            peak_reserved_bytes=max(after.peak_above(before), self._lapped_bytes),
            shared_bytes=max(0, after.shared_bytes - before.shared_bytes),
        )

    def end_job(self) -> None:
        """Remember what is held after the first job: it counts against the limit of every later one."""
        self._after_first_job = self._after_first_job or read_process_memory()


def make_meter(device: str) -> Meter:
    """Make the meter of a child for `device`: `cpu` or `cuda:N`."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return HostMeter()
    from autoaccum.devices.card_meter import CardMeter

    return CardMeter(int(index))


def warm_up(device: torch.device | str = "cpu") -> None:
    """Run a small training step of each common kind on `device`, in fp32 and under autocast, and discard it.

    On a card this loads the libraries and kernels of convolutions, attention and matrix products, which take some
    hundred MiB outside of PyTorch's allocator. A step that the card does not support is skipped. The number of threads
    is fixed to PyTorch's choice.
    """
    torch.set_num_threads(torch.get_num_threads())
    device = torch.device(device)
    for train in (_train_convolutional, _train_attentive, _multiply):
        try:
            train(device)
        except RuntimeError as error:
            if device.type == "cpu" or find_out_of_memory(error) is not None or is_context_dead(error):
                raise
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _train_convolutional(device: torch.device) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    _train(model.to(device), torch.ones(4, 3, 8, 8, device=device))


def _train_attentive(device: torch.device) -> None:
    _train(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).to(device), torch.ones(2, 8, 32, device=device))


def _multiply(device: torch.device) -> None:
    wide = torch.ones(512, 512, device=device)
    (wide @ wide).sum().item()


def _train(model: nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    lower = torch.bfloat16 if inputs.device.type == "cpu" or torch.cuda.is_bf16_supported(False) else torch.float16
    for enabled in (False, True):
        with torch.autocast(inputs.device.type, lower, enabled=enabled):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
