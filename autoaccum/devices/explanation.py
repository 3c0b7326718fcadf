"""What some devices tell beside their trials: what is predicted of any size, and where the memory of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args, runtime_checkable

from autoaccum.devices.base import Phase

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "averages",
    "activations",
    "outputs",
    "temporaries",
    "workspace",
    "unused",
]
"""What bytes of the allocator are for. `parameters`: with buffers. `gradients`: with the fp32 buffers they accumulate
in. `averages`: copies of the weights, such as an EMA. `activations`: what forward leaves for its backward (inputs, and
copies that autocast keeps, too), and the few bytes of losses that are yet to be read. `outputs`: tensors that the loop
keeps (what the model returned, and the loss) for as long as they are there, whether or not their backward needs them,
too; none without `keeps`. `temporaries`: tensors of backward and update that are none of these, and those of forward
that do not outlive it.
`workspace`: what kernels and libraries take beside tensors. `unused`: cached or lost to rounding, and part of the peak
all the same."""

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """What a module holds at the peak, without the modules in it; equal ones that differ by number are one record.

    Attributes:
        name: Its path in the model; of several, with `*` for the numbers in which they differ, as in `h.*.attn`, or
            with these (`{4..6}.up`); empty for the model itself and what belongs to no module.
        kind: The name of its class; empty for what belongs to no module.
        count: How many modules the record is of.
        bytes: What they hold at the peak, all together, also by `categories`.
        bytes_per_sample: By how much that grows with each sample of the micro-batch; None: not known.
    """

    name: str
    kind: str
    count: int
    bytes: int
    categories: Mapping[Category, int]
    bytes_per_sample: int | None


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one module holds at the peak for one purpose, by itself, without the modules in it.

    Attributes:
        category: What for.
        module: Its path in the model; empty for the model itself (`kind` tells) and for what belongs to no module.
        kind: The name of its class; empty for what belongs to no module.
        dtype: Of these tensors, such as `bfloat16`; empty for memory beside tensors.
        op: The operator that made most of them, such as `aten.addmm`; empty for what was there before.
        bytes: How many.
    """

    category: Category
    module: str = ""
    kind: str = ""
    dtype: str = ""
    op: str = ""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When most is held during one phase of all that is traced: of equal moments the last.

    Attributes:
        phase: Where the step is.
        held_bytes: What tensors and workspaces hold then: the sum of `categories`.
        categories: What for; those of 0 bytes and `unused` are left out.
        holdings: The same by module, complete, in the order of the model; moments are equal without.
    """

    phase: Phase
    held_bytes: int
    categories: Mapping[Category, int]
    holdings: tuple[Holding, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What would become of the peak if one thing were changed, by a simulation of just that.

    Attributes:
        name: Short and unique, such as `bf16`, `checkpoint`, `foreach=False`, `SGD`.
        what: What to change, as a phrase.
        peak_bytes: The peak then; None where it could not be simulated.
        saved_bytes: What that is less than the peak as it is: below 0 where it takes more.
        least_bytes: The smallest budget at which it would then run.
        message: Why it could not be simulated.
    """

    name: str
    what: str
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    least_bytes: int | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where the memory is at the moment of an update at which tensors and workspaces hold most.

    Attributes:
        card: What is simulated, such as `rtx3090 (simulated)`.
        parts: The micro-batches that were traced, in samples.
        peak_bytes: The most that the allocator holds of the card where nothing limits it: the sum of `categories`.
        categories: All of them, in order, in bytes.
        context_bytes: What the process holds outside of the allocator, on top.
        phase: Where the step is at that moment.
        op: The operator that runs then, such as `aten.mm`, or what else asks for memory.
        module: The module it runs for, as in `ModuleShare`; empty for none.
        modules: The ten that hold most, the largest first.
        changes: What would change the peak, in the order of what it saves.
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
    """The memory of the last update over time, coarse enough to be drawn.

    Attributes:
        categories: By category, the bytes at every point; none for `unused`.
        reserved_bytes: What the allocator holds of the card at every point.
        phases: Where the step is from which point on: (index of the point, phase), ascending.
        peak_at: The index of the point with the peak that is explained.
    """

    categories: Mapping[Category, tuple[int, ...]]
    reserved_bytes: tuple[int, ...]
    phases: tuple[tuple[int, Phase], ...]
    peak_at: int


@dataclass(frozen=True)
class CurvePoint:
    """Peak and least budget of two parts of one size, in samples and bytes."""

    size: int
    peak_bytes: int
    least_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """All that is known of where memory goes: what a plan keeps, and what only pictures need.

    Attributes:
        explanation: For the plan.
        timeline: The memory over time.
        curve: The peak over the micro-batch, ascending; empty where sizes do not follow from each other.
        notes: Sentences for the plan.
        holdings: What is held at the moment that is explained, by module, complete and in the order of the model.
        moments: The same for each phase that asks for memory, the first of a step first.
    """

    explanation: Explanation
    timeline: Timeline
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = field(default=())
    holdings: tuple[Holding, ...] = ()
    moments: tuple[Moment, ...] = ()


@runtime_checkable
class ExplainingDevice(Protocol):
    """A device that can tell where memory goes."""

    def explain(
        self, parts: tuple[int, ...], *, changes: bool = True, curve: bool = False, limit_seconds: float | None = None
    ) -> MemoryReport:
        """Account for the memory of `parts`, whose trial ran, and for `changes` and the `curve` of the peak.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: They cannot be simulated.
        """


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan records of a schedule that nothing really ran.

    Attributes:
        least_bytes: The smallest budget at which it would still run.
        band_bytes: How far off it may be whether it fits.
        warnings: Sentences for the plan.
        notes: Likewise.
    """

    least_bytes: int
    band_bytes: int
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What peaks to expect before any trial.

    Attributes:
        peak_bytes: The peak at a size of at least 2 samples, or None where it cannot be told; None: of no size.
        notes: Sentences for the plan.
    """

    peak_bytes: Callable[[int], int | None] | None = None
    notes: tuple[str, ...] = ()


@runtime_checkable
class PredictingDevice(Protocol):
    """A device whose trials predict."""

    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """What is predicted of `parts`, whose trial from a clean state ran.

        Raises:
            WorkloadError, NotMeasuredError: As a trial of them records it.
        """


@runtime_checkable
class ForecastingDevice(Protocol):
    """A device that can tell what peaks to expect."""

    def forecast(self, *, limit_seconds: float | None = None) -> Forecast:
        """What peaks to expect; where that cannot be told, nothing is lost but trials."""
