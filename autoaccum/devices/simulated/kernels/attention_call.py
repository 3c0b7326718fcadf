"""What attention is asked for, and on what: pure records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoaccum.devices.simulated.catalog import Card

Kernel: TypeAlias = Literal["flash", "efficient", "cudnn", "math"]

ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor that attention is given.

    Attributes:
        shape: (batch, heads, length, head size), or without the batch; a mask has any shape that broadcasts.
        strides: In elements, one per dimension.
        dtype: As PyTorch calls it, without `torch.`.
        offset: Where it begins in its storage, in elements.
        requires_grad: Whether it is differentiated (grad mode off: no), but for a mask: what the tensor says.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What `scaled_dot_product_attention` was called with."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def trains(self) -> bool:
        """Whether any of query, key and value is differentiated."""
        return any(operand.requires_grad for operand in (self.query, self.key, self.value))


@dataclass(frozen=True, kw_only=True)
class Backends:
    """What the process allows: flags of `torch.backends.cuda`, the order of priority, deterministic mode, cuDNN.

    Attributes:
        enabled: The kernels whose flag is on.
        order: The priority a `sdpa_kernel(..., set_priority=True)` gave; None: PyTorch's own.
        deterministic: Whether nondeterministic algorithms are an error.
        prefers_cudnn: Whether `TORCH_CUDNN_SDPA_DEPRIORITIZED` is unset.
        cudnn_version: As cuDNN tells it: 91900 is 9.19.0.
    """

    enabled: frozenset[Kernel] = frozenset(ORDER)
    order: tuple[Kernel, ...] | None = None
    deterministic: bool = False
    prefers_cudnn: bool = True
    cudnn_version: int = 92_600


@dataclass(frozen=True)
class Question:
    """A call on a card, with a PyTorch, in a process."""

    call: AttentionCall
    card: Card
    torch_version: tuple[int, int]
    backends: Backends

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Those of query, key and value."""
        return self.call.query.shape[-1], self.call.key.shape[-1], self.call.value.shape[-1]

    @property
    def big_cudnn_heads(self) -> bool:
        """Whether cuDNN takes heads of 256 (2.15, sm90 and sm10x, cuDNN after 9.22)."""
        major, minor = self.card.capability
        fitting = ((major, minor) == (9, 0) or major == 10) and self.backends.cudnn_version > 92_200
        return self.torch_version >= (2, 15) and fitting and not (minor == 7 and self.backends.cudnn_version <= 92_500)
