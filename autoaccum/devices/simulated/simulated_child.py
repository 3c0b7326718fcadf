"""Trial runs on a simulated card: the Accumulator that trains, and a trace of its allocations."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from autoaccum.devices.child.requests import Request
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.explanation import UpdateCost
from autoaccum.devices.inspection import (
    LAYOUT_SAMPLES,
    SAMPLES,
    collect_warnings,
    describe_setup,
    detect_multiple,
    find_advice,
    find_least_size,
    find_worst_draw,
    probe_size,
)
from autoaccum.devices.simulated.explain.suggested_changes import apply_change, suggest_changes
from autoaccum.devices.simulated.simulation_requests import (
    ChangedTrace,
    CountCost,
    LabelParts,
    ListAlike,
    LoadOnCard,
    SuggestChanges,
    SuggestedChange,
    TraceChanged,
    TraceParts,
    UseCard,
)
from autoaccum.devices.trial_child import load_requested
from autoaccum.devices.trial_record import Inspect, Loaded, PartsRequest
from autoaccum.devices.trial_run import TrialRun, move_model, seed_everything
from autoaccum.options import Options, Parallel
from autoaccum.simulation.cards import Card, CardInUse
from autoaccum.simulation.trace_records import LabelledTrace, Trace
from autoaccum.simulation.tracing.cost_counter import CostCounter
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.fake_cuda import DEVICE
from autoaccum.simulation.tracing.labelling import BlockLabeller
from autoaccum.simulation.tracing.one_rank import prepare_ranks, simulate_ranks
from autoaccum.simulation.tracing.placement import with_copied_criterion, with_host_batches, with_lazy_building
from autoaccum.simulation.tracing.recorder import OnAllocation
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.simulation.unsupported import as_workload_error, reads_missing_host_value
from autoaccum.sources.spec import Workload

T = TypeVar("T")


def trace_trial(
    workload: Workload, parts: Sequence[int], mode: FakeCudaMode, *, joined: bool = False, **of_ranks: Any
) -> tuple[Trace, TrialRun, list[str]]:
    """Run a trial of `parts` on the card of `mode`, which must be entered; also returns the names of the loss's terms.

    The batch has the size of the largest part, or of all `joined` ones (`PartsRequest`), and stays on the host. Garbage
    is collected only between updates, so that every trace of a step is the same.

    Args:
        workload: The workload.
        parts: As in `Trial`.
        mode: The card.
        joined: As in `PartsRequest`.
        of_ranks: `mesh` and `reduce` of `TrialRun`.
    """
    trial_run = _make_trial_run(workload, parts, mode, joined=joined, **of_ranks)
    trace, result = _run_traced(trial_run, parts, mode, joined=joined)
    return trace, trial_run, list(result.terms)


def label_trial(
    workload: Workload, parts: Sequence[int], mode: FakeCudaMode, *, joined: bool = False, **of_ranks: Any
) -> LabelledTrace:
    """Return the same trace with labels for its blocks."""
    trial_run = _make_trial_run(workload, parts, mode, lambda: labeller.mark_update(), joined=joined, **of_ranks)
    loss = workload.objective.criterion
    auxiliary = [loss.function] if loss is not None and isinstance(loss.function, nn.Module) else []
    auxiliary += find_auxiliary_modules(workload).values()
    labeller = BlockLabeller(mode.recorder, trial_run, mode.library_tensors, auxiliary)
    with labeller.labelling():
        trace, _ = _run_traced(trial_run, parts, mode, labeller.label_next, joined=joined)
    return labeller.label(trace)


def count_cost(
    workload: Workload, parts: Sequence[int], mode: FakeCudaMode, *, joined: bool = False, **of_ranks: Any
) -> UpdateCost:
    """Return what the last update of such a trial costs; of one rank, where there are several."""
    counter = CostCounter(lambda: trial_run.phase)
    trial_run = _make_trial_run(workload, parts, mode, counter.begin_update, joined=joined, **of_ranks)
    with counter:
        _run_traced(trial_run, parts, mode, joined=joined)
    return counter.cost(parts)


def _make_trial_run(
    workload: Workload,
    parts: Sequence[int],
    mode: FakeCudaMode,
    begin_update: Callable[[], None] | None = None,
    *,
    joined: bool,
    **of_ranks: Any,
) -> TrialRun:
    def before_update() -> None:
        gc.collect()
        mode.recorder.mark_update()
        if begin_update is not None:
            begin_update()

    size = sum(parts) if joined else max(parts)
    return TrialRun(workload, size, device=DEVICE, before_update=before_update, **of_ranks)


def _run_traced(
    trial_run: TrialRun,
    parts: Sequence[int],
    mode: FakeCudaMode,
    on_allocation: OnAllocation | None = None,
    *,
    joined: bool,
) -> tuple[Trace, StepResult]:
    mode.library_tensors.clear()
    gc.collect()
    mode.numbering.restart()
    if mode.cpu_values is not None:
        mode.cpu_values.numbers = torch.Generator().get_state()
    mode.recorder.begin(lambda: trial_run.phase, on_allocation)
    with manual_garbage_collection():
        try:
            result = trial_run.run(parts, joined=joined)
        finally:
            mode.phase = trial_run.phase
            trace = mode.recorder.trace(parts)
    if mode.cpu_values is not None:
        trace = replace(trace, batch=sum(parts) if joined else max(parts))
    return replace(trace, host_bytes=trial_run.host_bytes), result


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Collect garbage only on request, so that blocks are freed at the same place in every run.

    The threshold of 0 keeps collection off even if the workload enables it, as some do after timing a section.
    """
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()


