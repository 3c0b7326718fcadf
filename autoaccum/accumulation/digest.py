"""A hash over every byte a step may change: what proves that nothing did."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.copies import dense_parts
from autoaccum.accumulation.randomness import GENERATORS, device_state, generator_state, seeded_devices

_OPTIMIZER_PARTS = ("param_groups", "state", "defaults")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def state_digest(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, criterion: nn.Module | None = None
) -> str:
    """SHA-256 over parameters, buffers, `.grad`, modes, `requires_grad`, hooks, optimizer, scaler and random states.

    Python's, NumPy's (where loaded), torch's CPU generator, that of the model's device, and those of every card once
    CUDA has started. Two states of equal values are equal, whatever objects hold them.
    """
    modules = {"": model} if criterion is None else {"": model, "criterion": criterion}
    found = state_entries(modules, optimizer, scaler, device=model_device(model))
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def state_entries(
    roots: Mapping[str, nn.Module],
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    *,
    device: torch.device | None = None,
    identity: bool = False,
) -> dict[str, str]:
    """What `state_digest` covers, one hash for each part by its name, so that a difference can be told.

    Args:
        roots: Modules by the prefix of their names.
        optimizer: The optimizer, unless there is none.
        scaler: The scaler, unless there is none.
        device: A device whose generator counts besides the CPU's and all cards'.
        identity: Count a tensor, module or hook exchanged for an equal one as a difference.
    """
    hasher = Hasher(identity=identity)
    found: dict[str, str] = {}
    for prefix, root in roots.items():
        for path, module in root.named_modules(prefix=prefix):
            found.update({name: hasher.hash(part) for name, part in _module_parts(path, module)})
    if optimizer is not None:
        found.update({name: hasher.hash(part) for name, part in _optimizer_parts(optimizer)})
    found["the scaler"] = hasher.hash({} if scaler is None else scaler.state_dict())
    found.update({f"the random state of {name}": hasher.hash(state) for name, state in _random_states(device)})
    return found


def _module_parts(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    dot, called = ("." if path else ""), path or "the model"
    for name, parameter in module._parameters.items():
        full = f"{path}{dot}{name}"
        yield f"parameter {full}", parameter
        if parameter is not None:
            yield f"the gradient of {full}", parameter.grad
            yield f"requires_grad of {full}", parameter.requires_grad
            yield f"the hooks of {full}", [_Hooks(hooks) for hooks in tensor_hooks(parameter)]
    for name, buffer in module._buffers.items():
        yield f"buffer {path}{dot}{name}", buffer
    yield f"the mode of {called}", module.training
    names = (list(module._parameters), list(module._buffers), sorted(module._non_persistent_buffers_set))
    yield f"the names registered in {called}", [*names, [(name, _Same(sub)) for name, sub in module._modules.items()]]
    yield f"the class of {called}", type(module).__qualname__
    hooks = {name: _Hooks(value) for name, value in vars(module).items() if name.endswith(("_hooks", "_kwargs"))}
    yield f"the hooks of {called}", hooks


def _optimizer_parts(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    yield "the optimizer's groups", optimizer.param_groups
    yield "the optimizer's state", list(optimizer.state.items())
    others = {name: value for name, value in sorted(vars(optimizer).items()) if name not in _OPTIMIZER_PARTS}
    hooks = {name: _Hooks(value) for name, value in others.items() if name.endswith("_hooks")}
    yield "the optimizer's attributes", [sorted(others), {n: v for n, v in others.items() if isinstance(v, _PLAIN)}]
    yield "the optimizer's hooks", hooks


def _random_states(device: torch.device | None) -> Iterator[tuple[str, Any]]:
    yield "Python", random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    yield "NumPy", None if numpy_random is None else numpy_random.get_state()
    yield "torch", _loose(torch.get_rng_state())
    devices = seeded_devices()
    if device is not None and device.type not in ("cpu", "meta", "cuda"):
        devices.append(device)
    for one in devices:
        yield str(one), _loose(device_state(one))


def _loose(state: Any) -> Any:
    """A generator's state without the tensor that was made to hold it, which is another one each time."""
    return bytes(state.tolist()) if isinstance(state, Tensor) else state


def tensor_hooks(tensor: Tensor) -> tuple[Any, Any]:
    """The mappings of hooks on a tensor: of `register_hook`, and of `register_post_accumulate_grad_hook`."""
    return getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)


class _Same:
    """An object that counts by its identity, where identity counts at all."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Hooks(_Same):
    """A mapping of hooks, or something like one, or None; what is not there and what is empty are alike."""


class Hasher:
    """Hashes nests of values; every tensor is read once.

    Args:
        identity: Equal tensors, and equal hooks, that are other objects count as different.
    """

    def __init__(self, *, identity: bool = False) -> None:
        self._identity = identity
        self._tensors: dict[int, tuple[Tensor, bytes]] = {}

    def hash(self, node: Any) -> str:
        """SHA-256 over `node`: plain values, tensors, arrays, generators, and containers of them; others by type."""
        digest = hashlib.sha256()
        self._feed(digest, node, ())
        return digest.hexdigest()

    def _feed(self, digest: Any, node: Any, above: tuple[int, ...]) -> None:
        if isinstance(node, Tensor):
            digest.update(self._tensor(node))
        elif isinstance(node, _Hooks):
            self._feed_hooks(digest, node.value)
        elif isinstance(node, _Same):
            digest.update(self._name(node.value))
        elif isinstance(node, np.ndarray | np.generic):
            digest.update(f"{node.dtype}{node.shape}".encode() + node.tobytes())
        elif isinstance(node, _PLAIN):
            digest.update(repr(node).encode())
        elif id(node) in above:
            digest.update(b"itself")
        elif isinstance(node, Mapping):
            self._feed_all(digest, [*node.keys(), *node.values()], (*above, id(node)))
        elif isinstance(node, list | tuple | deque):
            self._feed_all(digest, node, (*above, id(node)))
        elif isinstance(node, set | frozenset):
            digest.update("".join(sorted(self.hash(entry) for entry in node)).encode())
        else:
            digest.update(self._name(node))
            if isinstance(node, GENERATORS):
                self._feed(digest, _loose(generator_state(node)), above)

    def _feed_all(self, digest: Any, nodes: Iterable[Any], above: tuple[int, ...]) -> None:
        listed = list(nodes)
        digest.update(f"[{len(listed)}".encode())
        for node in listed:
            self._feed(digest, node, above)
            digest.update(b",")

    def _name(self, node: Any) -> bytes:
        return str(id(node) if self._identity else type(node).__qualname__).encode()

    def _feed_hooks(self, digest: Any, hooks: Any) -> None:
        if isinstance(hooks, Mapping):
            for key, hook in hooks.items():
                digest.update(f"{key}:{id(hook) if self._identity else type(hook).__qualname__};".encode())
        elif hooks:
            digest.update(repr(hooks).encode())

    def _tensor(self, tensor: Tensor) -> bytes:
        if id(tensor) not in self._tensors:
            content = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            if self._identity:
                content.update(str(id(tensor)).encode())
            for part in [] if tensor.is_meta else dense_parts(tensor.detach()):
                content.update(_bytes_of(part))
            self._tensors[id(tensor)] = (tensor, content.digest())
        return self._tensors[id(tensor)][1]


def _bytes_of(values: Tensor) -> Any:
    values = values.to_dense() if values.layout is not torch.strided else values
    values = values.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy()
