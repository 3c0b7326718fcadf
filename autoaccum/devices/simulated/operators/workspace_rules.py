"""All workspace rules by name: the memory that kernels and libraries take in addition to their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators import (
    attention_workspace,
    cudnn_workspace,
    indexing,
    matmul,
    normalization_workspace,
    reductions,
)
from autoaccum.devices.simulated.operators.workspaces import Estimate, Rule, product_rule
from autoaccum.devices.simulated.trace_records import Workspace

RULES: Mapping[str, Rule] = {
    "layout_copy": product_rule(),  # Operators that call contiguous() or clone() inside, such as Convolution.cpp.
    "loss_elements": product_rule(),  # ATen/native/Loss.cpp: the losses before they are averaged.
    "softmax_product": product_rule(),  # ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output.
    "ctc_gradient": product_rule(),  # ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta.
    **attention_workspace.RULES,
    **matmul.RULES,
    **cudnn_workspace.RULES,
    **normalization_workspace.RULES,
    **reductions.RULES,
    **indexing.RULES,
}


def estimate(workspace: Workspace, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the size of `workspace` on `card`, under a PyTorch release such as (2, 15)."""
    return RULES[workspace.rule](workspace.numbers, card, torch_version)
