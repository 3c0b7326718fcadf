"""What a file may hold that anybody loads without running code, and a digest over all of it."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.errors import CheckpointError
from autoaccum.workload.nests import kind

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_MARK = {"__numpy__", "values"}


class NotPortableError(CheckpointError):
    """Something in a training keeps its state as an object that only code can load."""

    exit_code = 2


def portable(content: Any, what: str = "a checkpoint", *, numpy: bool = False) -> Any:
    """The same nest with its tensors on the CPU, each of a storage of its own; one that occurs twice still does.

    A tensor that is so already is not copied. A number of NumPy's becomes one of Python's, and an array is refused,
    unless `numpy` is True: `revived` gives them back then.

    Args:
        content: A nest of mappings, lists, tuples, sets, plain values and tensors.
        what: What messages call what is to hold it.
        numpy: Hold numbers and arrays of NumPy's as tensors with a mark.

    Raises:
        NotPortableError: Something in it could be loaded only by running code; says where.
    """
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def walk(node: Any, path: str, numpy: bool) -> Any:
        if isinstance(node, Tensor):
            if id(node) not in tensors:
                tensors[id(node)] = (node, _portable_tensor(node, path, what))
            return tensors[id(node)][1]
        if type(node) in (*_MAPPINGS, defaultdict):
            items = {
                walk(key, f"a key of {path}", False): walk(value, _below(path, key), numpy)
                for key, value in node.items()
            }
            return type(node)(items) if type(node) in _MAPPINGS else items
        if type(node) in (list, tuple, set):
            inside = numpy and type(node) is not set
            return type(node)([walk(entry, _below(path, index), inside) for index, entry in enumerate(node)])
        if numpy and (isinstance(node, np.generic) or type(node) is np.ndarray) and (marked := _marked(node)):
            return marked
        if isinstance(node, np.generic):
            return walk(node.item(), path, False)
        if type(node) not in _VALUES or node == b"":  # Empty bytes are pickled as a call.
            raise _refusal(what, path, kind(node))
        return node

    try:
        return walk(content, "", numpy)
    except RecursionError:
        raise _refusal(what, "it", "a nest that contains itself") from None


def revived(content: Any) -> Any:
    """What `portable` made of numbers and arrays of NumPy's, as it was; the rest as it is."""
    if type(content) in _MAPPINGS:
        if content.keys() == _MARK:
            values = content["values"].numpy()
            return values if content["__numpy__"] == "array" else values[()]
        return type(content)({key: revived(value) for key, value in content.items()})
    return type(content)(map(revived, content)) if type(content) in (list, tuple) else content


def can_hold(tensor: Tensor) -> bool:
    """Whether a file can hold `tensor`."""
    return not _obstacle(tensor)


def digest(content: Any) -> str:
    """SHA-256 over a portable nest: types, order, values, and every byte of its tensors, each read once.

    No threads share the work: where memory is short, Python may wait for ever for one that has died as it began.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    skeleton = _skeleton(content, tensors)
    hashes = [_tensor_hash(tensor) for _, tensor in tensors.values()]
    return hashlib.sha256(b"".join([skeleton.encode(errors="surrogatepass"), *hashes])).hexdigest()


def _marked(node: Any) -> dict[str, Any] | None:
    """None for what no tensor can hold: words, dates, objects."""
    try:
        values = torch.from_numpy(np.array(node))  # A copy: others may not be written to.
    except TypeError:
        return None
    return {"__numpy__": "array" if isinstance(node, np.ndarray) else "number", "values": values}


def _portable_tensor(tensor: Tensor, path: str, what: str) -> Tensor:
    if obstacle := _obstacle(tensor):
        raise _refusal(what, path, obstacle)
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.device.type != "cpu":
        return values.to("cpu")
    if values.layout is torch.strided and values.untyped_storage().nbytes() != values.nbytes:
        return values.clone(memory_format=torch.contiguous_format)
    return values


def _obstacle(tensor: Tensor) -> str:
    if type(tensor) not in _TENSORS:
        return kind(tensor)
    if tensor.is_quantized or tensor.is_nested:
        return "a quantised or nested tensor"
    if tensor.is_meta:
        return "a tensor on the meta device"
    return "" if tensor.layout in (torch.strided, torch.sparse_coo) else f"a tensor of {tensor.layout}"


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _refusal(what: str, path: str, found: str) -> NotPortableError:
    return NotPortableError(
        f"{what} cannot hold {path}: it is {found}, which would not load without running code",
        hint="keep tensors, numbers and strings there, and lists and dicts of them",
    )


def _skeleton(node: Any, tensors: dict[int, tuple[int, Tensor]]) -> str:
    if isinstance(node, Tensor):
        number, _ = tensors.setdefault(id(node), (len(tensors), node))
        return f"tensor {number} {node.dtype} {node.layout} {tuple(node.shape)}"
    name = type(node).__name__
    if isinstance(node, Mapping):
        return f"{name}{[(_skeleton(key, tensors), _skeleton(value, tensors)) for key, value in node.items()]}"
    if isinstance(node, list | tuple):
        return f"{name}{[_skeleton(entry, tensors) for entry in node]}"
    if isinstance(node, set):
        return f"{name}{sorted(_skeleton(entry, tensors) for entry in node)}"
    return f"{name} {node!r}"


def _tensor_hash(tensor: Tensor) -> bytes:
    dense = [tensor] if tensor.layout is torch.strided else [tensor._indices(), tensor._values()]
    content = hashlib.sha256()
    for part in dense:
        values: Any = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        content.update(values)
    return content.digest()
