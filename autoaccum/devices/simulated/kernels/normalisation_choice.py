"""Whether batch norm runs with cuDNN: a decision without PyTorch."""

from __future__ import annotations

from math import prod

MIN_EPS = 0.0
"""`CUDNN_BN_MIN_EPSILON`, since cuDNN 7.5."""


def is_cudnn_batch_norm(
    *,
    dtype: str,
    weight: str | None,
    bias: str | None,
    tracks: tuple[bool, bool],
    shape: tuple[int, ...],
    training: bool,
    eps: float,
    enabled: bool,
) -> bool:
    """`_select_batch_norm_backend` in `aten/src/ATen/native/Normalization.cpp`; else CUDA's own kernels.

    Args:
        dtype: The input's.
        weight: The weight's dtype, None without one.
        bias: Likewise.
        tracks: Whether there are a running mean and a running variance.
        shape: The input's.
        training: Whether the batch's own statistics count.
        eps: Added to the variance.
        enabled: Whether cuDNN may be used.
    """
    if not enabled or weight is None or bias is None or "bfloat16" in (dtype, weight):
        return False
    wide_enough = dtype != "float16" or weight == "float32"
    tracking = all(tracks) or (not any(tracks) and training)
    spatial = len(shape) >= 3 and shape[0] <= (880_801 if training else 65_535)
    return wide_enough and tracking and spatial and eps >= MIN_EPS and prod(shape) < (1 << 31) - 1
