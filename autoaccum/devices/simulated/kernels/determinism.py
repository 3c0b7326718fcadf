"""Whether attention on a card has to be deterministic."""

from __future__ import annotations

import torch


def is_strictly_deterministic() -> bool:
    """Whether determinism is asked for, not only warned about.

    Kernels of attention take the slower way in the first case alone (`attention_backward.cu` and `sdp_utils.cpp` in
    `aten/src/ATen/native/transformers/cuda`).
    """
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
