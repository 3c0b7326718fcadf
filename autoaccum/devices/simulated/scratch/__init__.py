"""Memory that tensors do not show: what kernels and libraries take beside them. One rule, one place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch import attention, estimates, layers, reductions
from autoaccum.devices.simulated.scratch.estimates import Estimate, Rule, tensor_of_bytes
from autoaccum.devices.simulated.trace import Scratch

__all__ = ["RULES", "Estimate", "Rule", "estimate"]

_OWN: tuple[Rule, ...] = (
    reductions.reduction,
    reductions.reduction_flags,
    reductions.foreach_norm,
    attention.flash_gradient,
    attention.flash_row_sums,
    attention.flash_grouped,
    attention.flash_splits,
    attention.flash_split_sums,
    attention.efficient_gradient,
    attention.efficient_cast,
    attention.efficient_product,
    attention.efficient_product_sums,
    attention.efficient_row_sums,
    attention.efficient_output,
    attention.cudnn_gradient,
    estimates.product,
    estimates.product_with_bias,
    layers.convolution,
    layers.layer_norm_gradient,
    layers.layer_norm_staging,
    layers.layer_norm_flags,
    layers.batch_norm,
    layers.cudnn_batch_norm,
    layers.group_norm,
    layers.recurrent,
    layers.recurrent_reserve,
    layers.embedding_sums,
    layers.embedding_indices,
    layers.embedding_segments,
    layers.embedding_partials,
    layers.sorted_pairs,
    layers.index_put,
    layers.sort,
    layers.scan,
)
_TENSORS = (
    "layout_copy",  # Of operators that call contiguous() or clone() inside, such as Convolution.cpp.
    "cast_copy",  # ATen/native/ReduceOpsUtils.h, make_reduction: the input in the output's dtype.
    "loss_elements",  # ATen/native/Loss.cpp: the losses before they are averaged.
    "softmax_product",  # ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output.
    "difference",  # ATen/native/ReduceOps.cpp, logsumexp: the input less its maximum.
    "ctc_gradient",  # ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta.
)
RULES: Mapping[str, Rule] = MappingProxyType(
    {**{rule.__name__: rule for rule in _OWN}, **dict.fromkeys(_TENSORS, tensor_of_bytes)}
)


def estimate(scratch: Scratch, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The bytes that a kernel takes on `card`, under a torch such as (2, 15)."""
    return RULES[scratch.rule](scratch.numbers, card, torch_version)
