"""A rehearsal on the simulated card: the very Accumulator that trains, and what it asks of the allocator."""

from __future__ import annotations

import dataclasses
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, on_device
from autoaccum.accumulation.step_result import StepResult
from autoaccum.devices.base import Inspection
from autoaccum.devices.child.connection import failure_reply, load_requested, use_import_paths
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.inspection import (
    FORM_SAMPLES,
    SAMPLES,
    collected_warnings,
    describe_subject,
    few_samples,
    find_advice,
    find_least_size,
    with_multiple,
)
from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.explain.suggested_changes import apply_change, suggest_changes
from autoaccum.devices.simulated.trace import LabelledTrace, Trace
from autoaccum.devices.simulated.tracing.dispatch_mode import FakeCudaMode
from autoaccum.devices.simulated.tracing.fake_cuda import DEVICE
from autoaccum.devices.simulated.tracing.labelling import BlockLabeller
from autoaccum.devices.simulated.tracing.placement import with_copied_criterion, with_host_batches, with_lazy_building
from autoaccum.devices.simulated.tracing.recorder import Witness
from autoaccum.devices.simulated.tracing.simulation import simulate
from autoaccum.devices.simulated.unsupported import reads_missing_host_value, refuse
from autoaccum.devices.trial_run import TrialRun, place_model, seed_everything
from autoaccum.workload.spec import Workload


def trace_trial(workload: Workload, parts: Sequence[int], mode: FakeCudaMode) -> tuple[Trace, TrialRun, list[str]]:
    """Rehearse `parts` on the card of `mode`, which is entered; returns the names of the loss's terms, too.

    The batch holds the largest part only, on the host; the allocator never sees more. Garbage is collected between
    updates alone, so that every trace of the same step is the same.
    """
    rehearsal = _rehearsal(workload, parts, mode.recorder.mark_update)
    trace, result = _trace(rehearsal, parts, mode)
    return trace, rehearsal, list(result.terms)


def label_trial(workload: Workload, parts: Sequence[int], mode: FakeCudaMode) -> LabelledTrace:
    """The same trace, with what its blocks are for; it takes longer to make."""

    def begin_update() -> None:
        mode.recorder.mark_update()
        labeller.mark_update()

    rehearsal = _rehearsal(workload, parts, begin_update)
    loss = workload.objective.criterion
    beside = [loss.function] if loss is not None and isinstance(loss.function, nn.Module) else []
    beside += find_auxiliary_modules(workload).values()
    labeller = BlockLabeller(mode.recorder, rehearsal, mode.kept, beside)
    with labeller.labelling():
        trace, _ = _trace(rehearsal, parts, mode, labeller.see)
    return labeller.label(trace)


def _rehearsal(workload: Workload, parts: Sequence[int], begin_update: Callable[[], None]) -> TrialRun:
    def before_update() -> None:
        gc.collect()
        begin_update()

    return TrialRun(workload, max(parts), device=DEVICE, before_update=before_update)


