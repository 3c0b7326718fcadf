"""The containers a batch may be made of: how to look inside one, and how to rebuild it around other content."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autoaccum.checks import type_name
from autoaccum.errors import WorkloadError

_PLAIN = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    np.generic,
    torch.Size,
    torch.dtype,
    torch.device,
)
_DEPTH = 4
"""How deep an unknown object is searched for tensors."""


class CustomBatch:
    """A batch with the workload's own way to count its samples and to cut it; see `batches.Batching`.

    Attributes:
        value: The batch as the user's code made it, and gets it.
        samples: How many it holds.
        batching: How it is counted and cut.
    """

    def __init__(self, value: Any, samples: int, batching: Any) -> None:
        self.value, self.samples, self.batching = value, samples, batching

    def __getitem__(self, key: Any) -> Any:
        """An entry of the user's batch."""
        return self.value[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomBatch:
        """Another of the batch, and none of the functions."""
        return self.with_value(copy.deepcopy(self.value, memo))

    def with_value(self, value: Any) -> CustomBatch:
        """As many samples, held otherwise: moved, or cast."""
        return CustomBatch(value, self.samples, self.batching)


def unwrap_batch(batch: Any) -> Any:
    """The batch as the user's code is to have it."""
    return batch.value if isinstance(batch, CustomBatch) else batch


def is_leaf(node: Any) -> bool:
    """Whether `node` is a tensor or an array that can be cut along its first dimension, or has none.

    Raises:
        WorkloadError: A sparse or nested tensor, whose parts are not views; or one without values.
    """
    if isinstance(node, Tensor):
        if node.is_nested or node.layout != torch.strided:
            form = "nested" if node.is_nested else str(node.layout).removeprefix("torch.")
            raise WorkloadError(
                f"the batch holds a {form} tensor, which cannot be cut into views",
                hint="give a padded or dense tensor and convert it in the model",
            )
        if node.device.type == "meta":
            raise WorkloadError(
                "the batch holds a tensor on the meta device, which has no values", hint="give a real one, on the CPU"
            )
        return True
    return isinstance(node, np.ndarray)


def has_batch_dimension(node: Any) -> bool:
    """Whether `node` is a tensor or an array with a first dimension."""
    return isinstance(node, Tensor | np.ndarray) and node.ndim > 0


def is_plain(node: Any) -> bool:
    """Whether `node` is a value without parts: a number, a string, None, a dtype."""
    return isinstance(node, _PLAIN)


def is_value(node: Any) -> bool:
    """Whether there is nothing in `node` to split: a plain value, a tensor without dimensions, an unknown object."""
    if is_plain(node) or is_leaf(node):
        return not has_batch_dimension(node)
    return children(node) is None and not contains_tensors(node)


def is_namedtuple(node: Any) -> bool:
    """Whether `node` is an instance of a named tuple class."""
    return isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, PackedSequence)


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def is_sequence(node: Any) -> bool:
    """Whether `node` is a list or a tuple without names: a record or samples, as the rest of the batch decides."""
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(node, "_fields") and not is_plain(node))


def are_records(entries: Sequence[Any]) -> bool:
    """Whether the entries are mappings, dataclasses or named tuples."""
    return all(isinstance(entry, Mapping) or _is_dataclass(entry) or is_namedtuple(entry) for entry in entries)


def same_structure(entries: Sequence[Any]) -> bool:
    """Whether the entries could be samples of one kind: tensors of one dtype, mappings of the same keys, one class."""
    return len({_likeness(entry) for entry in entries}) <= 1


def _likeness(entry: Any) -> Any:
    if isinstance(entry, Tensor | np.ndarray):
        return type_name(entry), str(entry.dtype), entry.ndim
    return frozenset(map(str, entry)) if isinstance(entry, Mapping) else type(entry)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The content of a container as pairs of a path step, such as `['x']` or `.x`, and a child; None: no container."""
    if isinstance(node, CustomBatch):
        return [("", node.value)]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if _is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        if contains_tensors(
            {name: value for name, value in getattr(node, "__dict__", {}).items() if name not in names}
        ):
            return None
        return [(f".{name}", getattr(node, name)) for name in names]
    if is_namedtuple(node):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if is_sequence(node):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return None


def tensors(node: Any) -> Iterator[Tensor]:
    """Every tensor in a nest, in order."""
    if isinstance(node, Tensor):
        yield node
        return
    for _, child in children(node) or ():
        yield from tensors(child)


def rebuild(node: Any, content: Sequence[Any]) -> Any:
    """A container like `node` around `content`, in the order of `children`.

    A mapping whose class cannot be rebuilt from its items becomes a dict.
    """
    if isinstance(node, CustomBatch):
        return node.with_value(content[0])
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(node, content, strict=True)))
    if _is_dataclass(node):
        steps = children(node) or []
        rebuilt = copy.copy(node)
        for (step, _), value in zip(steps, content, strict=True):
            object.__setattr__(rebuilt, step.removeprefix("."), value)
        return rebuilt
    if is_namedtuple(node):
        return type(node)._make(content)
    return rebuild_sequence(node, content)


def rebuild_sequence(node: Any, content: Sequence[Any]) -> Any:
    """A list or tuple of the class of `node` around `content`, which may have another length."""
    plain = list(content) if isinstance(node, list) else tuple(content)
    try:
        return plain if type(node) in (list, tuple) else type(node)(plain)
    except TypeError:
        return plain


def map_tensors(
    node: Any, change: Callable[[Tensor], Tensor], change_object: Callable[[Any], Any] | None = None
) -> Any:
    """A nest with every tensor changed, those in objects too; what holds no other tensors than before is kept.

    Args:
        node: The nest.
        change: From a tensor to another.
        change_object: From an object with tensors that is no container to another; None: a copy with them changed.
    """
    if isinstance(node, Tensor):
        return change(node)
    inner = children(node)
    if inner is None:
        if not any(isinstance(each, Tensor) for each in _walk(node)):
            return node
        return map_object_tensors(node, change) if change_object is None else change_object(node)
    changed = [map_tensors(child, change, change_object) for _, child in inner]
    if all(new is old for new, (_, old) in zip(changed, inner, strict=True)):
        return node
    return rebuild(node, changed)


def contains_tensors(node: Any) -> bool:
    """Whether an object that is no container holds tensors, which would be passed on unsplit."""
    return any(isinstance(each, Tensor | PackedSequence | Iterator | nn.Module | np.ndarray) for each in _walk(node))


def map_object_tensors(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an object that is no container, with every tensor changed that is found in it."""
    found = {id(tensor): tensor for tensor in _walk(node) if isinstance(tensor, Tensor)}
    return copy.deepcopy(node, {key: change(tensor) for key, tensor in found.items()})


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if not isinstance(node, dict | UserDict):
            return type(node)(items)  # type: ignore[call-arg]
        rebuilt: Any = copy.copy(node)
        for key, value in items.items():
            rebuilt[key] = value
    except Exception:  # It is the user's class, which may raise anything.
        return items
    return rebuilt  # type: ignore[no-any-return]


def _walk(node: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """An object and what it holds, of whatever kind, except what is in tensors."""
    yield node
    if depth == 0 or is_plain(node) or isinstance(node, Tensor | type):
        return
    if isinstance(node, Mapping):
        inside = list(node.values())
    elif isinstance(node, list | tuple | Set):
        inside = list(node)
    else:
        slots = [vars(base).get("__slots__", ()) for base in type(node).__mro__]
        names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        inside = [*getattr(node, "__dict__", {}).values(), *(getattr(node, name, None) for name in names)]
    for value in inside:
        yield from _walk(value, depth - 1)
