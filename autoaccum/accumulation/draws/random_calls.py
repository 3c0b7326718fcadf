"""Random ops as they are called: what of their outputs is chance, and how other values are put in its place.

What is random is told by torch's own tag (`torch.Tag.nondeterministic_seeded`), not by name. Names stand here only
for the few ops whose outputs hold more than chance: their inputs. Those are computed again from the inputs at hand,
since a recorded output would hide that the inputs differ. Samples of a distribution (bernoulli, poisson, gamma) are
taken as they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.draws.sites import DrawSite, calling_line

_ROWS_OF = {"aten.randperm": "n", "aten.multinomial": "self", "aten.randint": "high", "aten.random_": "to"}
"""Ops that draw indices, and the argument that bounds them."""


@dataclass(frozen=True)
class RandomCall:
    """One call of a random op, made already.

    Attributes:
        site: The op and the user's line.
        arguments: By name, with defaults.
        outputs: Its tensors, in order.
    """

    site: DrawSite
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def op(self) -> str:
        """The op alone."""
        return self.site.op

    @property
    def is_drawing(self) -> bool:
        """Not so for dropout that is off, and where no tensor comes out."""
        if not self.outputs or self.op == "aten._cudnn_init_dropout_state":
            return False
        if self.arguments.get("train") is False or self.arguments.get("training") is False:
            return False
        return self._kernel_dropout != 0

    @property
    def is_sealed(self) -> bool:
        """Whether chance never leaves the kernel: fused attention and cuDNN's RNNs give seeds out, not masks."""
        return self._kernel_dropout is not None

    @property
    def rows(self) -> int | None:
        """How many things the drawn indices choose among; None where what is drawn are no indices."""
        bound = self.arguments.get(_ROWS_OF.get(self.op.replace("_like", ""), ""))
        if isinstance(bound, Tensor):
            return int(bound.shape[-1] if self.op == "aten.multinomial" else bound)
        return None if bound is None else int(bound)

    @property
    def chance(self) -> tuple[Tensor, ...]:
        """What was drawn; may share memory with the outputs."""
        if self.op == "aten.native_dropout":
            return self.outputs[1:]
        if "noise" in self.arguments:
            return (self.arguments["noise"],)
        if self._is_shifted:
            centred = (self.outputs[0] - self.arguments["mean"]) / self.arguments["std"]
            return (torch.where(torch.isfinite(centred), centred, 0.0),)
        return self.outputs

    def give(self, values: Sequence[Tensor]) -> None:
        """Make it as if `values` (of `chance`'s shapes, any dtype and device) had been drawn."""
        if self._is_shifted:
            noise = values[0].to(self.outputs[0])
            self.outputs[0].copy_(self.arguments["mean"] + self.arguments["std"] * noise)
            return
        inputs = self._inputs()
        for drawn, value in zip(self.chance, values, strict=True):
            drawn.copy_(value)
        if inputs is not None:
            self.outputs[0].copy_(inputs())

    @property
    def _kernel_dropout(self) -> float | None:
        dropout = self.arguments.get("dropout_p", self.arguments.get("dropout"))
        return None if dropout is None else float(dropout)

    @property
    def _is_shifted(self) -> bool:
        return any(isinstance(self.arguments.get(name), Tensor) for name in ("mean", "std"))

    def _inputs(self) -> Callable[[], Tensor] | None:
        """What computes the first output from inputs and chance, for ops where it is both."""
        if self.op == "aten.native_dropout":
            keep = 1.0 - self.arguments["p"]
            return lambda: self.arguments["input"] * self.outputs[1] * (1.0 / keep if keep else 0.0)
        if "noise" in self.arguments:
            noise = self.arguments["noise"]
            was = self.outputs[0] / noise if self.op.endswith("_") else self.arguments["self"]
            return lambda: was * noise
        return None


class RandomCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, every random op that draws is handed to `answer`, which may give it other values."""

    supports_higher_order_operators = True

    def __init__(self, answer: Callable[[RandomCall], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and hand it on where it draws."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            call = _read_call(func, args, kwargs or {}, result)
            if call.is_drawing:
                with torch.no_grad():
                    self._answer(call)
        return result


def _read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> RandomCall:
    schema = func._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema}
    bound.update(zip((argument.name for argument in schema), args, strict=False))
    outputs = result if isinstance(result, tuple | list) else (result,)
    tensors = tuple(value for value in outputs if isinstance(value, Tensor))
    return RandomCall(DrawSite(str(func.overloadpacket), calling_line()), {**bound, **kwargs}, tensors)