def _trace(
    rehearsal: TrialRun, parts: Sequence[int], mode: FakeCudaMode, witness: Witness | None = None
) -> tuple[Trace, StepResult]:
    mode.kept.clear()
    gc.collect()
    mode.numbering.restart()
    mode.recorder.begin(lambda: rehearsal.phase, witness)
    with manual_garbage_collection():
        try:
            result = rehearsal.run(parts)
        finally:
            mode.phase = rehearsal.phase
            trace = mode.recorder.trace(parts)
    return trace, result


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Garbage is collected where somebody asks for it alone, so that blocks are freed at the same place each time.

    That the workload enables it, as after a stretch it times, changes nothing: at a threshold of 0 none is collected.
    """
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()


def inspect_simulated(workload: Workload, share: int, mode: FakeCudaMode) -> tuple[Inspection, Trace]:
    """Rehearse two micro-batches of two samples, or what there is; returns the trace, too.

    Nothing is computed, so that neither the loss nor the weighting of its parts can be checked.
    """
    size = few_samples(workload, SAMPLES, share)
    with collected_warnings() as said:
        trace, rehearsal, terms = trace_trial(workload, (size,) if size == share else (size, size), mode)
    assert rehearsal.made is not None
    model, optimizer = rehearsal.made
    workload, found_multiple = with_multiple(workload, model, share)
    samples = few_samples(workload, FORM_SAMPLES, share)
    fields = describe_subject(workload, model, optimizer, samples, terms)
    fields["recipe"]["misweighted"] = find_advice(said)
    inspection = Inspection(
        **fields,
        environment=describe_environment(DEVICE),
        least_size=find_least_size(workload, model),
        found_multiple=found_multiple,
        accumulation_warnings=tuple(said),
        cautions=tuple(mode.notices),
        notes=tuple(mode.checks),
    )
    return inspection, trace


class SimulatedChild:
    """Answers one request after the other: `load`, then any other."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._mode: FakeCudaMode | None = None
        self._card: Card | None = None
        self._workload: Workload | None = None
        self._lazy: tuple[str, ...] = ("models", "batches")
        self._known: dict[tuple[int, ...], Trace] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `request`: `{"failure": ...}` when there is nothing else to tell."""
        jobs = {
            "load": self._load,
            "inspect": self._inspect,
            "trace": self._trace,
            "labelled": self._labelled,
            "changes": self._changes,
            "changed": self._changed,
        }
        return jobs[request["job"]](request)

    def close(self) -> None:
        """Undo the simulation."""
        self._stack.close()

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        use_import_paths(request)
        doing = f"loading {request['reference']}"
        # What cannot be run is said in one sentence, with the user's own frames.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            self._card = _card(request["card"])
            self._mode = self._stack.enter_context(simulate(self._card))
            seed_everything()
            workload = load_requested(request)
        except BaseException as error:
            return failure_reply(refuse(error, doing) or error, doing)
        self._workload = with_host_batches(workload)
        gc.collect()
        gc.freeze()
        return {}

    def _inspect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        def run(workload: Workload, mode: FakeCudaMode) -> dict[str, Any]:
            inspection, trace = inspect_simulated(workload, request["share"], mode)
            self._known[trace.parts] = trace
            return {"inspection": dataclasses.asdict(inspection)}

        return self._run(run, "a rehearsal of two samples on the simulated card")

    def _trace(self, request: Mapping[str, Any]) -> dict[str, Any]:
        parts = tuple(request["parts"])

        def run(workload: Workload, mode: FakeCudaMode) -> dict[str, Any]:
            if parts not in self._known:
                self._known[parts], *_ = trace_trial(workload, parts, mode)
            return {"trace": vars(self._known[parts])}

        return self._run(run, f"micro-batch {max(parts)} on the simulated card", silent=True)

    def _changes(self, request: Mapping[str, Any]) -> dict[str, Any]:
        def run(workload: Workload, mode: FakeCudaMode) -> dict[str, Any]:
            assert self._card is not None
            model = place_model(workload.build_model(), DEVICE)
            optimizer = workload.build_optimizer(model)
            return {"changes": [vars(offer) for offer in suggest_changes(workload, model, optimizer, self._card)]}

        return self._run(run, "looking for what could be changed")

    def _changed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        parts, change = tuple(request["parts"]), request["change"]

        def run(workload: Workload, mode: FakeCudaMode) -> dict[str, Any]:
            return {"trace": vars(trace_trial(apply_change(workload, change), parts, mode)[0])}

        assert self._mode is not None
        gc.collect()
        known = self._mode.recorder.known()
        reply = self._run(run, f"micro-batch {max(parts)} with {change}", silent=True)
        if "failure" not in reply:
            return reply
        gc.collect()
        self._mode.recorder.forget(known)
        return {"failed": reply["failure"]["message"]}

    def _labelled(self, request: Mapping[str, Any]) -> dict[str, Any]:
        parts = tuple(request["parts"])

        def run(workload: Workload, mode: FakeCudaMode) -> dict[str, Any]:
            return {"labelled": label_trial(workload, parts, mode).to_record()}

        return self._run(run, f"micro-batch {max(parts)} on the simulated card", silent=True)

    def _run(
        self, job: Callable[[Workload, FakeCudaMode], dict[str, Any]], about: str, *, silent: bool = False
    ) -> dict[str, Any]:
        """Run a job; where something reads values that a lazily built batch or model has not, again with a real one.

        A `silent` one shows no warnings: the inspection has shown them.
        """
        assert self._workload is not None
        assert self._mode is not None
        failure: BaseException | None = None
        known = self._mode.recorder.known()
        try:
            workload = with_copied_criterion(self._workload)
            beside = find_auxiliary_modules(workload).values()
            if self._lazy:
                workload = with_lazy_building(workload, self._mode, batches="batches" in self._lazy)
            with on_device(beside, DEVICE), warnings.catch_warnings():
                if silent:
                    warnings.simplefilter("ignore")
                return job(workload, self._mode)
        except BaseException as error:
            failure = error
        if self._lazy and reads_missing_host_value(failure):
            self._lazy, failure = self._lazy[:-1], None
            gc.collect()
            self._mode.recorder.forget(known)
            return self._run(job, about, silent=silent)
        doing = f"{about}, in {self._mode.phase}"
        return failure_reply(refuse(failure, doing) or failure, doing)


def _card(record: Mapping[str, Any]) -> Card:
    return Card(**{**record, "capability": tuple(record["capability"])})


def prepare() -> None:
    """Have PyTorch import what it puts off until the first fake tensor needs it."""
    card = Card(name="any", title="any", total_bytes=1 << 30, capability=(8, 0), multiprocessors=1, source="none")
    import torch

    with simulate(card):
        weight = torch.ones(2, 2, device="cuda", requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
