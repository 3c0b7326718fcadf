"""A hash over every byte a step may change: what proves that nothing did."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device


def state_digest(model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None) -> str:
    """SHA-256 over parameters, buffers, `.grad`, modes, `requires_grad`, hooks, optimizer, scaler and random states.

    Python's, NumPy's (where loaded), torch's CPU generator and that of the model's device count.
    """
    seen: list[Any] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen.append((name, parameter, parameter.requires_grad, parameter.grad, _hooks(parameter)))
    seen.append([(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False)])
    seen.append([(name, module.training) for name, module in model.named_modules()])
    seen.append([optimizer.param_groups, list(optimizer.state.items()), sorted(vars(optimizer))])
    seen.append({} if scaler is None else scaler.state_dict())
    seen.append([random.getstate(), torch.get_rng_state()])
    numpy_random = sys.modules.get("numpy.random")
    seen.append(None if numpy_random is None else numpy_random.get_state())
    device = model_device(model)
    if device.type not in ("cpu", "meta", "mps"):
        seen.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.sha256()
    _feed(digest, seen)
    return digest.hexdigest()


def _feed(digest: Any, node: Any) -> None:
    if isinstance(node, Tensor):
        dense = node.detach().cpu().to_dense() if node.layout is not torch.strided else node.detach().cpu()
        digest.update(f"{node.dtype}{tuple(node.shape)}".encode())
        digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(node, Mapping):
        _feed(digest, [list(node.keys()), list(node.values())])
    elif isinstance(node, list | tuple):
        digest.update(f"[{len(node)}".encode())
        for child in node:
            _feed(digest, child)
    elif hasattr(node, "tobytes"):
        digest.update(node.tobytes())
    else:
        digest.update(repr(node).encode())


def _hooks(parameter: Tensor) -> int:
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
