"""Traverse and rebuild the nested structures (pytrees) that a batch may be made of.

Containers are mappings, dataclasses, named tuples, tuples and lists; anything else is a leaf, a plain value or an
object of unknown structure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autoaccum.checks import type_name
from autoaccum.errors import WorkloadError

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), np.generic, torch.Size, torch.dtype, torch.device)
_DEPTH = 4
"""How many levels of an unknown object are searched for tensors."""


class CustomBatch:
    """A batch that is counted and split by the workload's own functions (`batches.Batching`).

    Attributes:
        value: The batch as the user's code makes and takes it.
        samples: The number of samples.
        batching: The functions that count and split it.
    """

    def __init__(self, value: Any, samples: int, batching: Any) -> None:
        self.value, self.samples, self.batching = value, samples, batching

    def __getitem__(self, key: Any) -> Any:
        """Return an entry of the user's batch."""
        return self.value[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomBatch:
        """Copy the batch, but not the functions."""
        return self.with_value(copy.deepcopy(self.value, memo))

    def with_value(self, value: Any) -> CustomBatch:
        """Return a batch of the same samples with another `value`, such as one moved to a device."""
        return CustomBatch(value, self.samples, self.batching)


class MarkedList(list[Any]):
    """A list or a tuple in a batch that tells how it is read: as samples, or as a record (see `readings`)."""

    def __init__(self, content: Iterable[Any], kind: type, *, samples: bool) -> None:
        super().__init__(content)
        self.kind, self.samples = kind, samples


def unwrap_batch(batch: Any) -> Any:
    """Return the batch as the user's code takes it: without marks."""
    if isinstance(batch, CustomBatch):
        return batch.value
    inner = children(batch) or ()
    content = [unwrap_batch(child) for _, child in inner]
    if isinstance(batch, MarkedList):
        return batch.kind(content)
    return rebuild_changed(batch, content)


def is_leaf(node: Any) -> bool:
    """Return whether `node` is a tensor or an array.

    Raises:
        WorkloadError: It is a sparse or nested tensor, which cannot be split into views, or is on the meta device.
    """
    if isinstance(node, Tensor):
        if node.is_nested or node.layout != torch.strided:
            form = "nested" if node.is_nested else str(node.layout).removeprefix("torch.")
            raise WorkloadError(
                f"the batch holds a {form} tensor, which cannot be split into views",
                hint="give a padded or dense tensor and convert it in the model",
            )
        if node.device.type == "meta":
            raise WorkloadError(
                "the batch holds a tensor on the meta device, which has no values", hint="give a tensor on the CPU"
            )
        return True
    return isinstance(node, np.ndarray)


def has_batch_dimension(node: Any) -> bool:
    """Return whether `node` is a tensor or an array with at least one dimension."""
    return isinstance(node, Tensor | np.ndarray) and node.ndim > 0


def is_plain(node: Any) -> bool:
    """Return whether `node` is a plain value: a number, a string, None, a dtype, a device."""
    return isinstance(node, _PLAIN)


def is_record(node: Any) -> bool:
    """Return whether `node` is a mapping, a dataclass or a named tuple."""
    return isinstance(node, Mapping) or _is_dataclass(node) or _is_namedtuple(node)


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, PackedSequence)


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def is_sequence(node: Any) -> bool:
    """Return whether `node` is a list or an unnamed tuple, which may be a record or samples (see `batches`)."""
    return isinstance(node, list) or (isinstance(node, tuple) and not hasattr(node, "_fields") and not is_plain(node))


