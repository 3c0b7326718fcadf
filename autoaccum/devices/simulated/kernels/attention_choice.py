"""The kernel `scaled_dot_product_attention` runs on a card: a decision without PyTorch.

The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`, in the order in
which they are asked there. Where a rule came with a release, the release stands beside it. Nested tensors are not
modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
    """A call of `scaled_dot_product_attention`."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def trains(self) -> bool:
        """Return whether any of query, key and value is differentiated."""
        return any(operand.requires_grad for operand in (self.query, self.key, self.value))


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Backends the process allows: flags of `torch.backends.cuda`, the order of priority, deterministic mode, cuDNN.

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
        """Return whether cuDNN takes heads of 256 (2.15, sm90 and sm10x, cuDNN after 9.22)."""
        major, minor = self.card.capability
        fitting = ((major, minor) == (9, 0) or major == 10) and self.backends.cudnn_version > 92_200
        return self.torch_version >= (2, 15) and fitting and not (minor == 7 and self.backends.cudnn_version <= 92_500)


Rule: TypeAlias = Callable[[Question], str | None]

HALVES = frozenset(("float16", "bfloat16"))
NEWEST_CAPABILITY = (12, 1)


def gemm_alignment(dtype: str, capability: tuple[int, int]) -> int:
    """The multiple that memory-efficient attention wants of a head size, in elements (`minimum_gemm_alignment`)."""
    half = dtype in HALVES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _four_dimensions(question: Question) -> str | None:
    call = question.call
    dimensions = [len(operand.shape) for operand in (call.query, call.key, call.value)]
    return None if dimensions == [4, 4, 4] else f"query, key and value have {dimensions} dimensions, not 4 each"


def _no_mask(question: Question) -> str | None:
    return None if question.call.mask is None else "it takes no mask"


def _flash_head_size(question: Question) -> str | None:
    query, key, value = question.head_sizes
    fits = query == key == value and query <= 256
    return None if fits else f"head sizes {query}, {key} and {value} differ or exceed 256"


def _capability_within(question: Question, *, lowest: tuple[int, int]) -> str | None:
    capability = question.card.capability
    if lowest <= capability <= NEWEST_CAPABILITY:
        return None
    return f"sm{capability[0]}{capability[1]} is not within sm{lowest[0]}{lowest[1]} to sm121"


def _wide_heads_in_training(question: Question) -> str | None:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    capability, size = question.card.capability, question.head_sizes[0]
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if not (small and question.call.trains) or size <= 192 or (size > 224 and not question.call.dropout):
        return None
    return f"its backward cannot take heads of {size} on sm{capability[0]}{capability[1]}"


def _square_when_causal(question: Question) -> str | None:
    queries, keys = question.call.query.shape[-2], question.call.key.shape[-2]
    return f"causal with {queries} queries and {keys} keys" if question.call.is_causal and queries != keys else None


def _half_precision(question: Question) -> str | None:
    return _dtype_within(question, HALVES if question.card.capability >= (8, 0) else frozenset(("float16",)))


def _efficient_dtypes(question: Question) -> str | None:
    ampere = question.card.capability >= (8, 0)
    return _dtype_within(question, frozenset(("float16", "float32", *(("bfloat16",) if ampere else ()))))


def _dtype_within(question: Question, allowed: frozenset[str]) -> str | None:
    call = question.call
    dtypes = [operand.dtype for operand in (call.query, call.key, call.value)]
    return None if len(set(dtypes)) == 1 and dtypes[0] in allowed else f"dtypes are {', '.join(dtypes)}"


def _heads_of_efficient(question: Question) -> str | None:
    """Grouped queries from 2.15 on."""
    return _heads(question, grouped=question.torch_version >= (2, 15), alike=True)


