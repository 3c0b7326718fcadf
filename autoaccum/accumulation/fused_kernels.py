"""Kernels that keep their random draws to themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def without_fused_attention() -> AbstractContextManager[Any]:
    """Let `scaled_dot_product_attention` take its math path on a card: its dropout is then an op of its own.

    On the CPU dropout takes that path anyway (*run*, torch 2.11 to 2.15).
    """
    return sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_initialized() else nullcontext()
