"""Models and batches for the simulated card, which take no memory on the host where that is possible."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.known import mark_unbuilt
from autoaccum.errors import WorkloadError
from autoaccum.workload.nests import tensors, without_values
from autoaccum.workload.spec import Workload

T = TypeVar("T")


def on_the_host(workload: Workload) -> Workload:
    """`workload`, whose batches are checked to be where their weights can be counted: on the CPU."""
    return dataclasses.replace(workload, batch=partial(_batch_on_host, workload.batch))


def with_own_criterion(workload: Workload) -> Workload:
    """`workload`, whose criterion is a copy: what one rehearsal puts on the card is not there in the next."""
    given = {name: getattr(workload, name) for name in ("loss", "criterion")}
    copies: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in given.items() if isinstance(value, nn.Module)
    }
    return dataclasses.replace(workload, **copies) if copies else workload


def _batch_on_host(batch: Callable[[int], Any], size: int) -> Any:
    with _NoMeta():
        made = batch(size)
    if any(isinstance(leaf, FakeTensor) and leaf.is_cuda for leaf in tensors(made)):
        raise WorkloadError(
            f"batch({size}) is on the card, where a simulation cannot count its weight",
            hint="make it on the CPU: one part at a time is moved, so that the card holds no more than that",
        )
    return made


class _NoMeta(TorchFunctionMode):
    """Refuses tensors that are made on the meta device, which here is what C++ takes the card for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = [kwargs.get("device"), *(args[1:] if func is Tensor.to else ())]
        if any(isinstance(device, (str, torch.device)) and str(device) == "meta" for device in asked):
            raise without_values()
        return func(*args, **kwargs)


def built_lazily(workload: Workload, mode: CardMode, *, batches: bool) -> Workload:
    """`workload`, whose models, and batches where that is asked for, are built without values for large tensors.

    A constructor that fails for want of them builds for real. An instance is there already, and copied as always.
    """
    lazy = dataclasses.replace(workload, batch=partial(_build_batch, workload.batch, mode)) if batches else workload
    if isinstance(workload.model, nn.Module):
        return lazy
    return dataclasses.replace(lazy, model=partial(_build, workload, mode))


def _build(workload: Workload, mode: CardMode) -> nn.Module:
    with suppress(Exception):  # Whatever it is: built for real, it either works, or fails by the user's own fault.
        return _lazily(mode, workload.build_model)
    return workload.build_model()


def _build_batch(batch: Callable[[int], Any], mode: CardMode, size: int) -> Any:
    """A batch whose whole numbers and truths have values, since a forward pass may go by them."""
    made = _lazily(mode, batch, size)
    bare = [leaf for leaf in tensors(made) if isinstance(leaf, FakeTensor)]
    if not all(leaf.is_floating_point() for leaf in bare):
        return batch(size)
    for leaf in bare:
        mark_unbuilt(leaf)
    return made


def _lazily(mode: CardMode, build: Callable[..., T], *args: Any) -> T:
    mode.lazy = True
    try:
        return build(*args)
    finally:
        mode.lazy = False
