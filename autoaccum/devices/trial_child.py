"""The child that loads a workload, inspects it and runs its trials.

The workload is imported once; every trial builds a new model, optimizer and batch.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, singledispatchmethod
from typing import Any

import torch
from torch import nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.out_of_memory import find_out_of_memory, release_memory
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, on_device
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Handler, can_be_copied
from autoaccum.devices.inspection import SAMPLES, inspect_workload
from autoaccum.devices.meters import Meter, make_meter, synchronize_device, warm_up
from autoaccum.devices.trial_requests import Inspect, LoadWorkload, RunTrial, TimeUpdate
from autoaccum.devices.trial_run import TrialRun, move_model, seed_everything
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError, first_line
from autoaccum.options import make_options
from autoaccum.sources.samples import apply_spec
from autoaccum.sources.source import NamedSource, read_source
from autoaccum.sources.workload import Workload

_LEAD_RATIO = 4
"""How many times smaller than the trial's part a first update has to be, so that it costs little if the part fails."""


class TrialChild(Handler):
    """Handles the requests of `trial_requests`, one after the other; `LoadWorkload` comes first."""

    _workload: Workload
    _meter: Meter
    _share: int
    _waits: bool
    """Whether it has computed nothing yet, so that it can be copied."""
    _world_size: int
    _timed: tuple[Accumulator, Any] | None = None
    _least_run: int | None = None
    """The least samples that an update has run here."""

    @staticmethod
    def prepare() -> None:
        """Have PyTorch import what it puts off until the first optimizer.

        Neither threads nor a card are touched, since a workload may choose them.
        """
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    @singledispatchmethod
    def handle(self, request: Any) -> Any:
        """As `Handler.handle`."""
        return super().handle(request)

    @handle.register
    def _load(self, request: LoadWorkload) -> Mapping[str, Any]:
        """Import the workload and warm PyTorch up; memory that the process holds by then does not count as a trial's.

        The workload comes first: a bad file is reported at once, and the warm-up uses its choice of threads and cards.
        """
        self._meter, self._share = make_meter(request.device), request.rank_samples
        seed_everything()
        self._workload = load_requested(request, self.paths)
        if isinstance(read_source(request.source), NamedSource):
            build = partial(_build_on, self._meter.device, self._workload.build_model)
            self._workload = replace(self._workload, model=build)
        options = make_options(**request.options)
        self._world_size = options.world_size
        if options.world_size > 1 and self._workload.parallelize is not None and options.parallel is None:
            raise UsageError(
                "the workload has parallelize, and trials on a device of this machine run the whole model",
                hint="plan for a simulated card (--gpu NAME), or take --parallel ddp",
            )
        self._waits = request.to_copy and can_be_copied()
        facts = {} if self._waits else start_meter(self._meter)
        return {**facts, "is_copied": self._waits}

    @handle.register
    def _inspect(self, request: Inspect) -> Inspection:
        self._begin()
        workload, inspection = request.replaced(self._workload), None
        least = workload.multiple_of or 1
        try:
            inspection = inspect_workload(workload, self._share, meter=self._meter)
        except Exception as error:
            if find_out_of_memory(error) is None or least >= min(SAMPLES, self._share):
                raise
        release_memory()
        if inspection is None:  # The device has no room for two samples, and maybe for one.
            inspection = inspect_workload(workload, least, meter=self._meter)
            release_memory()
        self._least_run = inspection.update_samples
        return inspection

    @handle.register
    def _trial(self, request: RunTrial) -> Trial:
        """Run a trial under its limit, which is lifted before a failure is described."""
        self._begin()
        release_memory()
        meter, workload = self._meter, request.replaced(self._workload)
        has_cache, least = meter.device.type != "cpu", self._least_run or request.parts[0]
        is_plain = not (has_cache or request.lengths or request.needs_whole_batch or workload.hold_outputs)
        lead = least if is_plain and _LEAD_RATIO * least <= request.parts[0] else None
        self._least_run = min(least, *request.parts)
        run = TrialRun(
            workload, self._share, meter.device, world_size=self._world_size, before_update=meter.begin_update
        )
        failure: BaseException | None = None
        meter.start()
        began = time.perf_counter()
        with meter.limit(request.limit_bytes), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The inspection has shown them.
            try:
                with on_device(find_auxiliary_modules(workload).values(), meter.device):
                    run.run(request.parts, request.lengths, needs_whole_batch=request.needs_whole_batch, lead=lead)
            except BaseException as error:
                failure = error
        fields = {"seconds": time.perf_counter() - began, "host_bytes": run.host_bytes}
        trial = meter.record(request.parts, request.limit_bytes, **fields)
        self.is_spoilt = failure is not None
        if failure is None:
            return trial
        doing = f"{request.doing}, {run.phase}"
        return trial.failed(describe_failure(failure, doing, at=f"{doing}: "), run.phase)

    def _begin(self) -> None:
        """Make the device ready, unless loading has."""
        if self._waits:
            self._waits = False
            start_meter(self._meter)

    @handle.register
    def _time(self, request: TimeUpdate) -> float:
        """Make one update without a limit, since larger micro-batches have run within it; return its seconds."""
        self._timed = self._timed or prepare_timing(self._workload, self._meter.device, self._share)
        accumulator, batch = self._timed
        accumulator.micro_batch = request.micro_batch
        synchronize_device(self._meter.device)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them.
            accumulator.step(batch)
        synchronize_device(self._meter.device)
        return time.perf_counter() - began


def prepare_timing(workload: Workload, device: torch.device, target_batch: int) -> tuple[Accumulator, Any]:
    """Return an Accumulator and a batch to time updates with; the learning rate is 0, so that nothing diverges."""
    for module in find_auxiliary_modules(workload).values():
        move_model(module, device)
    run = TrialRun(replace(workload, ema=False, hold_outputs=False), target_batch, device)
    prepared = run.prepare([target_batch])
    for group in run.built[1].param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0  # A tensor stays one.
    return prepared


def _build_on(device: torch.device, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model by name where it is tried: random weights of a billion parameters take the host a minute."""
    with device:
        return build()


def load_requested(request: LoadWorkload, paths: ImportPaths | None) -> Workload:
    """Return the workload of a request, with its options; its modules have to be in `paths`."""
    loaded = read_source(request.source).load()
    if paths is not None:
        paths.check_loaded(loaded.path)
    return apply_spec(loaded, make_options(**request.options).spec, largest_batch=request.rank_samples)


def start_meter(meter: Meter) -> Mapping[str, Any]:
    """Make the device ready for trials, and return the facts that a budget is chosen by.

    Raises:
        UsageError, NotMeasuredError: The device cannot be used. None of this is the user's code.
    """
    try:
        meter.open()
        warm_up(meter.device)
    except Exception as error:
        if isinstance(error, AutoaccumError) or find_out_of_memory(error) is not None:
            raise
        raise NotMeasuredError(f"PyTorch does not start on {meter.device} ({first_line(error)})") from error
    release_memory()
    # Looking through PyTorch's own modules takes 0.3 s, several times a trial, and they are never garbage.
    gc.freeze()
    return meter.begin()