def inspect_simulated(workload: Workload, share: int, mode: FakeCudaMode, **of_ranks: Any) -> tuple[Inspection, Trace]:
    """Run a trial of two micro-batches of two samples, or fewer if `share` is smaller; also returns the trace.

    No values are computed, so neither the loss nor its weighting can be checked.
    """
    size = probe_size(workload, SAMPLES, share)
    parts = (size,) if size == share else (size, size)
    joined = bool(workload.coupled) or workload.batchnorm == "exact"
    with collect_warnings() as messages:
        trace, trial_run, terms = trace_trial(workload, parts, mode, joined=joined, **of_ranks)
    assert trial_run.made is not None
    model, optimizer = trial_run.made
    workload, found_multiple = detect_multiple(workload, model, share)
    samples = probe_size(workload, LAYOUT_SAMPLES, share)
    fields = describe_setup(workload, model, optimizer, samples, terms)
    fields["recipe"]["misweighted"] = find_advice(messages)
    inspection = Inspection(
        **fields,
        environment=describe_environment(DEVICE),
        least_size=find_least_size(workload, model, share),
        joining=trial_run.joining,
        found_multiple=found_multiple,
        draw=find_worst_draw(workload, model, size) if trial_run.has_drawn else None,
        accumulation_warnings=tuple(messages),
        cautions=tuple(mode.notices),
        notes=tuple(mode.checks),
    )
    return inspection, trace


