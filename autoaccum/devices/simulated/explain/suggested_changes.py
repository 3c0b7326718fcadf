"""Changes by which a workload takes another amount of memory, and the workload so changed."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.activation_checkpointing import (
    batchnorms_updated_twice,
    checkpoint_blocks,
    describe_blocks,
    find_blocks,
    list_modules,
)
from autoaccum.checks import type_name
from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.tracing.trace_cache import CHECKPOINT, SuggestedChange
from autoaccum.errors import UsageError
from autoaccum.workload.optimizers import call_factory
from autoaccum.workload.spec import Workload

_HALF = (torch.bfloat16, torch.float16)
_SINGLE, _FUSED, _PLAIN = "foreach=False", "fused=True", "SGD"
_Change = Callable[[Workload], Workload]


def suggest_changes(workload: Workload, model: nn.Module, optimizer: Optimizer, card: Card) -> list[SuggestedChange]:
    """The changes that make a difference, each by its own."""
    return [
        *_precisions(workload, model, card),
        *_checkpoints(workload, model),
        *_optimizers(optimizer),
    ]


def apply_change(workload: Workload, change: str) -> Workload:
    """Make one change, by the name of its offer."""
    if change not in _CHANGES:
        raise UsageError(f"no change is named {change!r}", hint=f"take one of {', '.join(_CHANGES)}")
    return _CHANGES[change](workload)


def _precisions(workload: Workload, model: nn.Module, card: Card) -> Iterator[SuggestedChange]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.dtype in _HALF for parameter in trained):
        return
    half = "bf16" if card.capability >= (8, 0) else "fp16"
    if workload.precision == "fp32" or (workload.precision, half) == ("fp16", "bf16"):
        yield SuggestedChange(half, f"forward and backward in {half} by autocast (--precision {half})")


def _checkpoints(workload: Workload, model: nn.Module) -> Iterator[SuggestedChange]:
    names = _trained_blocks(model)
    if names:
        norms = batchnorms_updated_twice(model, names) if workload.batchnorm == "micro" else []
        twice = f"; their BatchNorms {list_modules(norms)} then update running statistics twice" if norms else ""
        yield SuggestedChange(
            CHECKPOINT, f"run the {describe_blocks(names)} again in backward (torch.utils.checkpoint){twice}"
        )


def _trained_blocks(model: nn.Module) -> list[str]:
    """The blocks of `model` that have parameters to train: what a checkpoint is offered for, and what it is made of."""

    def is_trained(name: str) -> bool:
        return any(parameter.requires_grad for parameter in model.get_submodule(name).parameters())

    return [name for name in find_blocks(model) if is_trained(name)]


def _optimizers(optimizer: Optimizer) -> Iterator[SuggestedChange]:
    kind, name = type(optimizer), type_name(optimizer)
    if kind.__module__.startswith("torch.optim."):
        # Both leave the temporaries of lists away: one of them is asked for, as each takes a rehearsal.
        if _takes_lists(optimizer):
            yield SuggestedChange(_SINGLE, f"{name}(..., foreach=False), which updates one parameter after the other")
        elif "fused" in inspect.signature(kind).parameters and not _any(optimizer, "fused"):
            yield SuggestedChange(_FUSED, f"{name}(..., fused=True), which updates in one kernel")
    if kind is not torch.optim.SGD or _any(optimizer, "momentum"):
        own = "SGD with it" if kind is torch.optim.SGD else name
        yield SuggestedChange(_PLAIN, f"SGD without momentum in place of {own} (--optimizer SGD)")


def _takes_lists(optimizer: Optimizer) -> bool:
    """Return whether nobody chose, and PyTorch takes lists of parameters on a card (`_default_to_fused_or_foreach`).

    Those of its optimizers that do not, such as Adafactor, do not ask that function.
    """
    unset = all(group.get("foreach", False) is None for group in optimizer.param_groups)
    kinds = type(optimizer).__mro__
    own = kinds[: kinds.index(Optimizer)]
    asks = any(hasattr(sys.modules[kind.__module__], "_default_to_fused_or_foreach") for kind in own)
    return unset and asks and not any(_any(optimizer, option) for option in ("fused", "differentiable"))


def _any(optimizer: Optimizer, option: str) -> bool:
    return any(group.get(option) for group in optimizer.param_groups)


def _with(workload: Workload, **fields: Any) -> Workload:
    return dataclasses.replace(workload, **fields)


def _checkpointed(workload: Workload) -> Workload:
    def build() -> nn.Module:
        model = workload.build_model()
        checkpoint_blocks(model, _trained_blocks(model))
        return model

    return _with(workload, model=build)


def _updated_with(options: Mapping[str, Any], workload: Workload) -> Workload:
    return _with(workload, optimizer=partial(_with_options, workload.optimizer, options))


def _with_options(own: Any, options: Mapping[str, Any], params: list[nn.Parameter]) -> Optimizer:
    """Return what `own` makes of `params`, made once more with other options; its groups keep theirs beside these."""
    made = call_factory(own, params)
    kind = cast("Callable[..., Optimizer]", type(made))
    known = inspect.signature(kind).parameters
    groups = [{name: value for name, value in group.items() if name not in options} for group in made.param_groups]
    defaults = {name: value for name, value in made.defaults.items() if name in known}
    del made  # What it holds on the card, as Adagrad does from the start.
    return kind(groups, **{**defaults, **options})


_CHANGES: Final[Mapping[str, _Change]] = {
    "bf16": partial(_with, precision="bf16"),
    "fp16": partial(_with, precision="fp16"),
    CHECKPOINT: _checkpointed,
    _SINGLE: partial(_updated_with, {"foreach": False}),
    _FUSED: partial(_updated_with, {"fused": True, "foreach": None}),
    _PLAIN: partial(_with, optimizer=_PLAIN),
}
