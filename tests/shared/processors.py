"""What the processor that tests run on can compute."""

from __future__ import annotations

import torch
from torch import nn


def has_recurrent_kernel(dtype: torch.dtype) -> bool:
    """Whether oneDNN has an LSTM of `dtype` for this processor: in bf16 that takes AVX-512, in fp16 still more."""
    try:
        with torch.autocast("cpu", dtype), torch.no_grad():
            nn.LSTM(8, 8)(torch.zeros(1, 1, 8))
    except RuntimeError:
        return False
    return True