def _heads(question: Question, *, grouped: bool, alike: bool) -> str | None:
    """`check_batch_size_and_num_heads_dense`; one head of keys for all queries needs no `enable_gqa` from 2.15 on."""
    call = question.call
    if len({operand.shape[0] for operand in (call.query, call.key, call.value)}) != 1:
        return "batch sizes differ"
    query, key, value = (operand.shape[-3] for operand in (call.query, call.key, call.value))
    if call.enable_gqa and grouped:
        divides = key > 0 and query % key == 0 and value > 0 and query % value == 0
        return None if divides and (key == value or not alike) else f"{query} heads on {key} and {value}"
    if query == key == value or (question.torch_version >= (2, 15) and grouped and key == value == 1):
        return None
    return f"{query} heads on {key} and {value}"


def _not_empty(question: Question) -> str | None:
    empty = 0 in (question.call.query.shape[-2], question.call.key.shape[-2])
    return "a sequence is empty" if empty else None


def _last_strides(question: Question, *, single_counts: bool) -> str | None:
    """`check_last_dim_stride_equals_1_dense`."""
    call = question.call
    dense = all(operand.strides[-1] == 1 for operand in (call.query, call.key, call.value))
    if not dense and not (single_counts and call.query.shape[-1] == 1):
        return "the last dimension of query, key or value is not contiguous"
    return "the mask's last dimension is not contiguous" if call.mask and call.mask.strides[-1] != 1 else None


def _efficient_head_size(question: Question) -> str | None:
    query, key, value = question.head_sizes
    alignment = gemm_alignment(question.call.query.dtype, question.card.capability)
    fits = query == key and query > 0 and value > 0 and query % alignment == 0 and value % alignment == 0
    return None if fits else f"head sizes {query}, {key} and {value} are no multiples of {alignment}"


def _aligned_storage(question: Question) -> str | None:
    """`check_data_ptr_alignment_mem_efficient`, from 2.15 on."""
    call = question.call
    if question.torch_version < (2, 15) or question.card.capability < (8, 0):
        return None
    alignment = gemm_alignment(call.query.dtype, question.card.capability)
    offsets = [operand.offset % alignment for operand in (call.query, call.key, call.value)]
    return f"query, key or value begins at no multiple of {alignment} elements" if any(offsets) else None


def _deterministic(question: Question) -> str | None:
    return "it is not deterministic" if question.backends.deterministic else None


def _cudnn_mask(question: Question) -> str | None:
    """`check_attn_mask_shape`."""
    mask, query, key = question.call.mask, question.call.query.shape, question.call.key.shape
    if mask is None:
        return None
    if mask.requires_grad:
        return "the mask requires a gradient"
    bounds = (query[0], query[1], query[2], key[2])[-len(mask.shape) :]
    broadcasts = all(size in (1, bound) for size, bound in zip(mask.shape, bounds, strict=False))
    return None if len(mask.shape) in (2, 4) and broadcasts else f"the mask's shape is {mask.shape}"


def _cudnn_dropout(question: Question) -> str | None:
    """Sixteenths only after 2.11 (`check_cudnn_dropout`, pytorch/pytorch#174245); none with cuDNN 9.11 to 9.13."""
    dropout = question.call.dropout
    if dropout and 91_100 < question.backends.cudnn_version < 91_400:
        return "this cuDNN has no dropout"
    exact = question.torch_version < (2, 12) or (dropout * 16).is_integer()
    return None if exact else f"dropout of {dropout} is no multiple of 1/16"


def _cudnn_shapes(question: Question) -> str | None:
    """`check_cudnn_tensor_shapes`."""
    call, (query, _, value) = question.call, question.head_sizes
    if question.torch_version >= (2, 15) and max(call.query.shape[:2]) > 65_535:
        return "batch or heads exceed 65535"
    limit = _cudnn_head_limit(question)
    if max(query, value) > limit or query % 8 or value % 8:
        return f"head sizes {query} and {value} exceed {limit} or are no multiples of 8"
    if call.key.shape[2] == 1:
        return "there is one key"
    return "one query with dropout" if call.dropout and call.query.shape[2] == 1 else None


