"""From an operator to the memory that its kernels take beside its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.kernels.scratch_call import (
    INDEXING_HANDLERS,
    KEPT_LOSSES,
    REDUCTION_HANDLERS,
    Call,
    Handler,
    Signature,
    bytes_of,
)
from autoaccum.devices.simulated.kernels.scratch_layers import ATTENTION_HANDLERS, BESIDE_HANDLERS, LAYER_HANDLERS
from autoaccum.devices.simulated.scratch.estimates import (
    configured_bytes,
    configured_lt_bytes,
    keeps_workspace,
    shares_workspace,
)
from autoaccum.devices.simulated.trace import MemoryStep, OutputAllocated, Workspace

_PRODUCTS = "mm addmm bmm addmm_ baddbmm_ baddbmm addbmm _addmm_activation addmv mv dot vdot _scaled_mm"
_WITH_BIAS = ("addmm", "_addmm_activation")


@dataclass(frozen=True)
class OperatorMemory:
    """Memory that one operator takes.

    Attributes:
        transient: Memory until it returns; where that is told, in which order among what it returns.
        resident: Memory from its first call on.
        beside: Memory as long as one of the tensors lives that it returned: which one, and what.
    """

    transient: Sequence[MemoryStep] = ()
    resident: Sequence[Workspace] = ()
    beside: Sequence[tuple[int, Workspace]] = ()

    @cached_property
    def in_order(self) -> bool:
        """Return whether the steps tell when it makes what it returns; else it does so first."""
        return any(isinstance(step, OutputAllocated) for step in self.transient)


_NOTHING = OperatorMemory()


class WorkspaceObserver:
    """Looks at top-level operators on fake CUDA tensors."""

    def __init__(self, card: Card, torch_version: tuple[int, int]) -> None:
        self.card = card
        self.torch_version = torch_version
        self._keeps_workspace = keeps_workspace(os.environ, torch_version)
        self._shares_workspace = shares_workspace(os.environ, torch_version)
        self._configured = configured_bytes(os.environ), configured_lt_bytes(os.environ)
        self._signatures: dict[Any, Signature] = {}
        handlers = {**REDUCTION_HANDLERS, **LAYER_HANDLERS, **ATTENTION_HANDLERS, **INDEXING_HANDLERS}
        self._handlers: Mapping[Any, Handler] = _by_operator(handlers)
        self._beside = _by_operator({**BESIDE_HANDLERS, **KEPT_LOSSES})
        self._products = frozenset(_by_operator(dict.fromkeys(_PRODUCTS.split())))
        self._with_bias = frozenset(_by_operator(dict.fromkeys(_WITH_BIAS)))

    def see(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, in_backward: bool
    ) -> OperatorMemory:
        """Tell what `func` takes beside its tensors."""
        operator = func.overloadpacket
        handler = self._handlers.get(operator)
        if handler is None and operator not in self._products:
            return _NOTHING
        if not _on_card(args):
            return _NOTHING
        if handler is None:
            return self._product(operator, args, int(in_backward))
        call = Call(self._signature(func), args, kwargs, out, self.torch_version)
        beside = self._beside.get(operator)
        return OperatorMemory(handler(call), beside=[] if beside is None else beside(call))

    def _product(self, operator: Any, args: Sequence[Any], thread: int) -> OperatorMemory:
        copies = [Workspace("layout_copy", (bytes_of(arg),)) for arg in args if _needs_copy(arg)]
        configured, configured_lt = self._configured
        light = operator in self._with_bias and _light(args)
        if self._keeps_workspace:
            own = light and not self._shares_workspace
            with_bias = [Workspace("product_with_bias", (thread, configured_lt))] if own else []
            return OperatorMemory(copies, (Workspace("product", (thread, configured)), *with_bias))
        if light:
            return OperatorMemory([*copies, Workspace("product_with_bias", (0, configured_lt))])
        return OperatorMemory([*copies, Workspace("product", (0, configured))])

    def _signature(self, func: Any) -> Signature:
        signature = self._signatures.get(func)
        if signature is None:
            arguments = func._schema.arguments
            signature = {each.name: (index, each.default_value) for index, each in enumerate(arguments)}
            self._signatures[func] = signature
        return signature


def _by_operator(by_name: Mapping[str, Any]) -> dict[Any, Any]:
    """By operator what is given by name; names that this PyTorch does not have are left out."""
    aten = torch.ops.aten
    return {getattr(aten, name): value for name, value in by_name.items() if hasattr(aten, name)}


def _on_card(args: Sequence[Any]) -> bool:
    for arg in args:
        tensor = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if isinstance(tensor, Tensor):
            return tensor.device.type == "cuda"
    return False


def _needs_copy(tensor: Any) -> bool:
    """Return whether cuBLAS cannot read it as it lies (ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas)."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return False
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    return not ((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


def _light(args: Sequence[Any]) -> bool:
    """Tell whether a product with a bias goes through cuBLASLt (Blas.cpp, isInputCompliesAddmmCudaLt)."""
    bias, left, right = args[:3]
    return bool(bias.dim() == 1 and bias.is_contiguous() and left.shape[1] > 1 and right.shape[1] > 1)
