"""Variants of a workload: as it is traced on a simulated card, and with one change that would take other memory."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from autoaccum.accumulation.activation_checkpointing import choose_blocks, describe_blocks
from autoaccum.checks import type_name
from autoaccum.devices.explanation import Change
from autoaccum.devices.simulated.simulation_requests import CHECKPOINT
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.simulation.cards import Card
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.values import mark_not_materialised
from autoaccum.sources.optimizers import call_factory
from autoaccum.sources.pytree import tensors
from autoaccum.sources.workload import Workload
from autoaccum.spec import RECOMPUTE

_HALF = (torch.bfloat16, torch.float16)
_NO_LISTS, _PLAIN_SGD = "foreach=False", "SGD"


def simulated_workload(workload: Workload, mode: FakeCudaMode, lazy: Collection[str]) -> Workload:
    """Return the workload as a simulated card runs it.

    Batches must be on the CPU, where loss weights are counted. Each trial run moves another copy of the criterion to
    the card. What is `lazy`, models or batches, is built without values for large tensors; a model whose constructor
    fails without them is built for real, and an instance is copied as usual.
    """
    modules = {name: getattr(workload, name) for name in ("loss", "criterion")}
    changes: dict[str, Any] = {
        name: copy.deepcopy(module) for name, module in modules.items() if isinstance(module, nn.Module)
    }
    changes["batch"] = partial(_build_batch, workload.batch, mode, "batches" in lazy)
    if "models" in lazy and not isinstance(workload.model, nn.Module):
        changes["model"] = partial(_build_model, workload, mode)
    return replace(workload, **changes)


def _build_model(workload: Workload, mode: FakeCudaMode) -> nn.Module:
    with suppress(Exception), mode.building_lazily():  # If it is the user's error, building for real raises it again.
        return workload.build_model()
    return workload.build_model()


def _build_batch(batch: Callable[[int], Any], mode: FakeCudaMode, lazy: bool, size: int) -> Any:
    """Build a batch; integers and booleans have values, since a forward pass may branch on them."""
    with mode.building_lazily() if lazy else nullcontext():
        made = batch(size)
    fake = [leaf for leaf in tensors(made) if isinstance(leaf, FakeTensor)]
    if any(leaf.is_cuda for leaf in fake):
        raise WorkloadError(
            f"batch({size}) is on the card, where a simulation cannot count its loss weight",
            hint="make the batch on the CPU: only one micro-batch at a time is moved to the card",
        )
    if lazy and not all(leaf.is_floating_point() for leaf in fake):
        return _build_batch(batch, mode, False, size)
    for leaf in fake if lazy else ():
        mark_not_materialised(leaf)
    return made


def suggest_changes(workload: Workload, model: nn.Module, optimizer: Optimizer, card: Card) -> list[Change]:
    """Return the changes that would make a difference, each on its own; their effects are not known yet."""
    return [*_precisions(workload, model, card), *_checkpoints(workload, model), *_optimizers(optimizer)]


def apply_change(workload: Workload, change: str) -> Workload:
    """Return the workload with the change of that name."""
    return _CHANGES[change](workload)


def _precisions(workload: Workload, model: nn.Module, card: Card) -> Iterator[Change]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.dtype in _HALF for parameter in trained):
        return
    half = "bf16" if card.capability >= (8, 0) else "fp16"
    if workload.precision == "fp32" or (workload.precision, half) == ("fp16", "bf16"):
        yield Change(name=half, what=f"forward and backward in {half} by autocast (--precision {half})")


def _checkpoints(workload: Workload, model: nn.Module) -> Iterator[Change]:
    with suppress(UsageError):  # It has no blocks, or they cannot run again.
        blocks = describe_blocks(choose_blocks(model, exact_batchnorm=workload.batchnorm == "exact"))
        yield Change(name=CHECKPOINT, what=f"run the {blocks} again in backward (--savers {RECOMPUTE})")


def _optimizers(optimizer: Optimizer) -> Iterator[Change]:
    kind, name = type(optimizer), type_name(optimizer)
    if kind.__module__.startswith("torch.optim.") and _takes_lists(optimizer):
        what = f"{name}(..., foreach=False), which updates one parameter after the other"
        yield Change(name=_NO_LISTS, what=what)
    if kind is not torch.optim.SGD or _any(optimizer, "momentum"):
        own = "SGD with it" if kind is torch.optim.SGD else name
        yield Change(name=_PLAIN_SGD, what=f"SGD without momentum in place of {own} (--optimizer SGD)")


def _takes_lists(optimizer: Optimizer) -> bool:
    """Return whether PyTorch itself chooses lists of parameters on a card (`_default_to_fused_or_foreach`).

    Optimizers that never use lists, such as Adafactor, do not import that function.
    """
    unset = all(group.get("foreach", False) is None for group in optimizer.param_groups)
    kinds = type(optimizer).__mro__
    own = kinds[: kinds.index(Optimizer)]
    chooses = any(hasattr(sys.modules.get(kind.__module__), "_default_to_fused_or_foreach") for kind in own)
    return unset and chooses and not any(_any(optimizer, option) for option in ("fused", "differentiable"))


def _any(optimizer: Optimizer, option: str) -> bool:
    return any(group.get(option) for group in optimizer.param_groups)


def _without_lists(own: Any, params: list[nn.Parameter]) -> Optimizer:
    """Make the optimizer of `own` once more with `foreach=False`; its groups keep their other options."""
    made = call_factory(own, params)
    kind = cast("Callable[..., Optimizer]", type(made))
    known = inspect.signature(kind).parameters
    groups = [{name: value for name, value in group.items() if name != "foreach"} for group in made.param_groups]
    defaults = {name: value for name, value in made.defaults.items() if name in known}
    del made  # It may hold memory on the card, as Adagrad does from the start.
    return kind(groups, **{**defaults, "foreach": False})


_CHANGES: Final[Mapping[str, Callable[[Workload], Workload]]] = {
    "bf16": lambda workload: replace(workload, precision="bf16"),
    "fp16": lambda workload: replace(workload, precision="fp16"),
    CHECKPOINT: lambda workload: replace(workload, savers=(*workload.savers, RECOMPUTE)),
    _NO_LISTS: lambda workload: replace(workload, optimizer=partial(_without_lists, workload.optimizer)),
    _PLAIN_SGD: lambda workload: replace(workload, optimizer=_PLAIN_SGD),
}
