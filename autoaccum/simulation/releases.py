"""What a simulation takes from PyTorch's release: a row for each rule that came with one, and cuDNN's versions.

What the installed torch answers itself, such as the order of its attention kernels or an operator's decomposition, has
no row. A release newer than all rows follows all rules. The rows up to 2.14 were checked by running each release's own
code on a card without kernels (tests/shared/real_allocator): `_fused_sdp_choice`, and the requests to the allocator.
What 2.14.1 predicted by the rules of 2.15 is what 2.15.0 predicts, but for plans of its newer cuDNN. From 2.9 to 2.11
no rule changed, but cuDNN did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Release: TypeAlias = tuple[int, int]
"""A release of PyTorch, such as (2, 15)."""

RULES: Mapping[str, Release] = {
    # ATen/cuda/CublasHandlePool.cpp. cuBLASLt uses the workspace of cuBLAS, not 1 MiB of its own
    # (`unified_cublas_and_lt_workspaces`, #175879).
    "shared_cublaslt_workspace": (2, 12),
    # cuBLAS takes 32 MiB on sm10x and sm12x, as on sm90 (`parseChosenWorkspaceSize`, #175344), and on sm11x (#189312).
    "large_blackwell_workspace": (2, 12),
    "large_thor_workspace": (2, 14),
    # The workspace of a product is allocated for it and freed, not kept for the thread (#194311).
    "workspace_of_each_product": (2, 15),
    # ATen/native/transformers/cuda/sdp_utils.cpp. cuDNN's attention takes no other probability of dropout
    # (`check_cudnn_dropout`, #174245).
    "cudnn_dropout_in_sixteenths": (2, 12),
    # It comes first on all of sm10x (`check_prefer_cudnn_attention`), not on sm100 and sm103 alone (#170800).
    "cudnn_first_on_sm10x": (2, 13),
    # It takes no larger batch, and no more heads (`check_cudnn_tensor_shapes`, #180718).
    "cudnn_at_most_65535": (2, 13),
    # It trains with heads of 256 on sm10x, and no more with heads between 128 and 256 on sm90
    # (`check_cudnn_d256_bprop_head_dim`, #185554 and #190949).
    "cudnn_heads_of_256": (2, 14),
    # It takes no single query on sm10x and sm11x with cuDNN 9.19 to 9.25.0, except 9.24.1
    # (`is_cudnn_attention_decode_disabled`, #194927).
    "cudnn_without_single_queries": (2, 14),
    # Memory-efficient attention refuses inputs whose storage offset is misaligned
    # (`check_data_ptr_alignment_mem_efficient`, #184258).
    "aligned_efficient_attention": (2, 13),
    # ATen/native/transformers/sdp_utils_cpp.h. Memory-efficient attention takes grouped queries, and one head of keys
    # needs no `enable_gqa` (#191085).
    "efficient_grouped_queries": (2, 14),
    # Three dimensions are a batch of one (`normalize_unbatched_input`, #192271).
    "fused_unbatched_attention": (2, 14),
    # c10/cuda/CUDACachingAllocator.cpp. Of free blocks of equal size, one in the oldest segment is taken, not the one
    # at the lowest address (`BlockComparatorSizeCounterAddress`, #183591).
    "older_segments_first": (2, 13),
    # ATen/native/cuda/group_norm_kernel.cu. A group norm of half precision has the moments of its groups in fp32, too
    # (`GroupNormKernelImplInternal`, #183946).
    "group_norm_moments": (2, 13),
    # It reads channels-last inputs as they are, and copied them before (`RowwiseMomentsChannelsLastCUDAKernel`,
    # #191945).
    "group_norm_channels_last": (2, 15),
}
"""By the name that code asks for, the release since which a rule holds; comments name its file and pull request."""

CUDNN: Mapping[Release, int] = {(2, 9): 91_002, (2, 11): 91_900, (2, 12): 92_000, (2, 14): 92_400, (2, 15): 92_600}
"""cuDNN of each release's default wheel (its Requires-Dist); 2.10 has that of 2.9, and 2.13 that of 2.12."""


def holds(rule: str, release: Release) -> bool:
    """Return whether a rule holds in a release of PyTorch.

    >>> holds("shared_cublaslt_workspace", (2, 11)), holds("shared_cublaslt_workspace", (2, 12))
    (False, True)
    """
    return release >= RULES[rule]
