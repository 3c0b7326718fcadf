"""What accumulation changes in a loss or in buffers, seen at the first step that has several parts."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.coupling import list_names
from autoaccum.workload.batches import batch_size
from autoaccum.workload.pytree import tensors

_NODES = 200
"""As far from the loss as a table is looked for; behind it is the model."""

_LEAST = 5
"""Fewer samples than that are too often as many as something else is."""

_VIEWS = 4
"""Of each sample at the most, in a table of all views by all views."""


def compares_samples(loss: Tensor, model: nn.Module, part: Any) -> bool:
    """Whether `loss` comes of a square of as many rows as `part` has samples, or views of them.

    A square that may have its size of something else, a dimension of a parameter or of the batch, is none. Only shapes
    are read, as autograd knows them.
    """
    samples = batch_size(part)
    if samples < _LEAST:
        return False
    known = {size for parameter in model.parameters() for size in parameter.shape}
    known |= {size for leaf in tensors(part) for size in leaf.shape[1:]}
    squares = {(samples * views,) * 2 for views in range(1, _VIEWS + 1) if samples * views not in known}
    waiting, seen = deque([loss.grad_fn]), set[Any]()
    while waiting and len(seen) < _NODES:
        node: Any = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(tuple(made.shape) in squares for made in getattr(node, "_input_metadata", ())):
            return True
        waiting.extend(after for after, _ in node.next_functions)
    return False


_FACTORS = ("router_aux_loss_coef", "router_z_loss_coef")
"""Attributes of transformers' models, or of their configurations, that what their routers chose is multiplied by."""


def load_balancing_factors(model: nn.Module) -> tuple[str, ...]:
    """Names of the factors that are not zero."""
    return tuple(dict.fromkeys(name for owner in _owners(model) for name in _FACTORS if getattr(owner, name, None)))


def load_balancing_warning(model: nn.Module) -> list[str]:
    """A sentence for where parts make an update, if the loss of `model` balances its experts."""
    told = any(getattr(owner, "output_router_logits", False) for owner in _owners(model)) and load_balancing_factors(
        model
    )
    said = (
        "the loss that balances experts (output_router_logits) is computed from the tokens of a micro-batch, not of the"
        " effective batch, so that the gradient is not quite the full batch's: output_router_logits=False leaves it out"
    )
    return [said] if told else []


def disable_load_balancing(model: nn.Module) -> None:
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


class BufferVersions:
    """How often each floating buffer was written to, but for those of BatchNorm, which is warned of on its own.

    Buffers that forward replaces, such as a table it enlarges, do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {
            f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
            for prefix, module in model.named_modules()
            if not isinstance(module, BATCHNORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def warnings(self) -> list[str]:
        """A sentence that names the buffers that were written to since, where there are any."""
        names = [name for name, (buffer, version) in self._seen.items() if buffer._version != version]
        if not names:
            return []
        return [
            f"forward updates the buffers {list_names(names)}, once per micro-batch instead of once per update: where"
            " outputs depend on them (as in spectral_norm), the gradient is not the full batch's; freeze them with"
            " eval() on these modules"
        ]
