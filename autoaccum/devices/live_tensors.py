"""The tensors of a live model on a card: they wait in host memory while trials have the card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import unwrap_optimizer
from autoaccum.accumulation.out_of_memory import release_memory
from autoaccum.accumulation.step_result import DelayedInterrupts
from autoaccum.errors import NotMeasuredError, UsageError, first_line
from autoaccum.units import format_bytes


def choose_device(model: Any, requested: str) -> str:
    """Return the device for trials of a model: the card that it is on, else what is requested.

    Raises:
        UsageError: It is on several devices, on one where no trial can be measured, or on another than requested.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    devices = {str(tensor.device): tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on {' and '.join(sorted(devices))}, trials measure one device",
            hint="move it there: model.to(device)",
        )
    device = next(iter(devices.values()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device}, where no trial can be measured", hint="move it: model.to('cuda')")
    if device.type == "cpu":
        return requested
    if requested not in ("auto", "cuda", str(device)):
        raise UsageError(f"the model is on {device}, and the device is to be {requested}", hint="move the model first")
    return str(device)


@dataclass(frozen=True)
class LiveTensors:
    """Storages of the caller's tensors, each once."""

    storages: Sequence[torch.UntypedStorage]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any = None) -> LiveTensors:
        """Find what a model and its optimizer hold: parameters, gradients, buffers, attributes of modules, state."""
        roots: list[Any] = [[*model.parameters()], [parameter.grad for parameter in model.parameters()]]
        roots += [[vars(module), module._buffers] for module in model.modules()]
        if isinstance(optimizer, Optimizer):
            inner = unwrap_optimizer(optimizer)
            roots += [list(inner.state.values()), inner.param_groups]
        storages = {}
        for tensor in _tensors(roots):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.resizable() and not storage.is_shared():
                    storages[storage.data_ptr()] = storage
        return cls(list(storages.values()))

    @property
    def note(self) -> str:
        """What a plan says of them."""
        total = format_bytes(sum(storage.nbytes() for storage in self.storages))
        return f"your model and optimizer ({total}) waited in host memory while trials had the card"

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Keep the values in host memory within, and free the device's; tensors and their views stay the same objects.

        Within it no one may read the tensors. Their addresses change.

        Raises:
            NotMeasuredError: The device has no memory to take them back.
        """
        waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        try:
            with DelayedInterrupts():
                for storage in self.storages:
                    values = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
                    waiting.append((storage, values.copy_(storage)))
                    storage.resize_(0)
            release_memory()
            yield
        finally:
            with DelayedInterrupts():
                _bring_back(waiting)


def _bring_back(waiting: Sequence[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
    for storage, values in waiting:
        try:
            storage.resize_(values.nbytes())
        except RuntimeError as error:
            raise NotMeasuredError(
                f"the model could not be brought back to {storage.device} ({first_line(error)})",
                hint="load it again before training",
            ) from error
        storage.copy_(values)


def _tensors(root: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
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
