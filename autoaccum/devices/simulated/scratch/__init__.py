"""Memory that tensors do not show: what kernels and libraries take beside them. One rule, one place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.scratch import attention, estimates, layers, reductions
from autoaccum.devices.simulated.scratch.estimates import Estimate, Numbers, Rule
from autoaccum.devices.simulated.trace import Workspace

__all__ = ["RULES", "Estimate", "Rule", "estimate"]

_PRODUCTS = {
    "layout_copy": 1,  # Of operators that call contiguous() or clone() inside, such as Convolution.cpp.
    "cast_copy": 1,  # ATen/native/ReduceOpsUtils.h, make_reduction: the input in the output's dtype.
    "loss_elements": 1,  # ATen/native/Loss.cpp: the losses before they are averaged.
    "softmax_product": 1,  # ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output.
    "difference": 1,  # ATen/native/ReduceOps.cpp, logsumexp: the input less its maximum.
    "ctc_gradient": 1,  # ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta.
    "group_norm": 1,  # A number for each sample and channel, or group: how many, bytes of one.
    "flash_grouped": 1,  # For every query head: batch, heads, keys, head size, bytes of an element.
    "efficient_row_sums": 4,  # The rows' sums (`delta`): batch, heads, queries.
    "index_put": 8,  # Indices: linear, sorted, original ones, or their range.
}
"""Rules by which it is the product of the numbers, so many times."""


def _product(factor: int, numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    return Estimate(bytes=factor * prod(numbers))


def _is_rule(name: str, value: Any) -> bool:
    return not name.startswith("_") and getattr(value, "__annotations__", {}).get("return") == "Estimate"


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{name: partial(_product, factor) for name, factor in _PRODUCTS.items()},
        **{
            name: value
            for module in (reductions, attention, estimates, layers)
            for name, value in vars(module).items()
            if _is_rule(name, value)
        },
    }
)


def estimate(workspace: Workspace, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The bytes that a kernel takes on `card`, under a torch such as (2, 15)."""
    return RULES[workspace.rule](workspace.numbers, card, torch_version)
