"""All operator families together: their kernels installed, and the memory that an operator takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autoaccum.simulation.cards import CardInUse
from autoaccum.simulation.operators import attention, layers, losses_and_dropout, reductions, rnn, sparse_gradients
from autoaccum.simulation.operators.operator_call import Handler, OperatorCall, Signature
from autoaccum.simulation.releases import Release
from autoaccum.simulation.torch_patches import patch, patch_optimizers, register_missing
from autoaccum.simulation.trace_records import MemoryStep, OutputAllocated

_HANDLERS: Mapping[Any, Handler] = {
    getattr(torch.ops.aten, name): handler
    for family in (attention, layers, rnn, losses_and_dropout, reductions)
    for name, handler in family.WORKSPACES.items()
    if hasattr(torch.ops.aten, name)
}


def install_kernels(library: torch.library.Library, card: CardInUse, torch_version: Release, stack: ExitStack) -> None:
    """Choose kernels as CUDA would on `card`, until `stack` closes: C++ chooses by a device that it does not see."""
    kernels = {
        "scaled_dot_product_attention": partial(attention.scaled_dot_product_attention, card, torch_version),
        **losses_and_dropout.KERNELS,
        **layers.KERNELS,
        **rnn.KERNELS,
        **sparse_gradients.KERNELS,
    }
    register: Any = library.impl
    for name, kernel in kernels.items():
        for key in ("AutogradCUDA", "CUDA"):
            register(name, kernel, key)
    for name, kernel in rnn.CUDNN_METAS.items():
        register(name, kernel, "Meta", allow_override=True)
    metas = {**rnn.CELL_METAS, **layers.SYNC_BATCHNORM_METAS, **layers.WEIGHT_NORM_METAS}
    register_missing(library, metas, "Meta")
    patch(stack, torch.nn.RNNBase, "flatten_parameters", rnn.flatten_parameters)
    patch(stack, torch._C, "_conv_determine_backend_memory_format", layers.convolution_format)
    patch_optimizers(library, stack)
    # Encoders in evaluation run as in training, because their fast path reads the values of masks.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)


def observe_workspaces(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, torch_version: Release
) -> Sequence[MemoryStep]:
    """Return the steps in which a top-level operator on the card takes memory, its outputs `out` included.

    They are empty for outputs alone.
    """
    handler = _HANDLERS.get(func.overloadpacket)
    if handler is None or not _on_card(args):
        return ()
    deterministic = torch.are_deterministic_algorithms_enabled()
    steps = handler(OperatorCall(_signature(func), args, kwargs, out, torch_version, deterministic))
    says_when = not steps or any(isinstance(step, OutputAllocated) for step in steps)
    return steps if says_when else [OutputAllocated(), *steps]


@cache
def _signature(func: Any) -> Signature:
    return {argument.name: (index, argument.default_value) for index, argument in enumerate(func._schema.arguments)}


def _on_card(args: Sequence[Any]) -> bool:
    for arg in args:
        tensor = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if isinstance(tensor, Tensor):
            return tensor.device.type == "cuda"
    return False
