"""Reports of devices beside their trials: where the memory of a step goes, and what an update costs; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from autoaccum.devices.base import Phase

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "averages",
    "gathered_parameters",
    "communication",
    "activations",
    "outputs",
    "temporaries",
    "workspace",
    "unused",
]
"""The purpose of allocated bytes. `parameters`: with buffers. `gradients`: with the fp32 buffers that they accumulate
in. `averages`: copies of the weights, such as an EMA. `gathered_parameters`: whole parameters of modules that FSDP2
shards, from before their forward or backward until after it. `communication`: what collectives of several ranks read
and write beside that. `activations`: tensors that forward keeps for backward (with inputs, and copies by autocast), and
the few bytes of losses that are not yet read. `outputs`: tensors that the loop holds (the model's outputs and the
loss), whether or not backward needs them, too; none without `keeps`. `temporaries`: other tensors of backward and
update, and those of forward that do not outlive it. `workspace`: memory that kernels and libraries take beside tensors.
`unused`: cached or lost to rounding; part of the peak."""

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """The memory of a module at the peak, without its submodules; equal modules with other numbers share a record.

    Attributes:
        name: Its path in the model; of several, with `*` for the numbers (`h.*.attn`), or with their range
            (`{4..6}.up`); empty for the model itself and for memory of no module.
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
        least_bytes: The smallest budget at which the step would run with the change.
        message: The reason why it could not be simulated.
    """

    name: str
    what: str
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    least_bytes: int | None = None
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
    """

    explanation: Explanation
    timeline: Timeline
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = field(default=())
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Amount:
    """An amount that grows with each sample of an update and each micro-batch, beside what each update has once."""

    sample: float = 0.0
    part: float = 0.0
    update: float = 0.0

    def of(self, parts: Sequence[int]) -> float:
        """Return the amount of an update by `parts`, in samples.

        >>> Amount(sample=10, part=3, update=1).of([4, 4])
        87.0
        """
        return float(self.sample * sum(parts) + self.part * len(parts) + self.update)

    def of_part(self, size: int) -> float:
        """Return the amount of one micro-batch."""
        return float(self.sample * size + self.part)


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """The cost of an update, counted while the Accumulator that trains makes one on a simulated card.

    Attributes:
        flops: Floating-point operations, as `torch.utils.flop_counter` counts them: of matrix products, convolutions
            and attention, those of recomputed blocks included.
        moved_bytes: The bytes that are copied from the card to the host, or back: of batches, and by savers.
        host_bytes: The bytes that operators read and write in host memory, as an optimizer that updates there.
        card_bytes: The bytes that operators without FLOPs read and write in the card's memory.
        kernels: Operators that the host launches on the card.
    """

    flops: Amount
    moved_bytes: Amount
    host_bytes: Amount
    card_bytes: Amount = Amount()
    kernels: Amount = Amount()


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """The most that a card can do in a second, by its maker; training reaches a part of it.

    Attributes:
        capability: The compute capability.
        tensor_flops: FLOPs of dense products in fp16 or bf16 that are summed in fp32.
        fp32_flops: The same in fp32, without TF32.
        memory_bytes: Bytes from and to its memory.
        source: Where the numbers are from.
    """

    capability: tuple[int, int]
    tensor_flops: float
    fp32_flops: float
    memory_bytes: float
    source: str
