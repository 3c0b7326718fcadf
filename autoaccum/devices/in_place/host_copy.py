"""What it costs to set live state aside in host memory, known before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.state import dense_parts, tensor_bytes
from autoaccum.devices.host_memory import HostMemory
from autoaccum.errors import UsageError
from autoaccum.units import MIB, format_bytes

_LEAST_MARGIN_BYTES = 256 * MIB
_MARGIN_SHARE = 0.05


@dataclass(frozen=True)
class LiveBytes:
    """How much live state there is, in bytes.

    Attributes:
        copy_bytes: What a copy of all of it takes: parameters, buffers, `.grad`, optimizer state, and tensors that
            modules keep as attributes.
        guard_bytes: What the Accumulator's own copy takes, with which it guards a trial's first update: parameters
            and the optimizer state there is by then.
        held_bytes: What it takes of the model's device as it lies there; storages that several share count once.
        gradient_bytes: How much of that is `.grad`.
    """

    copy_bytes: int
    guard_bytes: int
    held_bytes: int
    gradient_bytes: int


def count_live_bytes(roots: Mapping[str, nn.Module], optimizer: Optimizer | None, *, is_live: bool) -> LiveBytes:
    """Add up what is there; what is not live training state (a criterion, a template) holds nothing of a trial's."""
    modules = [module for root in roots.values() for module in root.modules()]
    parameters = _distinct(parameter for root in roots.values() for parameter in root.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kept = _tensors([[vars(module), module._buffers] for module in modules])
    state = _distinct(_tensors([] if optimizer is None else list(optimizer.state.values())))
    trained = _distinct(_tensors([] if optimizer is None else [group["params"] for group in optimizer.param_groups]))
    everything = _distinct([*parameters, *gradients, *kept, *state, *trained])
    return LiveBytes(
        copy_bytes=_size(everything),
        guard_bytes=_size([*trained, *state]) if optimizer is not None else _size(parameters),
        held_bytes=_storage_size(everything) if is_live else 0,
        gradient_bytes=_storage_size(gradients) if is_live else 0,
    )


def check_host_copy(name: str, live: LiveBytes, host: HostMemory, *, guarded_on_host: bool) -> None:
    """Refuse a copy that does not fit beside a margin of 256 MiB or 5 % of what is free.

    Args:
        name: What the message calls the model.
        live: What there is.
        host: Read now.
        guarded_on_host: Whether the Accumulator's copy comes on top; on the CPU it is within the budget.

    Raises:
        UsageError: It does not fit; nothing was touched.
    """
    needed = live.copy_bytes + (live.guard_bytes if guarded_on_host else 0)
    margin = max(_LEAST_MARGIN_BYTES, int(host.free_bytes * _MARGIN_SHARE))
    if needed + margin > host.free_bytes:
        raise UsageError(
            f"the copy of {name} and its optimizer takes {format_bytes(needed)} of host memory,"
            f" {format_bytes(host.free_bytes)} are free ({host.bound}), and {format_bytes(margin)} stay free",
            hint="plan it through its file, which needs no copy: autoaccum plan model.py",
        )


def _tensors(root: Any) -> Iterator[Tensor]:
    """Tensors in a nest of mappings, lists and tuples."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            yield node
        elif isinstance(node, Mapping):
            waiting.extend(node.values())
        elif isinstance(node, list | tuple):
            waiting.extend(node)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in _distinct(tensors))


def _storage_size(tensors: Iterable[Tensor]) -> int:
    storages = {}
    parts = [part for tensor in tensors for part in dense_parts(tensor.detach())]
    for part in parts:
        try:
            storage = part.untyped_storage()
        except (RuntimeError, NotImplementedError):  # of another layout
            storages[id(part)] = part.nbytes
        else:
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