def structure(entry: Any) -> Any:
    """Return what the samples of a batch have in common: dtype and rank, keys, or the class."""
    if isinstance(entry, Tensor | np.ndarray):
        return type_name(entry), str(entry.dtype), entry.ndim
    return frozenset(map(str, entry)) if isinstance(entry, Mapping) else type(entry)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the children of a container, each with its path step such as `['x']` or `.x`; None for no container."""
    if type(node) in (list, tuple):  # First, since nearly all are, and the checks below are slow in every update.
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if isinstance(node, CustomBatch):
        return [("", node.value)]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if _is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        others = [value for name, value in getattr(node, "__dict__", {}).items() if name not in names]
        return None if contains_tensors(others) else [(f".{name}", getattr(node, name)) for name in names]
    if _is_namedtuple(node):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if is_sequence(node):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return None


def tensors(node: Any) -> Iterator[Tensor]:
    """Yield every tensor of a pytree, in order."""
    if isinstance(node, Tensor):
        yield node
        return
    for _, child in children(node) or ():
        yield from tensors(child)


def rebuild(node: Any, content: Sequence[Any]) -> Any:
    """Return a container like `node` with the children `content`, in the order of `children`.

    A mapping becomes a dict if its class cannot be built from items.
    """
    if isinstance(node, CustomBatch):
        return node.with_value(content[0])
    if isinstance(node, Mapping):
        items = dict(zip(node, content, strict=True))
        try:
            if not isinstance(node, dict | UserDict):
                return type(node)(items)  # type: ignore[call-arg]
            mapping: Any = copy.copy(node)
            for key, value in items.items():
                mapping[key] = value
        except Exception:  # The class is the user's and may raise anything.
            return items
        return mapping
    if _is_dataclass(node):
        record = copy.copy(node)
        for (step, _), value in zip(children(node) or [], content, strict=True):
            object.__setattr__(record, step.removeprefix("."), value)
        return record
    return type(node)._make(content) if _is_namedtuple(node) else rebuild_sequence(node, content)


def rebuild_changed(node: Any, content: Sequence[Any]) -> Any:
    """Return `node` itself if `content` is its children, else a container like it with `content`."""
    same = all(new is old for new, (_, old) in zip(content, children(node) or (), strict=True))
    return node if same else rebuild(node, content)


def rebuild_sequence(node: Any, content: Sequence[Any]) -> Any:
    """Return a list or tuple of the class of `node` with `content`, which may have another length."""
    if isinstance(node, MarkedList):
        return MarkedList(content, node.kind, samples=node.samples)
    plain = list(content) if isinstance(node, list) else tuple(content)
    try:
        return plain if type(node) in (list, tuple) else type(node)(plain)
    except TypeError:
        return plain


def map_tensors(
    node: Any, change: Callable[[Tensor], Tensor], change_object: Callable[[Any], Any] | None = None
) -> Any:
    """Apply `change` to every tensor of a pytree, also to those inside objects; unchanged nodes are not copied.

    Args:
        node: The pytree.
        change: Maps a tensor to another.
        change_object: Maps an object that holds tensors and is no container; None: `map_object_tensors`.
    """
    if isinstance(node, Tensor):
        return change(node)
    inner = children(node)
    if inner is None:
        if next(inner_tensors(node), None) is None:
            return node
        return map_object_tensors(node, change) if change_object is None else change_object(node)
    return rebuild_changed(node, [map_tensors(child, change, change_object) for _, child in inner])


def contains_tensors(node: Any) -> bool:
    """Return whether an object that is no container holds tensors, which could not be split."""
    return any(isinstance(part, Tensor | PackedSequence | Iterator | nn.Module | np.ndarray) for part in _walk(node))


def map_object_tensors(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of an object that is no container, with `change` applied to the tensors inside it."""
    inside = {id(tensor): tensor for tensor in inner_tensors(node)}
    return copy.deepcopy(node, {key: change(tensor) for key, tensor in inside.items()})


def inner_tensors(node: Any) -> Iterator[Tensor]:
    """Yield the tensors inside an object that is no container, such as a graph of torch_geometric."""
    return (part for part in _walk(node) if isinstance(part, Tensor))


def _walk(node: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield an object and everything reachable in it, down to `depth` levels; tensors are not entered."""
    yield node
    if depth == 0 or is_plain(node) or isinstance(node, Tensor | type):
        return
    if isinstance(node, Mapping):
        inside: Iterable[Any] = list(node.values())
    elif isinstance(node, list | tuple | Set):
        inside = list(node)
    else:
        slots = [vars(base).get("__slots__", ()) for base in type(node).__mro__]
        names = [name for declared in slots for name in ([declared] if isinstance(declared, str) else declared)]
        inside = [*getattr(node, "__dict__", {}).values(), *(getattr(node, name, None) for name in names)]
    for value in inside:
        yield from _walk(value, depth - 1)
