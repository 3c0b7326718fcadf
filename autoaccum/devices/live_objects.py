"""A Workload of live objects: the model, and batches of any size from a function or from a sample batch.

A model on a card waits in host memory while trials have the card.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autoaccum.accumulation.argument_checks import check_model, check_optimizer, check_unsharded, unwrap_optimizer
from autoaccum.accumulation.out_of_memory import find_out_of_memory, release_memory
from autoaccum.accumulation.step_result import DelayedInterrupts
from autoaccum.checks import describe_type
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.sources import pytree
from autoaccum.sources.batches import (
    BatchReader,
    batch_size,
    join_batches,
    read_batch,
    read_batching,
    split_batch,
    wrap_batch,
)
from autoaccum.sources.objective import read_coupled_loss, resolve_objective
from autoaccum.sources.optimizers import OptimizerLike
from autoaccum.sources.workload import Workload
from autoaccum.tracebacks import blame_workload

_SAMPLE = "give one batch instead, such as next(iter(loader)): it is repeated and cut to size"
_MORE = f"return as many as asked, or {_SAMPLE}"


def workload_of_objects(live: Mapping[str, Any], options: Options) -> Workload:
    """Return the Workload of live objects, by the names of `autoaccum.plan`'s arguments, and of the options.

    Its model is the live one, and its optimizer makes new ones that are like a live one (`OptimizerLike`).

    Raises:
        UsageError: The model is no bare module, or the optimizer is not the model's.
        WorkloadError: `batch` is neither a function nor a batch, or the objects do not fit together.
    """
    model = check_model(live["model"])
    check_unsharded(model)
    if isinstance(model, nn.DataParallel):
        raise UsageError("the model is wrapped in DataParallel", hint="give the module in it: model=wrapped.module")
    objective = resolve_objective(
        read_coupled_loss(live.get("loss"), live.get("outputs"), live.get("coupled_loss")),
        criterion=live.get("criterion"),
        weight=live.get("weight"),
        reduction=live.get("reduction") or "mean",
        model=model,
    )
    criterion, batching = objective.criterion, read_batching(live.get("split"), live.get("size"))
    given: dict[str, Any] = {**options.spec}
    optimizer = given.get("optimizer")
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given["optimizer"] = OptimizerLike(unwrap_optimizer(optimizer), trained)
    return Workload(
        model=model,
        batch=make_batches(live["batch"], batching),
        loss=None if criterion is not None else objective.loss,
        criterion=None if criterion is None else criterion.function,
        weight=objective.weight_function,
        reduction=objective.reduction,
        evaluate=live.get("evaluate"),
        split=live.get("split"),
        size=live.get("size"),
        name=type(live["model"]).__name__,
        **{"coupled": objective.coupled, **given},
    )


class CalledBatches:
    """Batches from the user's function `batch(size)`; its errors are reported as errors of the workload."""

    def __init__(self, batch: Callable[[int], Any], batching: BatchReader = None) -> None:
        self._batch, self._batching = batch, batching
        functools.update_wrapper(self, batch)

    def __call__(self, size: int) -> Any:
        """Return a batch of `size` samples.

        Raises:
            WorkloadError: The function raises anything but an out-of-memory error, or returns another size.
        """
        try:
            return read_batch(self._batch(size), self._batching, size, f"batch({size})", self._batch, hint=_MORE)
        except StopIteration as error:
            raise blame_workload(error, f"batch({size})", hint=f"its iterator has no more; {_SAMPLE}") from error
        except AutoaccumError:
            raise
        except Exception as error:
            if find_out_of_memory(error) is not None:
                raise
            raise blame_workload(error, f"batch({size})") from error


