"""Records of a trace: the allocations and frees of a training step, in order, and labels for their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, get_args

Phase = Literal["start", "load", "model", "optimizer", "batch", "forward", "backward", "clip", "update", "evaluation"]
"""The phases of a trial. `evaluation`: between updates (see `Workload`)."""

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
loss), whether or not backward needs them, too; none without `hold_outputs`. `temporaries`: other tensors of backward
and update, and those of forward that do not outlive it. `workspace`: memory that kernels and libraries take beside
tensors. `unused`: cached or lost to rounding; part of the peak."""

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


class Workspace(NamedTuple):
    """Memory that a kernel allocates besides its tensors, as a rule for its size and the rule's arguments.

    Attributes:
        rule: A name in `workspace_sizes.RULES`.
        numbers: Arguments of the rule (rows, columns, heads, bytes of an element): whole numbers that are affine in
            the batch like a tensor's size. The rule does the rounding, so it can be applied at any batch.
    """

    rule: str
    numbers: tuple[int, ...]


EMPTY_CACHE: Final = -1
"""The size of a block that stands for a call of `torch.cuda.empty_cache`, and is freed at once."""
EMPTY_CACHE_ONCE: Final = -2
"""The same, of a call that is not repeated if its update is."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests of one trial run to the allocator: those of an update by `parts[:1]`, then of one by all `parts`.

    Attributes:
        parts: Micro-batch sizes of the last update, in samples.
        events: In order, the number of a block that is allocated, or `~number` of one that is freed. Blocks are
            numbered from 0 in the order of their allocation; some are never freed.
        sizes: Bytes requested for each block, or a rule for them.
        phases: Start of each phase of the step, as (index into `events`, phase), ascending.
        last_update: The index in `events` at which the last update begins.
        host_bytes: As `Trial.host_bytes`.
        streams: The stream of each block, numbered from 1 in the order of their first blocks; 0 is the default stream,
            on which all blocks are if this is empty.
        reads: How often the last update read values that were computed for it (`Options.values`).
        batch: The samples of the batch that values were computed of; 0 if none were.
    """

    parts: tuple[int, ...]
    events: tuple[int, ...]
    sizes: tuple[int | Workspace, ...]
    phases: tuple[tuple[int, Phase], ...]
    last_update: int
    host_bytes: int | None = None
    streams: tuple[int, ...] = ()
    reads: int = 0
    batch: int = 0

    def __hash__(self) -> int:
        """Return a hash of a few fields: traces are keys, and have thousands of events."""
        return hash((self.parts, len(self.events), self.last_update))

    @cached_property
    def workspaces(self) -> Mapping[int, Workspace]:
        """The blocks whose size is a rule."""
        return {block: size for block, size in enumerate(self.sizes) if isinstance(size, Workspace)}


@dataclass(frozen=True)
class OutputAllocated:
    """The operator allocates its output at `index` now, or all of them."""

    index: int | None = None


@dataclass(frozen=True)
class Freed:
    """The operator frees this many of its workspaces, the latest first."""

    count: int = 1


@dataclass(frozen=True)
class Kept:
    """The operator takes memory that stays as long as its `output`; None: from the first call on, for all calls."""

    workspace: Workspace
    output: int | None = None


@dataclass(frozen=True)
class Emptied:
    """The operator releases what is free in the allocator, at its first call of this `kind` alone."""

    kind: Workspace


MemoryStep = Workspace | OutputAllocated | Freed | Kept | Emptied
Role = Literal["plain", "recomputed", "summed", "workspace"]
"""How a block was allocated. `recomputed`: by a forward pass within backward, as in checkpointing. `summed`: as
autograd accumulates a gradient into its parameter. `workspace`: by a kernel or a library, besides tensors."""


class Origin(NamedTuple):
    """The origin of a block: an operator such as `aten.mm`, and the index of the module that called it.

    `op` is empty if the block existed before the trace. `dtype` is that of its first tensor, empty for a workspace.
    """

    op: str
    module: int
    role: Role = "plain"
    dtype: str = ""


class Owner(NamedTuple):
    """The category of a block that a module, an optimizer or the loop holds, and the index of its module."""

    category: Category
    module: int = 0


class ModuleName(NamedTuple):
    """A module's path in the model and the name of its class; both are empty for memory of no module."""

    path: str
    kind: str


NO_MODULE = ModuleName("", "")


@dataclass(frozen=True, kw_only=True)
class LabelledTrace:
    """A trace with labels: an origin for every block, and an owner for parameters, gradients, optimizer state and more.

    The first of `modules` is `NO_MODULE`. `lines` are the lines of the user's code that they come from, by path.
    """

    trace: Trace
    modules: tuple[ModuleName, ...]
    origins: tuple[Origin, ...]
    owners: Mapping[int, Owner]
    lines: Mapping[str, str] = field(default_factory=dict)


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
