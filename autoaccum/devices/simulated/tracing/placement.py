"""Models, batches and checkpoints for the simulated card: built without memory of the host, and put there."""

from __future__ import annotations

import copy
import dataclasses
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autoaccum.devices.simulated.patches import patched
from autoaccum.devices.simulated.tracing.dispatch_mode import FakeCudaMode
from autoaccum.devices.simulated.tracing.fake_cuda import DEVICE, check_index
from autoaccum.devices.simulated.tracing.known_values import mark_not_materialised
from autoaccum.devices.simulated.unsupported import UnsupportedError
from autoaccum.errors import WorkloadError
from autoaccum.workload.pytree import tensors
from autoaccum.workload.spec import Workload

_SHAPED = "have model() run one sample through before it returns"
_REPLACED_BY = "_autoaccum_replaced_by"


def convert_module(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` in its order, where a parameter that `fn` turns into a fake one is exchanged for a new one.

    One parameter under several names stays one. Attributes and hooks of a parameter go along.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _convert(parameter, fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _exchanged(buffer, fn)
    return module


def _convert(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Any:
    if is_lazy(parameter):
        raise UnsupportedError("a parameter without a shape yet is put on the card (a lazy module's)", hint=_SHAPED)
    with torch.no_grad():
        known = _replacement(parameter)
        if known is not None:
            return known
        applied = fn(parameter)
        if applied is parameter:
            return parameter
        if not isinstance(applied, FakeTensor) and not isinstance(parameter, FakeTensor):
            parameter.data = applied
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
            return parameter
        made = nn.Parameter(applied, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            made.grad = fn(parameter.grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks):
            setattr(made, hooks, getattr(parameter, hooks))
    for name, value in vars(parameter).items():
        if name not in vars(made) and name != _REPLACED_BY:
            setattr(made, name, value)
    setattr(parameter, _REPLACED_BY, weakref.ref(made))
    return made


def _exchanged(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Any:
    known = _replacement(buffer)
    if known is not None:
        return known
    with torch.no_grad():
        applied = fn(buffer)
    if applied is not buffer:
        setattr(buffer, _REPLACED_BY, weakref.ref(applied))
    return applied


def _replacement(tensor: Tensor) -> Any:
    reference = vars(tensor).get(_REPLACED_BY)
    return None if reference is None else reference()


T = TypeVar("T")


def with_host_batches(workload: Workload) -> Workload:
    """`workload`, whose batches are checked to be where their weights can be counted: on the CPU."""
    return dataclasses.replace(workload, batch=partial(_batch_on_host, workload.batch))


def with_copied_criterion(workload: Workload) -> Workload:
    """`workload`, whose criterion is a copy: what one rehearsal puts on the card is not there in the next."""
    given = {name: getattr(workload, name) for name in ("loss", "criterion")}
    copies: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in given.items() if isinstance(value, nn.Module)
    }
    return dataclasses.replace(workload, **copies) if copies else workload


def _batch_on_host(batch: Callable[[int], Any], size: int) -> Any:
    made = batch(size)
    if any(isinstance(leaf, FakeTensor) and leaf.is_cuda for leaf in tensors(made)):
        raise WorkloadError(
            f"batch({size}) is on the card, where a simulation cannot count its weight",
            hint="make it on the CPU: one part at a time is moved, so that the card holds no more than that",
        )
    return made


def with_lazy_building(workload: Workload, mode: FakeCudaMode, *, batches: bool) -> Workload:
    """`workload`, whose models, and batches where that is asked for, are built without values for large tensors.

    A constructor that fails for want of them builds for real. An instance is there already, and copied as always.
    """
    lazy = dataclasses.replace(workload, batch=partial(_build_batch, workload.batch, mode)) if batches else workload
    if isinstance(workload.model, nn.Module):
        return lazy
    return dataclasses.replace(lazy, model=partial(_build, workload, mode))


def _build(workload: Workload, mode: FakeCudaMode) -> nn.Module:
    with suppress(Exception):  # Whatever it is: built for real, it either works, or fails by the user's own fault.
        return _lazily(mode, workload.build_model)
    return workload.build_model()


def _build_batch(batch: Callable[[int], Any], mode: FakeCudaMode, size: int) -> Any:
    """A batch whose whole numbers and truths have values, since a forward pass may go by them."""
    made = _lazily(mode, batch, size)
    bare = [leaf for leaf in tensors(made) if isinstance(leaf, FakeTensor)]
    if not all(leaf.is_floating_point() for leaf in bare):
        return batch(size)
    for leaf in bare:
        mark_not_materialised(leaf)
    return made


def _lazily(mode: FakeCudaMode, build: Callable[..., T], *args: Any) -> T:
    mode.lazy = True
    try:
        return build(*args)
    finally:
        mode.lazy = False


_ZIP = b"PK\x03\x04"


def patch_torch_load(stack: ExitStack) -> None:
    """Exchange `torch.load` until `stack` is closed."""
    load = partial(_load, torch.load)
    for owner in (torch, torch.serialization):
        stack.enter_context(patched(owner, "load", load))


def _load(native: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
    """Read a file to the host, and put it on the card if `map_location` names that."""
    place = map_location.decode() if isinstance(map_location, bytes) else str(map_location)
    if options.get("mmap") is None and _can_be_mapped(f):
        options["mmap"] = True  # What is never read takes no memory.
    with _disable_current_modes():
        loaded = native(f, "cpu", *args, **options)
    if not place.startswith("cuda"):
        return loaded
    check_index(place)
    moved: dict[Any, Tensor] = {}
    return tree_map(partial(_moved, moved), loaded)


def _moved(known: dict[Any, Tensor], value: Any) -> Any:
    """A tensor or a module on the card; what shares its place shares it there."""
    if isinstance(value, nn.Module):
        return value._apply(partial(_moved, known))  # type: ignore[no-untyped-call]
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    key = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
    if key not in known:
        made = value.detach().to(DEVICE)
        known[key] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
    return known[key]


def _can_be_mapped(f: Any) -> bool:
    if not isinstance(f, str | os.PathLike) or not Path(f).is_file():
        return False
    with Path(f).open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP
