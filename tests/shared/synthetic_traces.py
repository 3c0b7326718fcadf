"""Traces made by hand: a small training step in bytes, for any parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from factories import make_inspection

from autoaccum.devices.base import Inspection
from autoaccum.devices.child.requests import Request
from autoaccum.devices.explanation import Change
from autoaccum.devices.simulated.simulation_requests import LabelParts, SuggestChanges, TraceParts, Tracer
from autoaccum.devices.trial_requests import Inspect
from autoaccum.errors import WorkloadError
from autoaccum.simulation.trace_records import (
    NO_MODULE,
    Category,
    LabelledTrace,
    ModuleName,
    Origin,
    Owner,
    Phase,
    Trace,
    Workspace,
)
from autoaccum.units import MIB

Sizes = Callable[[int], int]

LAYERS = 4
INSPECTION = make_inspection(
    {"torch": "2.13.0"},
    parameters=100 * MIB // 4,
    parameter_bytes=100 * MIB,
    recipe={"calls_criterion": True, "batch": {"tuple": ["tensor", "tensor"]}},
)


def linear(sample: int = 6 * MIB, once: int = 3 * MIB) -> Sizes:
    """Activations of a layer that grow with the batch, as almost all do."""
    return lambda size: once + sample * size


class _Writer:
    """Writes events down as a recorder would."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int | Workspace] = []
        self.phases: list[tuple[int, Phase]] = []

    def take(self, size: int | Workspace) -> int:
        self.events.append(len(self.sizes))
        self.sizes.append(size)
        return self.events[-1]

    def give(self, block: int) -> None:
        self.events.append(~block)

    def enter(self, phase: Phase) -> None:
        self.phases.append((len(self.events), phase))


def make_trace(
    parts: tuple[int, ...], activations: Sizes, *, layer_bytes: int = 25 * MIB, workspace: Workspace | None = None
) -> Trace:
    """An update by `parts[:1]`, then one by all: weights, gradients and two states of `LAYERS` layers each."""
    writer = _Writer()
    writer.enter("model")
    for _ in range(LAYERS):
        writer.take(layer_bytes)
    last_update, gradients = 0, list[int]()
    for number, window in enumerate((parts[:1], parts)):
        last_update = len(writer.events)
        for size in window:
            writer.enter("forward")
            held = [writer.take(activations(size)) for _ in range(LAYERS)]
            writer.enter("backward")
            if workspace is not None:
                writer.give(writer.take(workspace))
            for block in reversed(held):
                passed = writer.take(activations(size))
                if len(gradients) < LAYERS:
                    gradients.append(writer.take(layer_bytes))
                writer.give(block)
                writer.give(passed)
        writer.enter("update")
        if number == 0:
            for _ in range(2 * LAYERS):
                writer.take(layer_bytes)
        for block in gradients:
            writer.give(block)
        gradients.clear()
    return Trace(
        parts=parts,
        events=tuple(writer.events),
        sizes=tuple(writer.sizes),
        phases=tuple(writer.phases),
        last_update=last_update,
    )


_OWNERS: dict[str, Category] = {"model": "parameters", "backward": "gradients", "update": "optimizer_state"}


def label(trace: Trace) -> LabelledTrace:
    """Such a trace with its labels: what is as large as a layer's weights is claimed by its phase."""
    owners, origins, phases = dict[int, Owner](), list[Origin](), dict(trace.phases)
    count = {phase: 0 for phase in phases.values()}
    phase: Phase = "model"
    for index, event in enumerate(trace.events):
        phase = phases.get(index, phase)
        if event >= 0:
            module = 1 + count[phase] % LAYERS
            workspace = isinstance(trace.sizes[event], Workspace)
            origins.append(Origin(f"aten.{phase}", module, "workspace" if workspace else "plain"))
            if phase in _OWNERS and trace.sizes[event] == trace.sizes[0]:
                owners[event] = Owner(_OWNERS[phase], module)
            count[phase] += not workspace and (event in owners or phase == "forward")
    modules = (NO_MODULE, *(ModuleName(f"layers.{layer}", "Linear") for layer in range(LAYERS)))
    return LabelledTrace(trace=trace, modules=modules, origins=tuple(origins), owners=owners)


class SyntheticTracer(Tracer):
    """A tracer of such traces, which records its requests.

    Args:
        activations: Bytes of a layer's activations, by size.
        change: The difference in the traces of some parts: an error to raise, or other activations.
        inspection: The inspection of the workload.
        workspace: The workspace of a kernel in backward.
        suggestions: Changes by name: activations, or the message of a failure.
    """

    def __init__(
        self,
        activations: Sizes | None = None,
        *,
        change: Callable[[tuple[int, ...]], Exception | Sizes | None] = lambda parts: None,
        inspection: Inspection = INSPECTION,
        workspace: Workspace | None = None,
        suggestions: Mapping[str, str | Sizes] | None = None,
    ) -> None:
        self.suggestions = suggestions or {}
        self._activations, self._change = activations or linear(), change
        self._inspection, self._workspace = inspection, workspace
        self.traced: list[tuple[int, ...]] = []
        self.limits: list[float | None] = []
        self.closed = 0

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        match request:
            case Inspect():
                return self._inspection
            case TraceParts(parts=parts, change=""):
                return self._trace(parts, limit_seconds)
            case LabelParts(parts=parts):
                return label(self._trace(parts, limit_seconds))
            case SuggestChanges():
                return tuple(Change(name=name, what=f"take {name}") for name in self.suggestions)
            case TraceParts(parts=parts, change=change):
                self.limits.append(limit_seconds)
                found = self.suggestions[change]
                if isinstance(found, str):
                    raise WorkloadError(found)
                return make_trace(parts, found, workspace=self._workspace)
        raise NotImplementedError(request)

    def _trace(self, parts: tuple[int, ...], limit_seconds: float | None) -> Trace:
        self.traced.append(parts)
        self.limits.append(limit_seconds)
        changed = self._change(parts)
        if isinstance(changed, Exception):
            raise changed
        return make_trace(parts, changed or self._activations, workspace=self._workspace)

    def close(self) -> None:
        self.closed += 1
