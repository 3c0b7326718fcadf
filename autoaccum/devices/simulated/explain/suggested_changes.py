"""Changes of a workload that would change its memory: which ones to suggest, and the workload with one applied."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.activation_checkpointing import Recompute, describe_blocks
from autoaccum.checks import type_name
from autoaccum.devices.simulated.simulation_requests import CHECKPOINT, SuggestedChange
from autoaccum.errors import UsageError
from autoaccum.options import RECOMPUTE
from autoaccum.simulation.cards import Card
from autoaccum.sources.optimizers import call_factory
from autoaccum.sources.spec import Workload

_HALF = (torch.bfloat16, torch.float16)
_NO_LISTS, _FUSED, _PLAIN_SGD = "foreach=False", "fused=True", "SGD"
_Change = Callable[[Workload], Workload]


def suggest_changes(workload: Workload, model: nn.Module, optimizer: Optimizer, card: Card) -> list[SuggestedChange]:
    """Return the changes that would make a difference, each on its own."""
    return [*_precisions(workload, model, card), *_checkpoints(workload, model), *_optimizers(optimizer)]


def apply_change(workload: Workload, change: str) -> Workload:
    """Return the workload with the change of that name; raise UsageError if there is none of that name."""
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
    with suppress(UsageError):  # It has no blocks, or they cannot run again.
        names = Recompute(model, exact_batchnorm=workload.batchnorm == "exact").names
        yield SuggestedChange(CHECKPOINT, f"run the {describe_blocks(names)} again in backward (--savers {RECOMPUTE})")


def _optimizers(optimizer: Optimizer) -> Iterator[SuggestedChange]:
    kind, name = type(optimizer), type_name(optimizer)
    if kind.__module__.startswith("torch.optim."):
        # Both avoid the temporaries of lists: one of them is suggested, because each takes a trial run.
        if _takes_lists(optimizer):
            yield SuggestedChange(_NO_LISTS, f"{name}(..., foreach=False), which updates one parameter after the other")
        elif "fused" in inspect.signature(kind).parameters and not _any(optimizer, "fused"):
            yield SuggestedChange(_FUSED, f"{name}(..., fused=True), which updates in one kernel")
    if kind is not torch.optim.SGD or _any(optimizer, "momentum"):
        own = "SGD with it" if kind is torch.optim.SGD else name
        yield SuggestedChange(_PLAIN_SGD, f"SGD without momentum in place of {own} (--optimizer SGD)")


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


def _updated_with(options: Mapping[str, Any], workload: Workload) -> Workload:
    return replace(workload, optimizer=partial(_with_options, workload.optimizer, options))


def _with_options(own: Any, options: Mapping[str, Any], params: list[nn.Parameter]) -> Optimizer:
    """Make the optimizer of `own` once more with other options; its groups keep their other options."""
    made = call_factory(own, params)
    kind = cast("Callable[..., Optimizer]", type(made))
    known = inspect.signature(kind).parameters
    groups = [{name: value for name, value in group.items() if name not in options} for group in made.param_groups]
    defaults = {name: value for name, value in made.defaults.items() if name in known}
    del made  # It may hold memory on the card, as Adagrad does from the start.
    return kind(groups, **{**defaults, **options})


_CHANGES: Final[Mapping[str, _Change]] = {
    "bf16": lambda workload: replace(workload, precision="bf16"),
    "fp16": lambda workload: replace(workload, precision="fp16"),
    CHECKPOINT: lambda workload: replace(workload, savers=(*workload.savers, RECOMPUTE)),
    _NO_LISTS: partial(_updated_with, {"foreach": False}),
    _FUSED: partial(_updated_with, {"fused": True, "foreach": None}),
    _PLAIN_SGD: lambda workload: replace(workload, optimizer=_PLAIN_SGD),
}
