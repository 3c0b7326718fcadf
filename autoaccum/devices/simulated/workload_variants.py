"""Variants of a workload: as it is traced on a simulated card, and with one change that would take other memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

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


def _build_batch(batch: Callable[..., Any], mode: FakeCudaMode, lazy: bool, size: int, *length: int) -> Any:
    """Build a batch; integers and booleans have values, since a forward pass may branch on them."""
    with mode.building_lazily() if lazy else nullcontext():
        made = batch(size, *length)
    fake = [leaf for leaf in tensors(made) if isinstance(leaf, FakeTensor)]
    if any(leaf.is_cuda for leaf in fake):
        raise WorkloadError(
            f"batch({size}) is on the card, where a simulation cannot count its loss weight",
            hint="make the batch on the CPU: only one micro-batch at a time is moved to the card",
        )
    if lazy and not all(leaf.is_floating_point() for leaf in fake):
        return _build_batch(batch, mode, False, size, *length)
    for leaf in fake if lazy else ():
        mark_not_materialised(leaf)
    return made


def suggest_changes(workload: Workload, model: nn.Module, optimizer: Optimizer, card: Card) -> list[Change]:
    """Return the changes that would make a difference, each on its own; their effects are not known yet."""
    changes = []
    half = "bf16" if card.capability >= (8, 0) else "fp16"
    trains_in_full = any(parameter.requires_grad and parameter.dtype not in _HALF for parameter in model.parameters())
    if trains_in_full and (workload.precision == "fp32" or (workload.precision, half) == ("fp16", "bf16")):
        changes.append(Change(name=half, what=f"forward and backward in {half} by autocast (--precision {half})"))
    with suppress(UsageError):  # It has no blocks, or they cannot run again.
        blocks = describe_blocks(choose_blocks(model, exact_batchnorm=workload.batchnorm == "exact"))
        changes.append(Change(name=CHECKPOINT, what=f"run the {blocks} again in backward (--savers {RECOMPUTE})"))
    name = type_name(optimizer)
    if _takes_lists(optimizer):
        what = f"{name}(..., foreach=False), which updates one parameter after the other"
        changes.append(Change(name=_NO_LISTS, what=what))
    is_sgd = type(optimizer) is torch.optim.SGD
    if not is_sgd or _any(optimizer, "momentum"):
        what = f"SGD without momentum in place of {'SGD with it' if is_sgd else name} (--optimizer SGD)"
        changes.append(Change(name=_PLAIN_SGD, what=what))
    return changes


def apply_change(workload: Workload, change: str) -> Workload:
    """Return the workload with the change of that name."""
    fields: dict[str, dict[str, Any]] = {
        CHECKPOINT: {"savers": (*workload.savers, RECOMPUTE)},
        _NO_LISTS: {"optimizer": partial(_without_lists, workload.optimizer)},
        _PLAIN_SGD: {"optimizer": _PLAIN_SGD},
    }
    return replace(workload, **fields.get(change, {"precision": change}))


def _takes_lists(optimizer: Optimizer) -> bool:
    """Return whether PyTorch itself chooses lists of parameters on a card (`_default_to_fused_or_foreach`).

    Optimizers that never use lists, such as Adafactor, do not import that function.
    """
    kinds = type(optimizer).__mro__
    modules = [kind.__module__ for kind in kinds[: kinds.index(Optimizer)]]
    return (
        modules[0].startswith("torch.optim.")
        and any(hasattr(sys.modules.get(module), "_default_to_fused_or_foreach") for module in modules)
        and all(group.get("foreach", False) is None for group in optimizer.param_groups)
        and not any(_any(optimizer, option) for option in ("fused", "differentiable"))
    )


def _any(optimizer: Optimizer, option: str) -> bool:
    return any(group.get(option) for group in optimizer.param_groups)


def _without_lists(factory: Any, params: list[nn.Parameter]) -> Optimizer:
    """Make an optimizer that updates one parameter after the other."""
    optimizer = call_factory(factory, params)
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["foreach"] = False
    return optimizer
