"""Reports of devices beside their trials: where the memory of a step goes, and what an update costs; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoaccum.messages import Message
from autoaccum.simulation.trace_records import Category, Phase


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """The memory of a module at the peak, without its submodules; equal modules with other numbers share a record.

    Attributes:
        name: Its path in the model; of several, with their numbers (`h.{0..11}.attn`); empty for the model itself and
            for memory of no module.
        kind: The name of its class; empty for memory of no module.
        count: The number of modules.
        bytes: Their memory at the peak, in all; `categories` splits it up.
    """

    name: str
    kind: str
    count: int
    bytes: int
    categories: Mapping[Category, int]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The memory of one module at the peak for one purpose, without its submodules.

    Attributes:
        category: The purpose.
        module: Its path in the model; empty for the model itself (which has a `kind`) and for memory of no module.
        kind: The name of its class; empty for memory of no module.
        dtype: The dtype of the tensors, such as `bfloat16`; empty for memory beside tensors.
        op: The operator that made most of them, such as `aten.addmm`; empty for tensors from before the step.
        bytes: Their bytes.
    """

    category: Category
    module: str = ""
    kind: str = ""
    dtype: str = ""
    op: str = ""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect of one change on the peak, by a simulation.

    Attributes:
        name: Short and unique, such as `bf16`, `checkpoint`, `foreach=False`, `SGD`.
        what: The change, as a phrase.
        peak_bytes: The peak with the change; None if it could not be simulated.
        saved_bytes: By how much the change lowers the peak; negative if it raises it.
        min_budget_bytes: The smallest budget at which the step would run with the change.
        message: The reason why it could not be simulated.
    """

    name: str
    what: str
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    min_budget_bytes: int | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The use of memory at the moment of an update at which tensors and workspaces hold most.

    Attributes:
        card: The simulated card, such as `rtx3090 (simulated)`.
        parts: The micro-batches that were traced, in samples.
        peak_bytes: The peak of the allocator without a limit: the sum of `categories`.
        categories: The bytes by purpose, all purposes in order.
        context_bytes: The memory that the process holds outside of the allocator, in addition.
        phase: The phase of the step at that moment.
        op: The operator that runs at that moment, such as `aten.mm`, or another origin of the request.
        module: The module that it runs for, as in `ModuleShare`; empty for none.
        modules: The ten modules that hold most, the largest first.
        changes: Changes that affect the peak; the one that saves most comes first.
    """

    card: str
    parts: tuple[int, ...]
    peak_bytes: int
    categories: Mapping[Category, int]
    context_bytes: int
    phase: Phase
    op: str
    module: str
    modules: tuple[ModuleShare, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The memory of the last update over time, with few enough points for a figure.

    Attributes:
        categories: The bytes at every point, by category, without `unused`.
        reserved_bytes: The memory that the allocator holds of the card at every point.
        phases: The beginning of each phase: (index of the point, phase), ascending.
        peak_at: The index of the point with the explained peak.
    """

    categories: Mapping[Category, tuple[int, ...]]
    reserved_bytes: tuple[int, ...]
    phases: tuple[tuple[int, Phase], ...]
    peak_at: int


@dataclass(frozen=True)
class CurvePoint:
    """The peak of two micro-batches of `size` samples."""

    size: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A report of where the memory goes: the explanation in a plan, and the data of figures.

    Attributes:
        explanation: The explanation in the plan.
        timeline: The memory over time.
        curve: The peak over the micro-batch size, ascending; empty if traces of other sizes cannot be computed.
        notes: Notes for the plan.
        holdings: The memory at the explained moment, by module, complete and in the order of the model.
        lines: As in `LabelledTrace`.
    """

    explanation: Explanation
    timeline: Timeline
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[Message, ...] = ()
    holdings: tuple[Holding, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
