"""What tensors do not show: memory that kernels and libraries take beside them (facts 3). One rule, one place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch import attention, estimates, layers, reductions
from autoaccum.devices.simulated.scratch.estimates import Estimate, Rule, tensor_of_bytes
from autoaccum.devices.simulated.trace import Scratch

__all__ = ["RULES", "Estimate", "Rule", "estimate"]

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "reduction": reductions.reduction,
        "reduction_flags": reductions.reduction_flags,
        "flash_gradient": attention.flash_gradient,
        "flash_row_sums": attention.flash_row_sums,
        "flash_grouped": attention.flash_grouped,
        "flash_splits": attention.flash_splits,
        "flash_split_sums": attention.flash_split_sums,
        "efficient_gradient": attention.efficient_gradient,
        "efficient_cast": attention.efficient_cast,
        "efficient_product": attention.efficient_product,
        "efficient_product_sums": attention.efficient_product_sums,
        "efficient_row_sums": attention.efficient_row_sums,
        "efficient_output": attention.efficient_output,
        "cudnn_gradient": attention.cudnn_gradient,
        "product": estimates.product,
        "product_with_bias": estimates.product_with_bias,
        "convolution": layers.convolution,
        "layer_norm_gradient": layers.layer_norm_gradient,
        "layer_norm_staging": layers.layer_norm_staging,
        "layer_norm_flags": layers.layer_norm_flags,
        "batch_norm": layers.batch_norm,
        "cudnn_batch_norm": layers.cudnn_batch_norm,
        "group_norm": layers.group_norm,
        "recurrent": layers.recurrent,
        "recurrent_reserve": layers.recurrent_reserve,
        "embedding_sums": layers.embedding_sums,
        "embedding_indices": layers.embedding_indices,
        "embedding_segments": layers.embedding_segments,
        "embedding_partials": layers.embedding_partials,
        "sorted_pairs": layers.sorted_pairs,
        "index_put": layers.index_put,
        "sort": layers.sort,
        "scan": layers.scan,
        "foreach_norm": reductions.foreach_norm,
        "layout_copy": tensor_of_bytes("operators that call contiguous() or clone() inside, such as Convolution.cpp"),
        "cast_copy": tensor_of_bytes("ATen/native/ReduceOpsUtils.h, make_reduction: the input in the output's dtype"),
        "loss_elements": tensor_of_bytes("ATen/native/Loss.cpp: the losses before they are averaged"),
        "softmax_product": tensor_of_bytes("ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output"),
        "difference": tensor_of_bytes("ATen/native/ReduceOps.cpp, logsumexp: the input less its maximum"),
        "ctc_gradient": tensor_of_bytes("ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta"),
    }
)


def estimate(scratch: Scratch, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The bytes that a kernel takes on `card`.

    Args:
        scratch: The rule and its numbers.
        card: The card.
        torch_version: Major and minor, such as (2, 15).
    """
    return RULES[scratch.rule](scratch.numbers, card, torch_version)
