"""All operator families together: their kernels installed, and the memory that an operator takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autoaccum.simulation.cards import CardInUse
from autoaccum.simulation.operators import attention, layers, losses_and_dropout, reductions, rnn, sparse_gradients
from autoaccum.simulation.operators.workspaces import Handler, OperatorCall, Signature
from autoaccum.simulation.torch_patches import is_strictly_deterministic, patch_optimizers
from autoaccum.simulation.trace_records import MemoryStep, OutputAllocated

_PATCHING = (attention, layers, rnn)
_WITH_WORKSPACES = (attention, layers, rnn, losses_and_dropout, reductions)


def install_kernels(library: torch.library.Library, card: CardInUse, stack: ExitStack) -> None:
    """Choose kernels as CUDA would on `card`, until `stack` closes: C++ chooses by a device that it does not see."""
    kernels = {
        "scaled_dot_product_attention": partial(attention.scaled_dot_product_attention, card),
        **losses_and_dropout.KERNELS,
        **layers.KERNELS,
        **rnn.KERNELS,
        **sparse_gradients.KERNELS,
    }
    register: Any = library.impl
    for name, kernel in kernels.items():
        for key in ("AutogradCUDA", "CUDA"):
            register(name, kernel, key)
    for family in _PATCHING:
        family.install(library, stack)
    patch_optimizers(library, stack)


class WorkspaceObserver:
    """Finds the memory of top-level operators on fake CUDA tensors."""

    def __init__(self, torch_version: tuple[int, int]) -> None:
        self._torch_version = torch_version
        self._cublas = layers.Cublas(os.environ, torch_version)
        handlers = {name: handler for family in _WITH_WORKSPACES for name, handler in family.WORKSPACES.items()}
        self._handlers: Mapping[Any, Handler] = _by_operator(handlers)
        self._products = frozenset(_by_operator(dict.fromkeys(layers.PRODUCTS)))
        self._with_bias = frozenset(_by_operator(dict.fromkeys(layers.WITH_BIAS)))

    def observe(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, in_backward: bool
    ) -> Sequence[MemoryStep]:
        """Return the steps in which `func` takes memory, its outputs `out` included; empty for outputs alone."""
        operator = func.overloadpacket
        handler = self._handlers.get(operator)
        if (handler is None and operator not in self._products) or not _on_card(args):
            return ()
        steps: Sequence[MemoryStep]
        if handler is None:
            steps = self._cublas.workspaces(args, with_bias=operator in self._with_bias, thread=int(in_backward))
        else:
            deterministic = torch.are_deterministic_algorithms_enabled(), is_strictly_deterministic()
            steps = handler(OperatorCall(_signature(func), args, kwargs, out, self._torch_version, *deterministic))
        says_when = not steps or any(isinstance(step, OutputAllocated) for step in steps)
        return steps if says_when else [OutputAllocated(), *steps]


@cache
def _signature(func: Any) -> Signature:
    return {each.name: (index, each.default_value) for index, each in enumerate(func._schema.arguments)}


def _by_operator(by_name: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the values by operator; names that this PyTorch does not have are left out."""
    aten = torch.ops.aten
    return {getattr(aten, name): value for name, value in by_name.items() if hasattr(aten, name)}


def _on_card(args: Sequence[Any]) -> bool:
    for arg in args:
        tensor = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if isinstance(tensor, Tensor):
            return tensor.device.type == "cuda"
    return False