class SimulatedChild:
    """Handles the requests of `simulation_requests`, and `Inspect`, one after the other; `LoadOnCard` comes first."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._mode: FakeCudaMode | None = None
        self._in_use: CardInUse | None = None
        self._workload: Workload | None = None
        self._share = 0
        self._options = Options()
        self._lazy: tuple[str, ...] = ("models", "batches")
        self._traces: dict[TraceParts, Trace] = {}

    @staticmethod
    def prepare() -> None:
        """Import the parts of PyTorch that it would import with the first fake tensor and the first optimizer."""
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
    def handle(self, request: Request[Any]) -> Any:
        """Return the reply to `request`, or a `Failure`."""
        raise NotImplementedError(request)

    @handle.register
    def _load(self, request: LoadOnCard) -> Loaded | Failure:
        request.paths.use()
        doing = f"loading {request.reference}"
        # What cannot be simulated gets one message of our own, with the user's frames.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            self._in_use, self._share = CardInUse(request.card, request.others), request.share
            self._options = Options(**request.options)
            if self._options.world_size > 1:
                prepare_ranks()
            self._mode = self._stack.enter_context(simulate(self._in_use))
            if self._options.values is not None:
                self._mode.compute_values()
                self._lazy = ()
            if self._options.world_size > 1:
                simulate_ranks(self._options.world_size, self._mode, self._stack)
            seed_everything()
            workload = load_requested(request)
        except BaseException as error:
            return describe_failure(as_workload_error(error, doing) or error, doing)
        self._workload = with_host_batches(workload)
        if self._mode.cpu_values is not None and self._mesh is not None:
            return Loaded(
                refused="ranks shard the model, and the CPU computes values of a whole one: take --parallel ddp, or"
                " leave --values out"
            )
        gc.collect()
        gc.freeze()
        return Loaded()

    @handle.register
    def _use_card(self, request: UseCard) -> bool:
        assert self._in_use is not None
        if self._in_use.was_asked_by_code:
            return False
        self._in_use.switch(request.card, request.others)
        self._traces.clear()
        return True

    @handle.register
    def _list_alike(self, request: ListAlike) -> tuple[str, ...]:
        assert self._in_use is not None
        return tuple(card.name for card in self._in_use.alike)

    @handle.register
    def _inspect(self, request: Inspect) -> Inspection | Failure:
        def run(workload: Workload, mode: FakeCudaMode) -> Inspection:
            inspection, trace = inspect_simulated(request.replaced(workload), self._share, mode, mesh=self._mesh)
            joined = inspection.joining is not None
            self._traces[TraceParts(parts=trace.parts, joined=joined, savers=request.savers)] = trace
            return replace(inspection, parallel=self._parallel)

        return self._run(run, "a trial of two samples on the simulated card")

    @handle.register
    def _trace(self, request: TraceParts) -> Trace | Failure:
        if request not in self._traces:
            traced = self._run_trial(trace_trial, request)
            if isinstance(traced, Failure):
                return traced
            self._traces[request], *_ = traced
        return self._traces[request]

    @handle.register
    def _label(self, request: LabelParts) -> LabelledTrace | Failure:
        return self._run_trial(label_trial, request)

    @handle.register
    def _count(self, request: CountCost) -> UpdateCost | Failure:
        return self._run_trial(count_cost, request)

    @handle.register
    def _suggest(self, request: SuggestChanges) -> tuple[SuggestedChange, ...] | Failure:
        def run(workload: Workload, mode: FakeCudaMode) -> tuple[SuggestedChange, ...]:
            assert self._in_use is not None
            model = move_model(workload.build_model(), DEVICE)
            return tuple(suggest_changes(workload, model, workload.build_optimizer(model), self._in_use.card))

        return self._run(run, "looking for changes to suggest")

    @handle.register
    def _change(self, request: TraceChanged) -> ChangedTrace:
        def run(workload: Workload, mode: FakeCudaMode) -> Trace:
            changed = apply_change(request.replaced(workload), request.change)
            return trace_trial(changed, request.parts, mode, **self._fields(request))[0]

        assert self._mode is not None
        gc.collect()
        live = self._mode.recorder.live_storages()
        traced = self._run(run, request.doing, silent=True)
        if not isinstance(traced, Failure):
            return ChangedTrace(trace=traced)
        gc.collect()
        self._mode.recorder.forget_all_but(live)
        return ChangedTrace(message=traced.message)

    @property
    def _parallel(self) -> Parallel | None:
        """How the ranks train one model; None for one rank."""
        assert self._workload is not None
        several = self._options.world_size > 1
        return choose_parallel(self._options.parallel, self._workload.parallelize) if several else None

    @property
    def _mesh(self) -> tuple[int, ...] | None:
        """The mesh that the model is sharded over; None if it is not."""
        return self._options.mesh or (self._options.world_size,) if self._parallel == "fsdp2" else None

    def _fields(self, request: PartsRequest[Any]) -> dict[str, Any]:
        return {"joined": request.joined, "mesh": self._mesh, "reduce": request.reduce or "each", "draw": request.draw}

    def _run_trial(self, job: Callable[..., T], request: PartsRequest[Any]) -> T | Failure:
        """Run a job on a trial of the parts of a request."""
        fields = self._fields(request)
        return self._run(
            lambda workload, mode: job(request.replaced(workload), request.parts, mode, **fields),
            f"{request.doing} on the simulated card",
            silent=True,
        )

    def _run(self, job: Callable[[Workload, FakeCudaMode], T], about: str, *, silent: bool = False) -> T | Failure:
        """Run a job on a lazily built batch and model; if it reads values that these lack, run it again on real ones.

        A `silent` job shows no warnings, since the inspection has shown them.
        """
        assert self._workload is not None
        assert self._mode is not None
        failure: BaseException | None = None
        live = self._mode.recorder.live_storages()
        try:
            workload = with_copied_criterion(self._workload)
            auxiliary = find_auxiliary_modules(workload).values()
            if self._lazy:
                workload = with_lazy_building(workload, self._mode, batches="batches" in self._lazy)
            with on_device(auxiliary, DEVICE), warnings.catch_warnings():
                if silent:
                    warnings.simplefilter("ignore")
                return job(workload, self._mode)
        except BaseException as error:
            failure = error
        if self._lazy and reads_missing_host_value(failure):
            self._lazy, failure = self._lazy[:-1], None
            gc.collect()
            self._mode.recorder.forget_all_but(live)
            return self._run(job, about, silent=silent)
        doing = f"{about}, in {self._mode.phase}"
        lost = self._mode.cpu_values.lost if self._mode.cpu_values is not None else None
        return describe_failure(as_workload_error(failure, doing, lost=lost) or failure, doing)
