"""Digests of nested values, and of a whole training state, to compare two of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices
from autoaccum.sharded_tensors import local_part


def digest(tree: Any) -> str:
    """Return a SHA-256 of a nest of containers, tensors, arrays and what else `repr` shows in full."""
    leaves, form = tree_flatten(tree)
    return hashlib.sha256(repr((form, list(map(_shown, leaves)))).encode()).hexdigest()


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.tolist()
    if not isinstance(leaf, Tensor):
        return leaf
    dense = local_part(leaf.detach())
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    return dense.dtype, dense.shape, None if dense.is_meta else dense.tolist()


def state_digest(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, criterion: nn.Module | None = None
) -> str:
    """Return a digest of values, gradients, modes, hooks, optimizer, scaler and random states of a training."""
    roots = [model] if criterion is None else [model, criterion]
    modules = [module for root in roots for module in root.modules()]
    parameters = [parameter for root in roots for parameter in root.parameters()]
    device = next(model.parameters()).device
    flags = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
    return digest(
        [
            [dict(root.named_parameters()) for root in roots],
            [dict(root.named_buffers()) for root in roots],
            [(one.requires_grad, one.grad, len(one._backward_hooks or ())) for one in parameters],
            [(type(one).__qualname__, one.training, list(one._parameters), list(one._buffers)) for one in modules],
            [_hooks(one) for one in (*modules, optimizer)],
            [optimizer.state_dict(), flags, None if scaler is None else scaler.state_dict()],
            RngState([*initialized_cuda_devices(), *([] if device.type == "cuda" else [device])]).states,
        ]
    )


def _hooks(owner: Any) -> dict[str, int]:
    return {name: len(value) for name, value in vars(owner).items() if name.endswith("_hooks") and value}
