"""What a simulation takes from PyTorch's release: a row for each rule that came with one, and cuDNN's versions.

What the installed torch answers itself, such as the order of its attention kernels or an operator's decomposition, has
no row. A release newer than all rows follows all rules. The rows up to 2.14 were checked by running each release's own
code on a card without kernels (tests/shared/real_allocator): `_fused_sdp_choice`, and the requests to the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Release: TypeAlias = tuple[int, int]
"""A release of PyTorch, such as (2, 15)."""

_CUBLAS = "ATen/cuda/CublasHandlePool.cpp"
_ATTENTION = "ATen/native/transformers/cuda/sdp_utils.cpp"
_ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp"
_GROUP_NORM = "ATen/native/cuda/group_norm_kernel.cu"


class Rule(NamedTuple):
    """A rule: the release since which it holds, what it changed, and its sources in PyTorch."""

    since: Release
    change: str
    source: str


RULES: Mapping[str, Rule] = {
    "shared_cublaslt_workspace": Rule(
        (2, 12),
        "cuBLASLt uses the workspace of cuBLAS, not 1 MiB of its own",
        f"{_CUBLAS}, `unified_cublas_and_lt_workspaces`, pytorch/pytorch#175879",
    ),
    "large_blackwell_workspace": Rule(
        (2, 12),
        "cuBLAS takes 32 MiB on sm10x and sm12x, as on sm90",
        f"{_CUBLAS}, `parseChosenWorkspaceSize`, pytorch/pytorch#175344",
    ),
    "large_thor_workspace": Rule(
        (2, 14),
        "cuBLAS takes 32 MiB on sm11x, too",
        f"{_CUBLAS}, `parseChosenWorkspaceSize`, pytorch/pytorch#189312",
    ),
    "workspace_of_each_product": Rule(
        (2, 15),
        "the workspace of a product is allocated for it and freed, not kept for the thread",
        f"{_CUBLAS}, pytorch/pytorch#194311",
    ),
    "cudnn_dropout_in_sixteenths": Rule(
        (2, 12),
        "cuDNN's attention takes no other probability of dropout",
        f"{_ATTENTION}, `check_cudnn_dropout`, pytorch/pytorch#174245",
    ),
    "cudnn_first_on_sm10x": Rule(
        (2, 13),
        "cuDNN's attention comes first on all of sm10x, not on sm100 and sm103 alone",
        f"{_ATTENTION}, `check_prefer_cudnn_attention`, which had two of them since pytorch/pytorch#170800",
    ),
    "cudnn_at_most_65535": Rule(
        (2, 13),
        "cuDNN's attention takes no larger batch, and no more heads",
        f"{_ATTENTION}, `check_cudnn_tensor_shapes`, pytorch/pytorch#180718",
    ),
    "cudnn_heads_of_256": Rule(
        (2, 14),
        "cuDNN's attention trains with heads of 256 on sm10x, and no more with heads between 128 and 256 on sm90",
        f"{_ATTENTION}, `check_cudnn_d256_bprop_head_dim`, pytorch/pytorch#185554 and #190949",
    ),
    "cudnn_without_single_queries": Rule(
        (2, 14),
        "cuDNN's attention takes no single query on sm10x and sm11x with cuDNN 9.19 to 9.25.0, except 9.24.1",
        f"{_ATTENTION}, `is_cudnn_attention_decode_disabled`, pytorch/pytorch#194927",
    ),
    "aligned_efficient_attention": Rule(
        (2, 13),
        "memory-efficient attention refuses inputs that start at an odd place of their storage",
        f"{_ATTENTION}, `check_data_ptr_alignment_mem_efficient`, pytorch/pytorch#184258",
    ),
    "efficient_grouped_queries": Rule(
        (2, 14),
        "memory-efficient attention takes grouped queries, and one head of keys needs no `enable_gqa`",
        "ATen/native/transformers/sdp_utils_cpp.h, pytorch/pytorch#191085",
    ),
    "fused_unbatched_attention": Rule(
        (2, 14),
        "three dimensions are a batch of one",
        "ATen/native/transformers/sdp_utils_cpp.h, `normalize_unbatched_input`, pytorch/pytorch#192271",
    ),
    "older_segments_first": Rule(
        (2, 13),
        "of free blocks of equal size, one in the oldest segment is taken, not the one at the lowest address",
        f"{_ALLOCATOR}, `BlockComparatorSizeCounterAddress`, pytorch/pytorch#183591",
    ),
    "group_norm_moments": Rule(
        (2, 13),
        "a group norm of half precision has the moments of its groups in fp32, too",
        f"{_GROUP_NORM}, `GroupNormKernelImplInternal`, pytorch/pytorch#183946",
    ),
    "group_norm_channels_last": Rule(
        (2, 15),
        "a group norm reads channels-last inputs as they are, which it copied before",
        f"{_GROUP_NORM}, `RowwiseMomentsChannelsLastCUDAKernel`, pytorch/pytorch#191945",
    ),
}
"""By the name that code asks for."""

CUDNN: Mapping[Release, int] = {(2, 11): 91_900, (2, 12): 92_000, (2, 14): 92_400, (2, 15): 92_600}
"""cuDNN of each release's default wheel (its Requires-Dist); 2.13 has that of 2.12."""


def holds(rule: str, release: Release) -> bool:
    """Return whether a rule holds in a release of PyTorch.

    >>> holds("shared_cublaslt_workspace", (2, 11)), holds("shared_cublaslt_workspace", (2, 12))
    (False, True)
    """
    return release >= RULES[rule].since
