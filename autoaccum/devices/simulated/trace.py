"""Requests of a training step to a card's allocator, in order, and what is known of their blocks: pure records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import Category
from autoaccum.serialization import read_record


class Workspace(NamedTuple):
    """Memory a kernel takes beside its tensors: the rule that tells how much, and the numbers it follows from.

    Attributes:
        rule: A name in `scratch.RULES`.
        numbers: What the rule takes (rows, columns, heads, bytes of an element): whole numbers, each a function of the
            batch as smooth as a tensor's size is, so that the rule's own rounding is done for any batch.
    """

    rule: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rehearsal (an update by `parts[:1]`, then one by all `parts`), as the allocator sees it.

    Attributes:
        parts: Micro-batch sizes of the last update, in samples.
        events: In order: the number of a block that is allocated, or `~number` of one that is freed. Blocks are
            numbered from 0 in the order of their allocation; some are never freed.
        sizes: By block: the bytes that are asked for, or the rule that tells them.
        phases: Where the step is from which event on: (index into `events`, phase), ascending.
        last_update: The index in `events` at which the last update begins.
    """

    parts: tuple[int, ...]
    events: tuple[int, ...]
    sizes: tuple[int | Workspace, ...]
    phases: tuple[tuple[int, Phase], ...]
    last_update: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trace:
        """Read what `vars` gave, once it has been JSON."""
        return read_record(record, cls)


@dataclass(frozen=True)
class OutputAllocated:
    """Here it makes what it returns at `index`; of an operator that says so nowhere, all comes first."""

    index: int = 0


@dataclass(frozen=True)
class Freed:
    """Here it gives back as many of the blocks that it took last."""

    count: int = 1


MemoryStep = Workspace | OutputAllocated | Freed


Role = Literal["plain", "recomputed", "summed", "workspace"]
"""How a block came to be. `recomputed`: in a forward within backward, as checkpointing has them. `summed`: where
autograd hands a gradient to its parameter. `workspace`: memory that a kernel or a library takes beside tensors."""


class Origin(NamedTuple):
    """The origin of a block: an operator such as `aten.mm`, and the index of the module that it ran for.

    `op` is empty for what was there before, and `dtype`, that of the first tensor in it, for memory beside tensors.
    """

    op: str
    module: int
    role: Role = "plain"
    dtype: str = ""


class Owner(NamedTuple):
    """The purpose of a block, as who holds it says: its category, and the index of the module it belongs to."""

    category: Category
    module: int = 0


class ModuleName(NamedTuple):
    """A module: its path in the model and the name of its class; both empty for what belongs to none."""

    path: str
    kind: str


NO_MODULE = ModuleName("", "")


@dataclass(frozen=True, kw_only=True)
class LabelledTrace:
    """A trace, the modules of the model, of which the first stands for none, and what is known of blocks.

    Each has an origin, and an owner if someone holds it: parameters, gradients, state of the optimizer.
    """

    trace: Trace
    modules: tuple[ModuleName, ...]
    origins: tuple[Origin, ...]
    owners: Mapping[int, Owner]

    def to_record(self) -> dict[str, Any]:
        """As what JSON knows; `from_record` reads it."""
        return {**vars(self), "trace": vars(self.trace)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LabelledTrace:
        """Read what `to_record` gave, once it has been JSON."""
        return read_record({**record, "owners": {int(block): owner for block, owner in record["owners"].items()}}, cls)
