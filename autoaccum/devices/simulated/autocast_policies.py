"""What CUDA's autocast does to which operator: lists, no torch.

Sources: aten/src/ATen/autocast_mode.h (the lists `AT_FORALL_*`, the same from 2.11 to 2.15 but for `rms_norm`, which is
new in 2.12 or 2.13, and overloads that name dimensions, which went then) and autocast_mode.cpp (what CUDA adds:
`cudnn_convolution*`, `binary_cross_entropy`; in 2.15 `linalg_matrix_sqrth`, *run* on that binary's own kernel).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Policy = Literal["lower", "fp32", "set_dtype", "append_dtype", "promote", "banned"]

_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm
mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa linalg_matrix_sqrth
"""
_SET_DTYPE = """
prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
sum.dim_IntList sum.dim_DimnameList
"""
_APPEND_DTYPE = "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
_PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_BANNED = "binary_cross_entropy"

_LISTS: tuple[tuple[Policy, str], ...] = (
    ("lower", _LOWER),
    ("fp32", _FP32),
    ("set_dtype", _SET_DTYPE),
    ("append_dtype", _APPEND_DTYPE),
    ("promote", _PROMOTE),
    ("banned", _BANNED),
)

POLICIES: Mapping[str, Policy] = MappingProxyType({name: policy for policy, names in _LISTS for name in names.split()})
"""By operator and overload, as the dispatcher names them without `aten::`.

- `lower`: arguments are cast to the autocast dtype; `fp32`: to fp32; `promote`: to the widest among them.
- `set_dtype`: the optional argument `dtype` is fp32 where none is given, nothing is cast.
- `append_dtype`: the overload that takes a dtype is called instead, with fp32.
- `banned`: refused.
"""

DTYPE_OVERLOADS: Mapping[str, str] = MappingProxyType(
    {
        "norm.Scalar": "norm.ScalarOpt_dtype",
        "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
        "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
    }
)
"""The overload with a dtype of each operator under `append_dtype`."""

RNN = "_cudnn_rnn"
"""Has a kernel of its own (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

UNKNOWN: Policy = "fp32"
"""For what a later PyTorch casts and no list names: a size that is too large rather than too small is promised."""


def policy_of(name: str) -> Policy:
    """What is done to an operator that has a kernel for autocast, `UNKNOWN` where no list names it.

    >>> policy_of("linear"), policy_of("softmax.int"), policy_of("of_tomorrow")
    ('lower', 'set_dtype', 'fp32')
    """
    return POLICIES.get(name, UNKNOWN)
