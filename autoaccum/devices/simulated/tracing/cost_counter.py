"""Counts floating-point operations, copies between card and host, and work in host memory while a trial is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autoaccum.devices.base import Phase
from autoaccum.devices.simulated.tracing.dispatch_mode import DEVICE_QUERY
from autoaccum.devices.update_cost import Amount, UpdateCost

_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})
_OF_PARTS = ("batch", "forward", "backward")


@dataclass
class _Tally:
    """What was counted in one micro-batch, or between the last one and the end of the update."""

    flops: int = 0
    moved_bytes: int = 0
    host_bytes: int = 0


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators cost while it is entered, within the mode of a simulated card.

    `FlopCounterMode` itself would take composite operators apart, which CUDA's kernels run whole: its formulas are used
    here for the operators that the card runs.

    Args:
        phase: Returns the phase of the trial.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As `FakeCudaMode._should_skip_dynamo`; skipping the compiler would import it besides."""
        return False

    def __init__(self, phase: Callable[[], Phase]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase = phase
        self._formulas: Mapping[Any, Callable[..., int]] = FlopCounterMode(display=False).flop_registry
        self._parts: list[_Tally] = []
        self._rest = _Tally()
        self._in_backward = True

    def begin_update(self) -> None:
        """Forget all that was counted before."""
        self._parts, self._rest, self._in_backward = [], _Tally(), True

    def cost(self, parts: Sequence[int]) -> UpdateCost:
        """Return the cost of the last update, which had `parts`.

        What grows with samples is told from what each part has by parts of two sizes. Where there is one size alone, or
        parts that ran side by side, all of it is taken to grow with samples.
        """
        tallies, samples = self._parts, sum(parts)

        def amount(count: Callable[[_Tally], int]) -> Amount:
            counts, rest = list(map(count, tallies)), float(count(self._rest))
            if len(counts) != len(parts) or len(parts) != 2 or parts[0] == parts[1]:
                return Amount(sample=sum(counts) / samples, update=rest)
            sample = (counts[1] - counts[0]) / (parts[1] - parts[0])
            return Amount(sample=sample, part=max(0.0, counts[0] - sample * parts[0]), update=rest)

        return UpdateCost(
            flops=amount(lambda tally: tally.flops),
            moved_bytes=amount(lambda tally: tally.moved_bytes),
            # Of weights and gradients alone; and the first part has no sum to add to.
            host_bytes=Amount(
                part=sum(tally.host_bytes for tally in tallies) / len(parts), update=float(self._rest.host_bytes)
            ),
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is DEVICE_QUERY:
            return out
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        places = {one.device.type for one in (*tensors, *made)}
        if (formula := self._formulas.get(func.overloadpacket)) is not None and "cuda" in places:
            self._tally().flops += formula(*args, **(kwargs or {}), out_val=out)
        elif func in _COPIES and len(places) > 1:
            self._tally().moved_bytes += _bytes(made[0])
        elif places == {"cpu"} and not func.is_view and any(isinstance(one, FakeTensor) for one in made or tensors):
            written = [one for one in made if all(one is not other for other in tensors)]
            self._tally().host_bytes += sum(map(_bytes, (*tensors, *written)))
        return out

    def _tally(self) -> _Tally:
        phase = self._phase()
        if phase not in _OF_PARTS:
            return self._rest
        if phase != "backward" and self._in_backward:
            self._parts.append(_Tally())
        self._in_backward = phase == "backward"
        return self._parts[-1]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse tensors.
