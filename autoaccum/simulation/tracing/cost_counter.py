"""Counts operators, their floating-point operations and the bytes they touch while a trial is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.simulation.tracing.dispatch_mode import DEVICE_QUERY
from autoaccum.simulation.tracing.recorder import Recorder, Watcher
from autoaccum.simulation.tracing.values import find_tensors

_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})
_OF_PARTS = ("batch", "forward", "backward")
_aten: Any = torch.ops.aten
_GATHERS = frozenset({_aten.embedding, _aten.index_select, _aten.index, _aten.gather})
"""Operators that read as much of a tensor as they return."""
_FREE = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
"""Operators that launch nothing."""


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
        self._parts: list[Counter[str]] = []
        self._rest = Counter[str]()
        self._in_backward = True
        self._updates = 0

    def mark_update(self) -> None:
        """Count from here; but not the first update of a trial, which another one follows (`TrialRun.run`)."""
        self._parts, self._rest, self._in_backward = [], Counter(), True
        self._updates += 1

    def cost(self, parts: Sequence[int]) -> UpdateCost:
        """Return the cost of the last update, which had `parts`.

        What grows with samples is told from what each part has by the last two parts, of two sizes. Earlier ones may
        have more or less: the first has no gradient to add to. Where there is one size alone, or parts that ran side by
        side, all of it is taken to grow with samples.
        """

        def amount(name: str) -> Amount:
            counts, rest = [part[name] for part in self._parts], float(self._rest[name])
            if len(counts) != len(parts) or len(parts) < 2 or parts[-1] == parts[-2]:
                return Amount(sample=sum(counts) / sum(parts), update=rest)
            sample = (counts[-2] - counts[-1]) / (parts[-2] - parts[-1])
            part = max(0.0, counts[-1] - sample * parts[-1])
            others = zip(counts[:-2], parts[:-2], strict=True)
            return Amount(sample=sample, part=part, update=rest + sum(n - sample * size - part for n, size in others))

        # Those of the host are of weights and gradients alone; and the first part has no sum to add to.
        of_parts = sum(part["host_bytes"] for part in self._parts) / len(parts)
        host_bytes = Amount(part=of_parts, update=float(self._rest["host_bytes"]))
        others = {name: amount(name) for name in ("flops", "moved_bytes", "card_bytes", "kernels")}
        return UpdateCost(host_bytes=host_bytes, **others)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is DEVICE_QUERY or self._updates < 2:
            return out
        tensors = list(find_tensors((*args, *kwargs.values()) if kwargs else args))
        outputs = list(find_tensors((out,)))
        places = {tensor.device.type for tensor in (*tensors, *outputs)}
        launches = "cuda" in places and not _is_free(func, tensors, outputs)
        if launches:
            self._counts()["kernels"] += 1
        if (formula := self._formulas.get(func.overloadpacket)) is not None and "cuda" in places:
            self._counts()["flops"] += formula(*args, **(kwargs or {}), out_val=out)
        elif func in _COPIES and len(places) > 1:
            self._counts()["moved_bytes"] += _bytes(outputs[0])
        elif (
            places == {"cpu"}
            and not func.is_view
            and any(isinstance(tensor, FakeTensor) for tensor in outputs or tensors)
        ):
            written = [tensor for tensor in outputs if all(tensor is not other for other in tensors)]
            self._counts()["host_bytes"] += sum(map(_bytes, (*tensors, *written)))
        elif launches:
            self._counts()["card_bytes"] += _touched_bytes(func, args, tensors, outputs)
        return out

    def _counts(self) -> Counter[str]:
        """Return the counts of the micro-batch that runs, or of what follows the last one."""
        phase = self._recorder.phase()
        if phase not in _OF_PARTS:
            return self._rest
        if phase != "backward" and self._in_backward:
            self._parts.append(Counter())
        self._in_backward = phase == "backward"
        return self._parts[-1]


def _is_free(func: Any, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether an operator runs nothing on the card: it makes a view, or a tensor without values."""
    if func.is_view or func.overloadpacket in _FREE:
        return True
    if func._schema.is_mutable or not outputs:
        return False
    given = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
    return all(tensor.layout is torch.strided and tensor.untyped_storage()._cdata in given for tensor in outputs)


def _touched_bytes(func: Any, args: Sequence[Any], tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes; a tensor that is expanded is read once."""
    if func.overloadpacket in _GATHERS:
        return 2 * sum(map(_bytes, outputs)) + sum(map(_bytes, tensors[1:]))
    written = outputs or list(find_tensors(args[:1]))
    return sum(_bytes(tensor) for tensor in (*tensors, *written))


def _bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse tensors.
    return size if tensor.layout is not torch.strided else min(size, tensor.untyped_storage().nbytes())
