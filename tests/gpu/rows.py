"""The rows of the table, in the order in which they are measured: each a section, a title, and how to make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.device_choice import make_device
from autoaccum.options import Options
from autoaccum.simulation.cards import Card
from autoaccum.units import GIB, MemorySize
from tests.gpu.cases import CASES, Case
from tests.gpu.comparison import measure, predict, trace_case
from tests.gpu.constants import compare_operation, measure_operation
from tests.gpu.operation import Operation
from tests.gpu.operations import all_operations
from tests.gpu.probes import measure_context, measure_growth
from tests.gpu.simulated_operations import Simulated, ask_simulation

Row = Mapping[str, Any]
Job = tuple[str, str, Callable[[], Row]]


@dataclass
class Bench:
    """The bench that rows are measured on: a card, or a stand-in for it.

    Attributes:
        place: Where operations and trials run; None: nothing runs, and only predictions are made.
        card: Which is simulated.
        size: Samples in a micro-batch, of all cases; None: as they have it.
        match: The pattern of the rows that are wanted.
    """

    place: torch.device | None
    card: Card
    size: int | None = None
    match: str = ""
    _simulated: dict[str, Simulated] = field(default_factory=dict)
    _device: tuple[TrialSettings, Device] | None = None

    def jobs(self) -> Iterator[Job]:
        """Yield all rows; a device that one of them opened stays open for the next."""
        if self.place is not None:
            yield "probes", "context", partial(measure_context, self.place)
            yield "probes", "growth", partial(measure_growth, self.place)
        for operation in all_operations():
            yield "constants", operation.title, partial(self._constant, operation)
        for case in CASES:
            yield "comparison", case.title, partial(self._compare, case)
        self.close()

    def close(self) -> None:
        """End the processes of the device that is open."""
        opened, self._device = self._device, None
        if opened is not None:
            opened[1].close()

    def _constant(self, operation: Operation) -> Row:
        if not self._simulated:
            self._simulated = ask_simulation(self.card, self.match)
        measured = None if self.place is None else measure_operation(operation, self.place)
        return compare_operation(self._simulated[operation.title], measured)

    def _compare(self, case: Case) -> Row:
        case = self._sized(case)
        predicted = predict(trace_case(case, self.card), self.card)
        measured = None if self.place is None else measure(case, self._open(case), predicted)
        return {"parts": list(case.parts), "simulated": predicted, "measured": measured}

    def _sized(self, case: Case) -> Case:
        return case if self.size is None else replace(case, size=self.size)

    def _open(self, case: Case) -> Device:
        """The device of the case's workload, at whatever size: one process serves several."""
        sizes = [self._sized(other).size for other in CASES if (other.file, other.name) == (case.file, case.name)]
        settings = TrialSettings(reference=case.reference, share=2 * max(sizes))
        if self._device is None or self._device[0] != settings:
            self.close()
            self._device = settings, _make_device(self.place, settings)
        return self._device[1]


def _make_device(place: torch.device | None, settings: TrialSettings) -> Device:
    """The card, with all that is free of it; of the host 4 GiB."""
    if place is not None and place.type == "cuda":
        return CudaDevice(settings, index=place.index)
    return make_device(replace(settings, options=Options(device="cpu", memory=MemorySize(bytes=4 * GIB))))
