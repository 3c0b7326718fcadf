"""Find what changed in a training state: hash every part of it by name.

Plain attributes (numbers, strings, tensors, small containers) of modules of the user's own classes are included. The
rollback of a step does not restore them, so their changes are reported.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.reachable_objects import (
    MAPPINGS,
    SEQUENCES,
    code_names,
    find_user_methods,
    is_user_class,
    tensor_hooks,
)
from autoaccum.accumulation.rng_state import GENERATORS, RngState, generator_state, initialized_cuda_devices
from autoaccum.accumulation.sharded_tensors import local_part
from autoaccum.accumulation.transaction import REGISTERED, StateCopy, dense_parts, is_plain_tensor
from autoaccum.workload import pytree

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_COMPUTED = "computed by forward"
_DEPTH, _ENTRIES = 3, 1024


class PlainAttributes:
    """The plain attributes of modules of the user's own classes: numbers, strings, tensors, small containers.

    `roots` are modules by the prefix of their names.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._values = [(module, _plain_attributes(module)) for _, module in _user_modules(roots)]
        self._copy = StateCopy([values for _, values in self._values])
        self._hashes = _attribute_hashes(roots)

    def changed(self) -> list[str]:
        """Return the names (`encoder.calls`) of attributes that were added, removed or changed."""
        return changed_names(self._hashes, _attribute_hashes(self._roots))

    def restore(self) -> None:
        """Restore the same objects with the same values, and remove attributes that were added."""
        for module, values in self._values:
            attributes = vars(module)
            for name in _plain_attributes(module).keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        self._copy.restore()


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of entries that were added, changed or removed, except values that forward computes anew."""
    names = [name for name, value in after.items() if name not in before or before[name] != value]
    names += [name for name in before if name not in after]
    return [name for name in names if _COMPUTED not in (before.get(name), after.get(name))]


def batch_versions(batches: Sequence[Any]) -> list[int]:
    """Return the version of each tensor of `batches`, which in-place changes of it or of its views increment."""
    return [tensor._version for tensor in pytree.tensors(batches) if not tensor.is_inference()]


def state_entries(
    roots: Mapping[str, nn.Module],
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    *,
    device: torch.device | None = None,
    identity: bool = False,
) -> dict[str, str]:
    """Return a hash of each part of the training state by name, to prove that nothing was changed.

    The parts are parameters, buffers, `.grad`, modes, `requires_grad`, hooks, optimizer, scaler and the random states
    of Python, NumPy, PyTorch's CPU generator, `device`, and every GPU once CUDA is initialized.

    With `identity`, a tensor, module or hook that was replaced by an equal one counts as a change. `roots` are modules
    by the prefix of their names.
    """
    hasher = StateHasher(identity=identity)
    found: dict[str, Any] = {}
    for prefix, root in roots.items():
        for path, module in root.named_modules(prefix=prefix):
            found.update(_module_parts(path, module))
    if optimizer is not None:
        found.update(_optimizer_parts(optimizer))
    found["the scaler"] = {} if scaler is None else scaler.state_dict()
    others = [] if device is None or device.type == "cuda" else [device]
    random_state = RngState([*initialized_cuda_devices(), *others])
    found.update({f"the random state of {name}": _hashable_state(state) for name, state in random_state.states.items()})
    return {name: hasher.hash(part) for name, part in found.items()}


class StateHasher:
    """Hashes nested structures, each tensor once; with `identity`, equal tensors that are different objects differ."""

    def __init__(self, *, identity: bool = False) -> None:
        self._identity = identity
        self._tensors: dict[int, tuple[Tensor, bytes]] = {}

    def hash(self, node: Any) -> str:
        """Return a SHA-256 of values, tensors, arrays, generators and containers; other objects count by type."""
        digest = hashlib.sha256()
        self._feed(digest, node, ())
        return digest.hexdigest()

    def _feed(self, digest: Any, node: Any, ancestors: tuple[int, ...]) -> None:
        if isinstance(node, Tensor):
            digest.update(self._tensor(node))
        elif isinstance(node, np.ndarray | np.generic):
            digest.update(f"{node.dtype}{node.shape}".encode() + node.tobytes())
        elif isinstance(node, _PLAIN):
            digest.update(repr(node).encode())
        elif id(node) in ancestors:
            digest.update(b"itself")
        elif isinstance(node, Mapping | list | tuple | deque):
            entries = [*node.keys(), *node.values()] if isinstance(node, Mapping) else list(node)
            digest.update(f"[{len(entries)}".encode())
            for entry in entries:
                self._feed(digest, entry, (*ancestors, id(node)))
                digest.update(b",")
        elif isinstance(node, set | frozenset):
            digest.update("".join(sorted(self.hash(entry) for entry in node)).encode())
        else:
            digest.update(str(id(node) if self._identity else type(node).__qualname__).encode())
            if isinstance(node, GENERATORS):
                self._feed(digest, _hashable_state(generator_state(node)), ancestors)

    def _tensor(self, tensor: Tensor) -> bytes:
        if id(tensor) not in self._tensors:
            content = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            if self._identity:
                content.update(str(id(tensor)).encode())
            for part in [] if tensor.is_meta else dense_parts(local_part(tensor.detach())):
                values = part.to_dense() if part.layout is not torch.strided else part
                values = values.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                content.update(values.view(torch.uint8).numpy().data)
            self._tensors[id(tensor)] = (tensor, content.digest())
        return self._tensors[id(tensor)][1]


def _module_parts(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    dot, called = ("." if path else ""), path or "the model"
    for name, parameter in module._parameters.items():
        full = f"{path}{dot}{name}"
        yield f"parameter {full}", parameter
        if parameter is not None:
            yield f"the gradient of {full}", parameter.grad
            yield f"requires_grad of {full}", parameter.requires_grad
            yield f"the hooks of {full}", [hooks or {} for hooks in tensor_hooks(parameter)]
    for name, buffer in module._buffers.items():
        yield f"buffer {path}{dot}{name}", buffer
    yield f"the mode of {called}", module.training
    names = (list(module._parameters), list(module._buffers), sorted(module._non_persistent_buffers_set))
    yield f"the names registered in {called}", [*names, dict(module._modules)]
    yield f"the class of {called}", type(module).__qualname__
    yield f"the hooks of {called}", _hooks(vars(module), ("_hooks", "_kwargs"))


def _optimizer_parts(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    yield "the optimizer's groups", optimizer.param_groups
    yield "the optimizer's state", list(optimizer.state.items())
    standard = ("param_groups", "state", "defaults")
    others = {name: value for name, value in sorted(vars(optimizer).items()) if name not in standard}
    plain = {name: value for name, value in others.items() if isinstance(value, _PLAIN)}
    yield "the optimizer's attributes", [list(others), plain]
    yield "the optimizer's hooks", _hooks(others, ("_hooks",))


def _hooks(attributes: Mapping[str, Any], endings: tuple[str, ...]) -> dict[str, Any]:
    """Return the mappings of hooks; a missing one counts as an empty one."""
    return {name: value or {} for name, value in attributes.items() if name.endswith(endings)}


def _hashable_state(state: Any) -> Any:
    """Return a generator's state without its tensor, which is a new object each time."""
    return bytes(state.tolist()) if isinstance(state, Tensor) else state


