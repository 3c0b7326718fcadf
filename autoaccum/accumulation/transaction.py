"""Copy the training state that PyTorch knows, and restore it: the same objects with the same values.

That is parameters, buffers, modes, gradients, hooks, optimizer, scaler and random states. Other state that Python
objects hold is not restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autoaccum.accumulation.gradients import restore_scaler
from autoaccum.accumulation.reachable_objects import MAPPINGS, SEQUENCES
from autoaccum.accumulation.rng_state import Generator, RngState
from autoaccum.sharded_tensors import local_part
from autoaccum.sources import pytree
from autoaccum.units import MIB

_SMALL_BYTES = MIB
"""Buffers up to this size are copied on their own device, without a synchronisation; larger ones to the host, so that a
step needs no device memory for them."""


class TensorCopy:
    """A copy of the values of one tensor, in host memory or on the tensor's device.

    `restore` also works after the tensor's `.data` was replaced. A parameter gets its `requires_grad` and its `.grad`
    back, too. Sparse tensors are not copied.
    """

    def __init__(self, tensor: Tensor, *, on_host: bool = True) -> None:
        self._tensor, self._alias = tensor, local_part(tensor.detach())
        self._trained = (tensor.requires_grad, tensor.grad) if isinstance(tensor, nn.Parameter) else None
        self._values: Tensor | None = None
        if not _is_fixed(self._alias):
            self._values = self._alias.to("cpu", copy=True) if on_host else self._alias.clone()

    def is_current(self) -> bool:
        """Return whether the tensor has the values of the copy; not every change raises its version."""
        can_read = self._values is not None and is_plain_tensor(self._tensor)
        return can_read and torch.equal(self._alias.to(self._values.device), self._values)  # type: ignore[union-attr, arg-type]

    def restore(self) -> Tensor:
        """Restore the values; this allocates nothing on the tensor's device."""
        with torch.no_grad():
            if self._values is not None:
                self._alias.copy_(self._values)
            if is_plain_tensor(self._tensor) and not self._tensor.is_set_to(self._alias):
                self._tensor.data = self._alias
        if self._trained is not None:
            self._tensor.requires_grad_(self._trained[0])
            self._tensor.grad = self._trained[1]
        return self._tensor


class StateCopy:
    """A copy of a nested structure of tensors, optimizers, schedulers and Python's own containers.

    Any other object in it, such as a library's mapping, is restored by reference only, and so are tensors in `without`.
    """

    def __init__(self, root: Any, *, without: Iterable[Tensor] = ()) -> None:
        self._tensors: list[TensorCopy] = []
        self._mappings: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        seen: dict[int, Any] = {id(tensor): tensor for tensor in without}
        queue = [root]
        while queue:
            node = queue.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            if isinstance(node, Tensor):
                self._tensors.append(TensorCopy(node))
            elif isinstance(node, Optimizer | LRScheduler):
                queue.append(vars(node))
            elif type(node) in MAPPINGS:
                self._mappings.append((node, dict(node)))
                queue.extend(node.values())
            elif type(node) in SEQUENCES:
                self._sequences.append((node, list(node)))
                queue.extend(node)
            elif isinstance(node, tuple):
                queue.extend(node)

    def restore(self) -> None:
        """Restore everything in place and in order, and remove what was added since."""
        for mapping, content in self._mappings:
            now = list(mapping)
            if len(now) != len(content) or any(new is not old for new, old in zip(now, content, strict=True)):
                mapping.clear()  # Only then, so that code that watches a mapping sees no needless change.
            mapping.update(content)
        for sequence, items in self._sequences:
            sequence.clear()
            (sequence.update if isinstance(sequence, set) else sequence.extend)(items)
        for tensor in self._tensors:
            tensor.restore()


class ModuleState:
    """A copy of the buffers and the train/eval modes of modules.

    Buffers larger than `host_bytes` are copied to host memory, smaller ones on their own device. Buffers that were
    replaced or added meanwhile are restored, too.
    """

    def __init__(self, modules: Iterable[nn.Module], *, host_bytes: int = 0) -> None:
        # Lists side by side, not tuples in one, since every step makes them: each tuple would be garbage to collect.
        self._listed = list(modules)
        self._modes = [module.training for module in self._listed]
        # Only `_buffers` tells a name that is registered without a tensor from one that is not registered.
        self._tables = [module._buffers for module in self._listed]
        self._contents = [dict(table) for table in self._tables]
        buffers = {
            id(buffer): buffer for content in self._contents for buffer in content.values() if buffer is not None
        }
        self.buffers = list(buffers.values())
        copied = [buffer for buffer in self.buffers if buffer.layout is torch.strided]
        self._copies = [TensorCopy(buffer, on_host=buffer.nbytes > host_bytes) for buffer in copied]

    def restore(self, *, only_changed: bool = False) -> None:
        """Restore buffers and modes; this allocates nothing on the buffers' devices.

        With `only_changed`, which does allocate there, nothing is written to a buffer that has its former values.
        """
        for table, content in zip(self._tables, self._contents, strict=True):
            table.clear()
            table.update(content)
        for copy in self._copies:
            if not (only_changed and copy.is_current()):
                copy.restore()
        for module, training in zip(self._listed, self._modes, strict=True):
            module.training = training


class Transaction:
    """The state before a training step, to which a step that fails is rolled back.

    It covers buffers (changed or replaced), train/eval modes, `requires_grad`, `.grad`, random states and the scaler.
    Parameters and optimizer state change in the update only; `protect` copies them as well. State that a model keeps in
    Python attributes is not covered.

    `modules` are all of the model and the criterion, `parameters` those whose `.grad` the step changes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[Tensor],
        *,
        generators: Iterable[Generator] = (),
        scaler: GradScaler | None = None,
    ) -> None:
        self._modules: ModuleState | None = ModuleState(modules, host_bytes=_SMALL_BYTES)
        self._parameters = parameters
        self._requires_grad = [parameter.requires_grad for parameter in parameters]
        self._gradients = [parameter.grad for parameter in parameters]
        devices = dict.fromkeys([tensor.device for tensor in (*parameters, *self._modules.buffers)])
        self._random = RngState(devices, generators)
        self._scaler = scaler
        self._scaler_state: dict[str, Any] = {} if scaler is None else scaler.state_dict()
        self._protected: StateCopy | None = None

    @property
    def scale(self) -> float:
        """The loss scale before the step; 1.0 without a scaler."""
        return float(self._scaler_state.get("scale", 1.0))

    def protect(self, *owners: Any) -> None:
        """Copy the parameters and the state of `owners` (optimizer, scheduler) to host memory."""
        self._protected = StateCopy([getattr(owner, "__dict__", None) for owner in owners])

    def commit(self) -> None:
        """Free the copies after the update; from now on `rollback` does nothing."""
        self._protected = self._modules = None

    def rollback(self) -> None:
        """Restore everything without allocating device memory; call it again if it was interrupted."""
        if self._modules is None:
            return
        if self._protected is not None:
            self._protected.restore()
        self._modules.restore()
        for parameter, requires_grad, gradient in zip(
            self._parameters, self._requires_grad, self._gradients, strict=True
        ):
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        if self._scaler is not None:
            restore_scaler(self._scaler, self._scaler_state)
        self._random.restore()


def batch_versions(batches: Sequence[Any]) -> list[int]:
    """Return the version of each tensor of `batches`, which in-place changes of it or of its views increment."""
    return [tensor._version for tensor in pytree.tensors(batches) if not tensor.is_inference()]


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether `tensor` is strided and not of a tensor subclass, which may lack operators."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def _is_fixed(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` stay: of sparse, inference and overlapping tensors."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
