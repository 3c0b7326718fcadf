"""Timed updates: those that training makes, by the Accumulator that trains."""

from __future__ import annotations

import time
import warnings

import torch

from autoaccum.accumulation.reachable_objects import find_auxiliary_modules
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.devices.trial_run import make_accumulator, move_model, seed_everything, synchronize_device
from autoaccum.workload.spec import Workload


class UpdateTimer:
    """Makes updates of one batch with a learning rate of 0, so that nothing diverges.

    Args:
        workload: The workload, with the options of the plan and a `batch`.
        device: The device to train on.
        target_batch: Samples per update.
    """

    def __init__(self, workload: Workload, device: torch.device, target_batch: int) -> None:
        self._device = device
        seed_everything()
        model = move_model(workload.build_model(), device)
        for module in find_auxiliary_modules(workload).values():
            move_model(module, device)
        optimizer = workload.build_optimizer(model)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0  # A tensor stays one.
        self._batch = workload.build_batch(target_batch)
        self._accumulator = make_accumulator(workload, model, optimizer, target_batch)

    def time(self, micro_batch: int) -> float:
        """Make one update in micro-batches of that size; return its seconds."""
        self._accumulator.micro_batch = micro_batch
        synchronize_device(self._device)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them.
            self._accumulator.step(self._batch)
        synchronize_device(self._device)
        return time.perf_counter() - began