class SampleBatches:
    """Batches of any size from a sample batch: its samples, repeated, in memory of their own."""

    def __init__(self, sample: Any) -> None:
        self._size = batch_size(sample)
        if self._size < 1:
            raise WorkloadError("the sample batch is empty", hint="give one with at least one sample")
        self._sample = sample

    def __call__(self, size: int) -> Any:
        """Return a batch of `size` samples; neither changes to it nor gradients reach the sample batch."""
        if isinstance(self._sample, pytree.CustomBatch):
            return self._cut(self._sample, size)
        times, rest = divmod(size, self._size)
        # Separate views: an object that all parts share would count as one of all samples.
        parts = [split_batch(self._sample, [self._size])[0] for _ in range(times)]
        if rest:
            parts.append(split_batch(self._sample, [rest, self._size - rest])[0])
        return _owned(join_batches(parts), set(_addresses(self._sample)))

    def _cut(self, sample: pytree.CustomBatch, size: int) -> Any:
        """Cut a batch by the workload's own function, which cannot repeat samples."""
        if size > self._size:
            raise WorkloadError(
                f"the sample batch has {self._size} samples, {size} are asked for, and what split(batch, sizes) cuts"
                " cannot be repeated",
                hint="give a function batch(size), a larger sample batch, or, to train, a micro_batch of your own",
            )
        return copy.deepcopy(split_batch(sample, [size, self._size - size])[0])


def make_batches(batch: Any, batching: BatchReader = None) -> Callable[[int], Any]:
    """Return a function of the size that makes batches, from the user's `batch(size)` or sample batch.

    With `batching`, `batch` is a sample batch if `size(batch)` accepts it.

    Raises:
        WorkloadError: `batch` is neither.
    """
    if batching is not None and hasattr(batching, "split") and not inspect.isroutine(batch):
        with suppress(Exception):  # The user's callable object, and no batch.
            return SampleBatches(batching.wrap(batch))
    if isinstance(batch, (DataLoader, Iterator)) or (hasattr(batch, "__next__") and not callable(batch)):
        raise WorkloadError(f"batch is {describe_type(batch)}", hint="give one batch of it: next(iter(loader))")
    if callable(batch) and not isinstance(batch, Tensor) and pytree.children(batch) is None:
        return CalledBatches(batch, batching)
    return SampleBatches(wrap_batch(batch, batching))


def _owned(node: Any, shared: set[int]) -> Any:
    """Copy each tensor or array of `node` that shares memory with the sample batch, or with another one."""
    if pytree.is_leaf(node):
        leaf = node.detach().requires_grad_() if isinstance(node, Tensor) and node.requires_grad else node
        address = _address(leaf)
        if address in shared:
            return leaf.clone().detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf.copy()
        shared.add(address)
        return leaf
    children = pytree.children(node)
    if children is None:
        return node
    owned = [_owned(child, shared) for _, child in children]
    return pytree.rebuild_changed(node, owned)


def _addresses(node: Any) -> Iterator[int]:
    if pytree.is_leaf(node):
        yield _address(node)
    for _, child in pytree.children(node) or ():
        yield from _addresses(child)


def _address(leaf: Tensor | np.ndarray[Any, Any]) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else int(leaf.ctypes.data)


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
    """Storages of a live model and its optimizer on a card, which wait in host memory while trials have the card."""

    storages: Sequence[torch.UntypedStorage]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any = None) -> LiveTensors:
        """Find those of parameters, gradients, buffers and optimizer state; other tensors stay where they are."""
        gradients = [parameter.grad for parameter in model.parameters()]
        tensors: list[Any] = [*model.parameters(), *gradients, *model.buffers()]
        if isinstance(optimizer, Optimizer):
            tensors += [value for state in unwrap_optimizer(optimizer).state.values() for value in state.values()]
        storages = {}
        for tensor in tensors:
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                is_shared = storage.device.type == "cpu" and storage.is_shared()  # One on a card always says so.
                if storage.resizable() and not is_shared:
                    storages[storage.data_ptr()] = storage
        return cls(list(storages.values()))

    @property
    def note(self) -> Message:
        """What a plan says of them."""
        return message("objects_on_host", bytes=sum(storage.nbytes() for storage in self.storages))

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