def _user_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, root in roots.items():
        for path, module in root.named_modules(prefix=prefix):
            if is_user_class(type(module)):
                yield path, module


def _attribute_hashes(roots: Mapping[str, nn.Module]) -> dict[str, str]:
    hasher = StateHasher()
    return {
        f"{path}.{name}" if path else name: _COMPUTED if _is_computed(value) else hasher.hash(value)
        for path, module in _user_modules(roots)
        for name, value in _plain_attributes(module).items()
    }


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of `module`.

    If its class extends a library's (`PreTrainedModel`), only those that the user's own methods name are the user's.
    """
    libraries = [base for base in type(module).__mro__ if not is_user_class(base)]
    is_of_torch = all(base.__module__.partition(".")[0] in ("torch", "builtins") for base in libraries)
    methods = () if is_of_torch else find_user_methods([module])
    used = {name for method in methods for name in code_names(method.__code__)}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in REGISTERED and _is_plain(value, _DEPTH) and (is_of_torch or name in used)
    }


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return is_plain_tensor(value) and not isinstance(value, nn.Parameter) and not value.is_meta
    if depth == 0 or type(value) not in (*MAPPINGS, *SEQUENCES, tuple, frozenset) or len(value) > _ENTRIES:
        return False
    inner = [*value.keys(), *value.values()] if type(value) in MAPPINGS else value
    return all(_is_plain(entry, depth - 1) for entry in inner)


def _is_computed(value: Any) -> bool:
    """Return whether `value` has a graph, as an auxiliary loss has, and so is replaced by the next forward."""
    return any(tensor.grad_fn is not None for tensor in pytree.tensors([value]))
