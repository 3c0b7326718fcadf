"""What is noted of each block of a trace while it is made: pure records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.devices.explanation import Category
from autoaccum.devices.simulated.trace import Trace

Role = Literal["plain", "recomputed", "summed", "workspace"]
"""How a block came to be. `recomputed`: in a forward within backward, as checkpointing has them. `summed`: where
autograd hands a gradient to its parameter. `workspace`: memory that a kernel or a library takes beside tensors."""


@dataclass(frozen=True)
class Origin:
    """Where a block comes from.

    Attributes:
        op: The operator, such as `aten.mm`; empty for what was there before.
        module: The module it ran for: its index in `LabelledTrace.modules`.
        role: How it came to be.
        dtype: Of the first tensor in it, such as `bfloat16`; empty for memory beside tensors.
    """

    op: str
    module: int
    role: Role = "plain"
    dtype: str = ""


@dataclass(frozen=True)
class Claim:
    """What a block is for, as who holds it says.

    Attributes:
        category: Its category.
        module: The module it belongs to: its index in `LabelledTrace.modules`.
    """

    category: Category
    module: int = 0


@dataclass(frozen=True)
class ModuleName:
    """A module: its path in the model and the name of its class; both empty for what belongs to none."""

    path: str
    kind: str


NO_MODULE = ModuleName("", "")


@dataclass(frozen=True, kw_only=True)
class LabelledTrace:
    """A trace, and what is known of its blocks.

    Attributes:
        trace: What was asked for, in order.
        modules: The modules of the model; the first stands for none.
        origins: By block.
        claims: By block, of those that someone holds: parameters, gradients, state of the optimizer.
    """

    trace: Trace
    modules: tuple[ModuleName, ...]
    origins: tuple[Origin, ...]
    claims: Mapping[int, Claim]

    def to_record(self) -> dict[str, Any]:
        """As what JSON knows; `from_record` reads it."""
        table = {origin: index for index, origin in enumerate(dict.fromkeys(self.origins))}
        return {
            "trace": self.trace.to_record(),
            "modules": [[module.path, module.kind] for module in self.modules],
            "table": [[origin.op, origin.module, origin.role, origin.dtype] for origin in table],
            "origins": [table[origin] for origin in self.origins],
            "claims": [[block, claim.category, claim.module] for block, claim in self.claims.items()],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LabelledTrace:
        """Read what `to_record` gave, once it has been JSON."""
        table = [Origin(*origin) for origin in record["table"]]
        return cls(
            trace=Trace.from_record(record["trace"]),
            modules=tuple(ModuleName(*module) for module in record["modules"]),
            origins=tuple(table[index] for index in record["origins"]),
            claims={block: Claim(category, module) for block, category, module in record["claims"]},
        )
