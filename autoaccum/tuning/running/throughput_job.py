"""Updates with one micro-batch size after the other, timed in the child as training makes them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autoaccum.accumulation.observers import AccumulationWarning
from autoaccum.accumulation.reach import find_beside
from autoaccum.devices.rehearsal import make_accumulator, place_model, seed_everything, wait_for
from autoaccum.planning.request import LOOKED_AT
from autoaccum.training.trainee import find_device
from autoaccum.tuning.running.timing import RISING_UPDATES, TailOff, needs_more
from autoaccum.workload.samples import adapt
from autoaccum.workload.spec import Workload, no_batch


class ThroughputJob:
    """A model that makes updates from its worst-case batch, at a learning rate of 0: nothing diverges meanwhile.

    Attributes:
        micro_batch: The size that is run, or was when something was raised; None before any.

    Args:
        workload: With what the study asks of it in place of its own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        target_batch: Samples per update.

    Raises:
        WorkloadError: It makes no batch.
    """

    def __init__(self, workload: Workload, device: str, target_batch: int) -> None:
        self.micro_batch: int | None = None
        self._place = find_device(device)
        workload = adapt(workload, most=target_batch, worst_of=LOOKED_AT if workload.batch is no_batch else None)
        seed_everything()
        model = place_model(workload.build_model(), self._place)
        for module in find_beside(workload).values():
            place_model(module, self._place)
        optimizer = workload.build_optimizer(model)
        _stand_still(optimizer)
        self._batch = workload.build_batch(target_batch)
        self._accumulator = make_accumulator(workload, model, optimizer, target_batch)

    def run(self, sizes: Sequence[int], warmed: Callable[[int], Any]) -> dict[str, Any]:
        """Time updates with each size; `sizes` of those that were run, with the seconds of each update.

        The sizes take turns, so that a clock that drifts hits all of them alike.

        Args:
            sizes: Micro-batches in samples.
            warmed: Told of each that runs.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them.
            seconds = self._warm_up(sorted(sizes, reverse=True), warmed)
            while any(map(needs_more, seconds.values())):
                for size, taken in seconds.items():
                    if needs_more(taken):
                        taken.append(self._time(size))
        return {"sizes": [[size, taken] for size, taken in seconds.items()]}

    def _warm_up(self, sizes: Sequence[int], warmed: Callable[[int], Any]) -> dict[int, list[float]]:
        """The first update of each size is not counted; those far behind are left out, with all that are smaller."""
        seconds: dict[int, list[float]] = {}
        tail = TailOff()
        for size in sizes:
            for _ in range(1 if seconds else RISING_UPDATES):
                self._time(size)
            seconds[size] = [self._time(size)]
            warmed(size)
            if tail.is_over(seconds[size][0]):
                break
        return seconds

    def _time(self, size: int) -> float:
        self._accumulator.micro_batch = self.micro_batch = size
        wait_for(self._place)
        began = time.perf_counter()
        self._accumulator.step(self._batch)
        wait_for(self._place)
        return time.perf_counter() - began


def _stand_still(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.zero_()
        elif isinstance(rate, (int, float)):
            group["lr"] = 0.0
