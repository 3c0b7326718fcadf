"""What a child process measures and limits its jobs with: one kind of meter for each kind of memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from autoaccum.devices.reading import Reading


class Meter(Protocol):
    """The memory of one device, as the process sees it that runs a workload there."""

    @property
    def device(self) -> torch.device:
        """Where models go."""

    def open(self) -> None:
        """Make the device ready to be used; called once the workload is loaded.

        Raises:
            UsageError: There is no such device here.
            NotMeasuredError: Its memory cannot be limited here.
        """

    def begin(self) -> Mapping[str, Any]:
        """Count from what is held now, with PyTorch warm; returns what a budget is chosen by, as JSON has it."""

    def start(self) -> None:
        """Begin a new peak."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Within, memory beyond the budget is refused; after `start`."""

    def read(self) -> Reading:
        """What was taken since `start`."""

    def settle(self) -> int:
        """What the last job has not given back, in bytes: above the first job, or for that one above `begin`."""


def make_meter(device: str) -> Meter:
    """The meter a child has for the device called `device`: `cpu` or `cuda:N`."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        from autoaccum.devices.host_meter import HostMeter

        return HostMeter()
    from autoaccum.devices.card_meter import CardMeter

    return CardMeter(int(index), make_current=True)
