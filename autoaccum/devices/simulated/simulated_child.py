"""Trial runs on a simulated card: the Accumulator that trains, and a trace of its allocations."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import singledispatchmethod
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn

from autoaccum.accumulation.ranks.launch import choose_parallel
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, on_device
from autoaccum.accumulation.step_result import StepResult
from autoaccum.devices.base import Inspection
from autoaccum.devices.child.failures import Failure, describe_failure
from autoaccum.devices.child.requests import Handler
from autoaccum.devices.explanation import Change
from autoaccum.devices.inspection import (
    SAMPLES,
    collect_warnings,
    describe_environment,
    describe_run,
    probe_size,
    probe_sizes,
    remember_forwards,
)
from autoaccum.devices.simulated.alike_ranks import ALLOCATORS, join_alike_ranks
from autoaccum.devices.simulated.simulation_requests import (
    CountCost,
    LabelParts,
    ListAlike,
    LoadOnCard,
    SuggestChanges,
    TraceParts,
    UseCard,
)
from autoaccum.devices.simulated.workload_variants import apply_change, simulated_workload, suggest_changes
from autoaccum.devices.trial_child import load_requested
from autoaccum.devices.trial_requests import Inspect, PartsRequest
from autoaccum.devices.trial_run import TrialRun, move_model, seed_everything
from autoaccum.errors import UsageError
from autoaccum.options import Options, Parallel, make_options
from autoaccum.simulation.cards import Card, CardInUse
from autoaccum.simulation.trace_records import LabelledTrace, Trace, UpdateCost
from autoaccum.simulation.tracing.cost_counter import CostCounter
from autoaccum.simulation.tracing.deferred_compiler import defer_compiler
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.fake_cuda import DEVICE
from autoaccum.simulation.tracing.labelling import BlockLabeller
from autoaccum.simulation.tracing.one_rank import prepare_ranks
from autoaccum.simulation.tracing.recorder import Watcher, manual_garbage_collection
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.simulation.unsupported import as_workload_error, reads_missing_host_value
from autoaccum.sources.workload import Workload

T = TypeVar("T")


class TracedTrial(TrialRun):
    """The trial of a request on the card of `mode`, which must be entered; each method runs it once more.

    The batch has the size of the largest part, or of all parts if they need each other, and stays on the host. Garbage
    is collected only between updates, so that every trace of a step is the same.

    Attributes:
        result: What its last update returned.

    Args:
        workload: The workload, with the savers of the request.
        request: The parts, and how they run.
        mode: The card.
        mesh: As of `TrialRun`.
    """

    result: StepResult

    def __init__(
        self, workload: Workload, request: PartsRequest[Any], mode: FakeCudaMode, mesh: tuple[int, ...] | None
    ) -> None:
        def mark_update() -> None:  # No method: a cycle would keep the model until garbage is collected.
            gc.collect()
            mode.recorder.mark_update()

        self._request, self._mode = request, mode
        self._samples = sum(request.parts) if request.needs_whole_batch else max(request.parts)
        how: dict[str, Any] = {"mesh": mesh, "grad_sync": request.grad_sync or "each"}
        super().__init__(workload, self._samples, device=DEVICE, before_update=mark_update, **how)

    def trace(self, watcher: Watcher | None = None) -> Trace:
        """Return its trace."""
        mode = self._mode
        gc.collect()
        found, weights = mode.earlier
        live = mode.recorder.live_storages()
        if any(live.get(key) is ref for key, ref in weights.items()):  # By its outputs, which a global holds, say.
            mode.recorder.forget_all_but(found)
        found, mode.earlier = mode.recorder.live_storages(), ({}, {})
        mode.numbering.restart()
        mode.values.restart()
        mode.recorder.begin(lambda: self.phase, watcher)
        with manual_garbage_collection():
            try:
                request = self._request
                self.result = self.run(request.parts, request.lengths, needs_whole_batch=request.needs_whole_batch)
            finally:
                mode.phase = self.phase
                trace = mode.recorder.trace(self._request.parts)
        parameters = (getattr(each, "_local_tensor", each) for model in self.models for each in model.parameters())
        keys = {id(each.untyped_storage()) for each in parameters}
        live = mode.recorder.live_storages()
        mode.earlier = found, {key: live[key] for key in keys & live.keys() if live[key] is not found.get(key)}
        batch = self._samples if mode.values.computed else 0
        return replace(trace, host_bytes=self.host_bytes, batch=batch)

    def label(self) -> LabelledTrace:
        """Return the same trace with labels for its blocks."""
        loss = self._workload.objective.criterion
        auxiliary = [loss.function] if loss is not None and isinstance(loss.function, nn.Module) else []
        auxiliary += find_auxiliary_modules(self._workload).values()
        allocators = () if self._mode.sharded_type is None else ALLOCATORS
        labeller = BlockLabeller(self._mode.recorder, self, auxiliary, allocators)
        with labeller.labelling():
            trace = self.trace(labeller)
        return labeller.label(trace)

    def count_cost(self) -> UpdateCost:
        """Return what its last update costs; of one rank, where there are several."""
        counter = CostCounter(self._mode.recorder)
        with counter:
            self.trace(counter)
        return counter.cost(self._request.parts)


class SimulatedChild(Handler):
    """Handles the requests of `simulation_requests`, and `Inspect`, one after the other; `LoadOnCard` comes first."""

    _mode: FakeCudaMode
    _in_use: CardInUse
    _workload: Workload
    _share: int
    _options: Options

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lazy: tuple[str, ...] = ("models", "batches")
        self._inspected: dict[TraceParts, Trace] = {}

    @staticmethod
    def prepare() -> None:
        """Import the parts of PyTorch that it would import with the first fake tensor and the first optimizer."""
        defer_compiler()
        card = Card(name="any", title="any", total_bytes=1 << 30, capability=(8, 0), multiprocessors=1, source="none")
        with simulate(card):
            weight = torch.ones(2, 2, device="cuda", requires_grad=True)
            torch.autograd.backward((weight @ weight).sum())
            torch.optim.AdamW([weight]).step()
        if torch.distributed.is_available():
            import_module("torch.distributed.tensor")  # C++ would, with the first operator within another.

    def close(self) -> None:
        """Undo the simulation."""
        self._stack.close()

    @singledispatchmethod
    def handle(self, request: Any) -> Any:
        """As `Handler.handle`."""
        return super().handle(request)

    @handle.register
    def _load(self, request: LoadOnCard) -> dict[str, Any] | Failure:
        # What cannot be simulated gets one message of our own, with the user's frames.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            self._in_use, self._share = CardInUse(request.card, request.others), request.rank_samples
            self._options = make_options(**request.options)
            if self._options.world_size > 1:
                prepare_ranks()
            self._mode = self._stack.enter_context(simulate(self._in_use))
            if self._options.values is not None:
                self._mode.values.computed = True
                self._lazy = ()
            if self._options.world_size > 1:
                join_alike_ranks(self._options.world_size, self._mode, self._stack)
            seed_everything()
            self._workload = load_requested(request, self.paths)
        except BaseException as error:
            return describe_failure(as_workload_error(error, request.doing) or error, request.doing)
        if self._mode.values.computed and self._mesh is not None:
            raise UsageError(
                "ranks shard the model, and the CPU computes values of a whole one",
                hint="take --parallel ddp, or leave --values out",
            )
        gc.collect()
        gc.freeze()
        return {}

    @handle.register
    def _use_card(self, request: UseCard) -> bool:
        if self._in_use.was_asked_by_code:
            return False
        self._in_use.switch(request.card, request.others)
        self._inspected.clear()
        return True

    @handle.register
    def _list_alike(self, _: ListAlike) -> tuple[str, ...]:
        return tuple(card.name for card in self._in_use.alike)

    @handle.register
    def _inspect(self, request: Inspect) -> Inspection | Failure:
        return self._run(
            lambda workload: self._inspect_workload(request.replaced(workload), request.savers),
            "a trial of two samples on the simulated card",
        )

    def _inspect_workload(self, workload: Workload, savers: tuple[str, ...] | None) -> Inspection:
        """Run a trial of two micro-batches of two samples, or fewer if the share is smaller, and keep its trace.

        No values are computed, so neither the loss nor its weighting can be checked.
        """
        mode, rank_samples = self._mode, self._share
        size = probe_size(workload, SAMPLES, rank_samples)
        request = TraceParts(
            parts=(size,) if size == rank_samples else (size, size),
            needs_whole_batch=bool(workload.coupled) or workload.batchnorm == "exact",
            savers=savers,
        )
        with collect_warnings() as messages:
            trial = TracedTrial(workload, request, mode, self._mesh)
            trace = trial.trace()
        model = trial.built[0]
        forward = remember_forwards(workload, model)
        workload, least_size, notes = probe_sizes(workload, model, forward, rank_samples, has_drawn=trial.has_drawn)
        inspection = Inspection(
            **describe_run(workload, trial, rank_samples, terms=list(trial.result.terms), weighting=messages),
            environment=describe_environment(DEVICE),
            least_size=least_size,
            parallel=self._parallel,
            accumulation_warnings=tuple(messages),
            cautions=tuple(mode.notices),
            notes=(*mode.checks, *notes),
        )
        self._inspected[replace(request, needs_whole_batch=inspection.workload.whole_batch is not None)] = trace
        return inspection

    @handle.register
    def _trace(self, request: TraceParts) -> Trace | Failure:
        trace = self._inspected.get(request)
        return self._run_trial(TracedTrial.trace, request) if trace is None else trace

    @handle.register
    def _label(self, request: LabelParts) -> LabelledTrace | Failure:
        return self._run_trial(TracedTrial.label, request)

    @handle.register
    def _count(self, request: CountCost) -> UpdateCost | Failure:
        return self._run_trial(TracedTrial.count_cost, request)

    @handle.register
    def _suggest(self, _: SuggestChanges) -> tuple[Change, ...] | Failure:
        def suggest(workload: Workload) -> tuple[Change, ...]:
            model = move_model(workload.build_model(), DEVICE)
            return tuple(suggest_changes(workload, model, workload.build_optimizer(model), self._in_use.card))

        return self._run(suggest, "looking for changes to suggest")

    @property
    def _parallel(self) -> Parallel | None:
        """How the ranks train one model; None for one rank."""
        if self._options.world_size == 1:
            return None
        return choose_parallel(self._options.parallel, self._workload.parallelize)

    @property
    def _mesh(self) -> tuple[int, ...] | None:
        """The mesh that the model is sharded over; None if it is not."""
        return self._options.mesh or (self._options.world_size,) if self._parallel == "fsdp2" else None

    def _run_trial(self, job: Callable[[TracedTrial], T], request: PartsRequest[Any]) -> T | Failure:
        """Run a job on a trial of the parts of a request; its warnings were shown by the inspection."""

        def run(workload: Workload) -> T:
            workload = request.replaced(workload)
            if isinstance(request, TraceParts) and request.change:
                workload = apply_change(workload, request.change)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return job(TracedTrial(workload, request, self._mode, self._mesh))

        return self._run(run, f"{request.doing} on the simulated card")

    def _run(self, job: Callable[[Workload], T], about: str) -> T | Failure:
        """Run a job on a lazily built batch and model; on real ones if it reads values that these lack."""
        failure: BaseException | None = None
        live = self._mode.recorder.live_storages()
        try:
            workload = simulated_workload(self._workload, self._mode, self._lazy)
            with on_device(find_auxiliary_modules(workload).values(), DEVICE):
                return job(workload)
        except BaseException as error:
            failure = error
        if self._lazy and reads_missing_host_value(failure):
            self._lazy, failure = self._lazy[:-1], None
            gc.collect()
            self._mode.recorder.forget_all_but(live)
            return self._run(job, about)
        doing = f"{about}, in {self._mode.phase}"
        lost = self._mode.values.lost if self._mode.values.computed else None
        return describe_failure(as_workload_error(failure, doing, lost=lost) or failure, doing)
