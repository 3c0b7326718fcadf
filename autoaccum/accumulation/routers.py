"""The balancing loss of a mixture of experts: where it is added, and a model without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

_FACTORS = ("router_aux_loss_coef", "router_z_loss_coef")
"""Attributes of transformers' models, or of their configurations, that what their routers chose is multiplied by."""


def balancing_factors(model: nn.Module) -> tuple[str, ...]:
    """Names of the factors that are not zero."""
    return tuple(dict.fromkeys(name for owner in _owners(model) for name in _FACTORS if getattr(owner, name, None)))


def balancing_warning(model: nn.Module) -> str | None:
    """A sentence for where parts make an update: the loss of `model` balances its experts. None where it does not."""
    if not any(getattr(owner, "output_router_logits", False) for owner in _owners(model)) or not balancing_factors(
        model
    ):
        return None
    return (
        "the loss that balances experts (output_router_logits) is computed from the tokens of a micro-batch, not of the"
        " effective batch, so that the gradient is not quite the full batch's: output_router_logits=False leaves it out"
    )


def leave_out_balancing(model: nn.Module) -> None:
    """Have `model` add none; its configurations are exchanged for copies, since others may hold them too."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if any(getattr(owner, name, None) for owner in _configs(config) for name in _FACTORS):
            module.config = copies.setdefault(id(config), copy.deepcopy(config))
    for owner in _owners(model):
        for name in _FACTORS:
            if getattr(owner, name, None):
                setattr(owner, name, 0.0)


def _owners(model: nn.Module) -> Iterator[Any]:
    """What may hold a factor."""
    for module in model.modules():
        yield module
        yield from _configs(getattr(module, "config", None))


def _configs(config: Any) -> tuple[Any, ...]:
    return tuple(one for one in (config, getattr(config, "text_config", None)) if one is not None)