def _cudnn_head_limit(question: Question) -> int:
    (major, minor), (query, _, value) = question.card.capability, question.head_sizes
    version, special = question.backends.cudnn_version, query == 192 and value == 128
    if question.torch_version < (2, 15):
        if (major, minor) == (9, 0) and version >= 91_000:
            return 256
        return 192 if major == 10 and version >= 91_100 and special else 128
    if question.big_cudnn_heads:
        return 256
    return 192 if ((major, minor) == (9, 0) or major == 10) and version >= 91_100 and special else 128


def _cudnn_backward(question: Question) -> str | None:
    """`check_cudnn_d256_bprop_head_dim`, 2.15."""
    query, _, value = question.head_sizes
    if not (question.big_cudnn_heads and question.call.trains):
        return None
    fits = max(query, value) <= 128 or (query, value) in ((192, 128), (256, 256))
    return None if fits else f"its backward takes no heads of {query} and {value}"


RULES: Mapping[Kernel, tuple[Rule, ...]] = {
    "flash": (
        _four_dimensions,
        _no_mask,
        _flash_head_size,
        partial(_capability_within, lowest=(8, 0)),
        _wide_heads_in_training,
        _square_when_causal,
        _half_precision,
        partial(_heads, grouped=True, alike=True),
        _not_empty,
        partial(_last_strides, single_counts=True),
    ),
    "efficient": (
        partial(_capability_within, lowest=(5, 0)),
        _four_dimensions,
        _efficient_head_size,
        _aligned_storage,
        _not_empty,
        partial(_last_strides, single_counts=False),
        _heads_of_efficient,
        _efficient_dtypes,
    ),
    "cudnn": (
        _four_dimensions,
        _deterministic,
        _half_precision,
        _cudnn_mask,
        partial(_capability_within, lowest=(8, 0)),
        _cudnn_dropout,
        _not_empty,
        partial(_last_strides, single_counts=True),
        partial(_heads, grouped=True, alike=False),
        _cudnn_shapes,
        _cudnn_backward,
    ),
    "math": (),
}


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel, and why those that were asked before it cannot run.

    Attributes:
        kernel: None when no kernel that is allowed can run.
        refused: By kernel, in the order they were asked.
    """

    kernel: Kernel | None
    refused: Mapping[Kernel, str]


def choose_attention(
    call: AttentionCall, card: Card, torch_version: tuple[int, int], backends: Backends
) -> AttentionChoice:
    """The kernel that CUDA would run (`select_sdp_backend` in `sdp_utils.cpp`)."""
    if torch_version >= (2, 15):
        call = _with_batch(call)
    question = Question(call, card, torch_version, backends)
    refused: dict[Kernel, str] = {}
    for kernel in backends.order or _default_order(question):
        reason = f"{kernel} attention is switched off" if kernel not in backends.enabled else None
        reason = reason or next(filter(None, (rule(question) for rule in RULES[kernel])), None)
        if reason is None:
            return AttentionChoice(kernel, refused)
        refused[kernel] = reason
    return AttentionChoice(None, refused)


def _with_batch(call: AttentionCall) -> AttentionCall:
    """Three dimensions count as a batch of one (`normalize_unbatched_input`, 2.15)."""
    if any(len(operand.shape) != 3 for operand in (call.query, call.key, call.value)):
        return call
    mask = None if call.mask is None else _unsqueezed(call.mask)
    query, key, value = (_unsqueezed(operand) for operand in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, mask=mask)


def _unsqueezed(operand: Operand) -> Operand:
    missing = max(0, 4 - len(operand.shape))
    return replace(operand, shape=(1,) * missing + operand.shape, strides=(0,) * missing + operand.strides)


def _default_order(question: Question) -> tuple[Kernel, ...]:
    """CuDNN first on sm90 and sm10x with a cuDNN after 9.15 (`check_prefer_cudnn_attention`)."""
    major, minor = question.card.capability
    known = major in (9, 10) and (minor in (0, 3) or question.torch_version >= (2, 15))
    if question.backends.prefers_cudnn and known and question.backends.cudnn_version > 91_500:
        return ("cudnn", "flash", "efficient", "math")
    return ORDER
