"""Counts operators, their floating-point operations and the bytes they touch while a trial is traced."""

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

from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.simulation.tracing.dispatch_mode import DEVICE_QUERY
from autoaccum.simulation.tracing.recorder import Recorder, Watcher

_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})
_OF_PARTS = ("batch", "forward", "backward")
_aten: Any = torch.ops.aten
_GATHERS = frozenset({_aten.embedding, _aten.index_select, _aten.index, _aten.gather})
"""Operators that read as much of a tensor as they return."""
_FREE = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
"""Operators that launch nothing."""


@dataclass
class _Tally:
    """What was counted in one micro-batch, or between the last one and the end of the update."""

    flops: int = 0
    moved_bytes: int = 0
    host_bytes: int = 0
    card_bytes: int = 0
    kernels: int = 0


class CostCounter(TorchDispatchMode, Watcher):  # type: ignore[no-untyped-call]
    """Counts what operators cost while it is entered, within the mode of a simulated card.

    `FlopCounterMode` itself would take composite operators apart, which CUDA's kernels run whole: its formulas are used
    here for the operators that the card runs.

    Args:
        recorder: Knows the phase of the trial.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As `FakeCudaMode._should_skip_dynamo`."""
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._formulas: Mapping[Any, Callable[..., int]] = FlopCounterMode(display=False).flop_registry
        self._parts: list[_Tally] = []
        self._rest = _Tally()
        self._in_backward = True
        self._updates = 0

    def mark_update(self) -> None:
        """Count from here; but not the first update of a trial, which another one follows (`TrialRun.run`)."""
        self._parts, self._rest, self._in_backward = [], _Tally(), True
        self._updates += 1

    def cost(self, parts: Sequence[int]) -> UpdateCost:
        """Return the cost of the last update, which had `parts`.

        What grows with samples is told from what each part has by the last two parts, of two sizes. Earlier ones may
        have more or less: the first has no gradient to add to. Where there is one size alone, or parts that ran side by
        side, all of it is taken to grow with samples.
        """
        tallies, samples = self._parts, sum(parts)

        def amount(count: Callable[[_Tally], int]) -> Amount:
            counts, rest = list(map(count, tallies)), float(count(self._rest))
            if len(counts) != len(parts) or len(parts) < 2 or parts[-1] == parts[-2]:
                return Amount(sample=sum(counts) / samples, update=rest)
            sample = (counts[-2] - counts[-1]) / (parts[-2] - parts[-1])
            part = max(0.0, counts[-1] - sample * parts[-1])
            others = zip(counts[:-2], parts[:-2], strict=True)
            return Amount(sample=sample, part=part, update=rest + sum(n - sample * size - part for n, size in others))

        return UpdateCost(
            flops=amount(lambda tally: tally.flops),
            moved_bytes=amount(lambda tally: tally.moved_bytes),
            # Of weights and gradients alone; and the first part has no sum to add to.
            host_bytes=Amount(
                part=sum(tally.host_bytes for tally in tallies) / len(parts), update=float(self._rest.host_bytes)
            ),
            card_bytes=amount(lambda tally: tally.card_bytes),
            kernels=amount(lambda tally: tally.kernels),
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is DEVICE_QUERY or self._updates < 2:
            return out
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        places = {one.device.type for one in (*tensors, *made)}
        if "cuda" in places and not _is_free(func, tensors, made):
            self._tally().kernels += 1
        if (formula := self._formulas.get(func.overloadpacket)) is not None and "cuda" in places:
            self._tally().flops += formula(*args, **(kwargs or {}), out_val=out)
        elif func in _COPIES and len(places) > 1:
            self._tally().moved_bytes += _bytes(made[0])
        elif places == {"cpu"} and not func.is_view and any(isinstance(one, FakeTensor) for one in made or tensors):
            written = [one for one in made if all(one is not other for other in tensors)]
            self._tally().host_bytes += sum(map(_bytes, (*tensors, *written)))
        elif "cuda" in places and not _is_free(func, tensors, made):
            self._tally().card_bytes += _touched_bytes(func, args, tensors, made)
        return out

    def _tally(self) -> _Tally:
        phase = self._recorder.phase()
        if phase not in _OF_PARTS:
            return self._rest
        if phase != "backward" and self._in_backward:
            self._parts.append(_Tally())
        self._in_backward = phase == "backward"
        return self._parts[-1]


def _is_free(func: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Return whether an operator runs nothing on the card: it makes a view, or a tensor without values."""
    if func.is_view or func.overloadpacket in _FREE:
        return True
    if func._schema.is_mutable or not made:
        return False
    held = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
    return all(one.layout is torch.strided and one.untyped_storage()._cdata in held for one in made)


def _touched_bytes(func: Any, args: Sequence[Any], tensors: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes; a tensor that is expanded is read once."""
    if func.overloadpacket in _GATHERS:
        return 2 * sum(map(_bytes, made)) + sum(map(_bytes, tensors[1:]))
    written = made or [one for one in tree_leaves(args[:1]) if isinstance(one, Tensor)]
    return sum(_bytes(one) for one in (*tensors, *written))


def _bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse tensors.
    return size if tensor.layout is not torch.strided else min(size, tensor.untyped_storage().nbytes())
