"""Records of a trace: the allocations and frees of a training step, in order, and labels for their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import Category


class Workspace(NamedTuple):
    """Memory that a kernel allocates besides its tensors, as a rule for its size and the rule's arguments.

    Attributes:
        rule: A name in `workspace_rules.RULES`.
        numbers: Arguments of the rule (rows, columns, heads, bytes of an element): whole numbers that are affine in
            the batch like a tensor's size. The rule does the rounding, so it can be applied at any batch.
    """

    rule: str
    numbers: tuple[int, ...]


EMPTY_CACHE: Final = -1
"""The size of a block that stands for a call of `torch.cuda.empty_cache`, and is freed at once."""


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


@dataclass(frozen=True)
class OutputAllocated:
    """The operator allocates its output at `index` now; without such steps, all outputs are allocated first."""

    index: int = 0


@dataclass(frozen=True)
class Freed:
    """The operator frees this many of its workspaces, the latest first."""

    count: int = 1


MemoryStep = Workspace | OutputAllocated | Freed
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

    The first of `modules` is `NO_MODULE`.
    """

    trace: Trace
    modules: tuple[ModuleName, ...]
    origins: tuple[Origin, ...]
    owners: Mapping[int, Owner]
