"""Autocast on a card that is not there, as CUDA does it.

CUDA's kernels ask in C++ whether a tensor is on CUDA and are told `meta`, so they would cast nothing: Python kernels
take their place.

Sources: aten/src/ATen/autocast_mode.h (the lists `AT_FORALL_*`, the same from 2.11 to 2.15 but for `rms_norm`, which is
new in 2.12 or 2.13, and overloads that name dimensions, which went then) and autocast_mode.cpp (what CUDA adds:
`cudnn_convolution*`, `binary_cross_entropy`; in 2.15 `linalg_matrix_sqrth`, *run* on that binary's own kernel).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.patches import patched

Policy = Literal["lower", "fp32", "set_dtype", "append_dtype", "promote", "banned"]

_LISTS: Mapping[Policy, str] = {
    "lower": """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm
mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""",
    "fp32": """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa linalg_matrix_sqrth
""",
    "set_dtype": """
prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
sum.dim_IntList sum.dim_DimnameList
""",
    "append_dtype": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {name: policy for policy, names in _LISTS.items() for name in names.split()}
)
"""By operator and overload, as the dispatcher names them without `aten::`.

- `lower`: arguments are cast to the autocast dtype; `fp32`: to fp32; `promote`: to the widest among them.
- `set_dtype`: the optional argument `dtype` is fp32 where none is given, nothing is cast.
- `append_dtype`: the overload that takes a dtype is called instead, with fp32.
- `banned`: refused.
"""

RNN = "_cudnn_rnn"
"""Has a kernel of its own (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

WIDE = torch.float32
OUTSIDE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
"""Is excluded while a kernel of autocast runs its operator."""
_copy = torch.ops.aten._to_copy.default


def is_eligible(tensor: Tensor) -> bool:
    """Return whether autocast may change the dtype of `tensor`."""
    dtype = tensor.dtype
    return dtype.is_floating_point and dtype is not torch.float64 and tensor.is_cuda


class CastCache:
    """Casts arguments, and keeps those of weights until the outermost autocast ends (`cached_cast`).

    What is kept is memory: half a model's bytes. A weight is a leaf in fp32 that requires a gradient and is no view.
    It is cast with gradients on, also within `torch.no_grad`, so that a later use has them (pytorch#158232). So the
    cast has a graph, the graph holds the weight, and its `id` is no other tensor's for as long.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor or a list of tensors in `dtype`, where autocast may change it; anything else as it is."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if value is None or value.dtype is dtype or not is_eligible(value):
            return value
        if dtype is not WIDE and value.requires_grad and value.is_leaf and self._may_keep(value, dtype):
            return self._cast_once(value, dtype)
        return _copy(value, dtype=dtype)

    @staticmethod
    def _may_keep(weight: Tensor, dtype: torch.dtype) -> bool:
        return (
            weight.dtype is WIDE
            and dtype is torch.get_autocast_dtype("cuda")
            and not weight._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def _cast_once(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(id(weight))
        if kept is None:
            with torch.enable_grad():
                kept = self._kept[id(weight)] = _copy(weight, dtype=dtype)
        return kept


_HALF = torch.float16
"""Whatever the autocast dtype: under bf16 too (*run*: the binaries of 2.11 and 2.15)."""


def rnn_kernel(casts: CastCache) -> Callable[..., Any]:
    """The kernel of `_cudnn_rnn` for autocast: the weights are cast at every call, none is kept."""
    operator = torch.ops.aten._cudnn_rnn.default

    def kernel(data: Tensor, weights: list[Tensor], stride: int, flat: Tensor | None, *rest: Any) -> Any:
        hidden, cell, *others = rest
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            told = weights[0] if flat is None else flat
            if told.dtype is not _HALF and is_eligible(told):
                flat, weights = flatten(weights)
            cell, hidden, data = (casts.cast(value, _HALF) for value in (cell, hidden, data))
            return operator(data, weights, stride, flat, hidden, cell, *others)

    return kernel


def flatten(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A buffer in fp16, and the weights as parts of it (`copy_weights_to_flat_buf_views` in native/cudnn/RNN.cpp).

    Gradients come back through the copies, in the weights' own dtype. cuDNN may pad its buffer by a few bytes.
    """
    with torch.no_grad():
        sizes = [weight.numel() for weight in weights]
        flat = torch.zeros(sum(sizes), dtype=_HALF, device=weights[0].device)
        pieces = torch.split_with_sizes(flat, sizes)
        parts = [piece.view(weight.shape).detach() for piece, weight in zip(pieces, weights, strict=True)]
    return flat, [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]


_KEY = "AutocastCUDA"
_aten: Any = torch.ops.aten

Kernel = Callable[..., Any]


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have autocast cast fake CUDA tensors until `library` is destroyed and `stack` is closed."""
    cache = CastCache()
    native = torch.clear_autocast_cache

    def clear() -> None:
        cache.clear()
        native()

    stack.enter_context(patched(torch, "clear_autocast_cache", clear))
    stack.callback(cache.clear)
    _count_backward_apart(stack)
    register: Any = library.impl
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*overrid", category=UserWarning)  # that is the purpose
        for name in cast_operators():
            register(name, _kernel(name, cache), _KEY, allow_override=True)
        register(RNN, rnn_kernel(cache), _KEY, allow_override=True)


def _count_backward_apart(stack: ExitStack) -> None:
    """Count regions of autocast in a backward pass from 0, as in the thread where CUDA runs it.

    So the end of each checkpointed part clears the cache, also where `backward()` is called within autocast.
    """
    enter, leave = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    depth = [0]

    def count(step: int, native: Callable[[], int]) -> int:
        if torch._C._current_autograd_node() is None:
            return native()
        depth[0] += step
        return depth[0]

    stack.enter_context(patched(torch, "autocast_increment_nesting", lambda: count(1, enter)))
    stack.enter_context(patched(torch, "autocast_decrement_nesting", lambda: count(-1, leave)))


def cast_operators() -> list[str]:
    """Operators this PyTorch casts on CUDA by a policy, without `aten::`, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    ours = (name.removeprefix("aten::") for name in names if name.startswith("aten::") and _has_kernel(name))
    return sorted(name for name in ours if name != RNN)


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)


def _kernel(name: str, casts: CastCache) -> Kernel:
    # What a later PyTorch casts and no list names: rather a size that is too large.
    return _MAKERS[POLICIES.get(name, "fp32")](_overload(name), casts)


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


def _tensor_positions(schema: torch.FunctionSchema) -> tuple[int, ...]:
    """Return where tensors and lists of tensors stand, last first: C++ as GCC compiles it casts them in that order."""
    types = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    return tuple(i for i, argument in reversed(list(enumerate(schema.arguments))) if str(argument.type) in types)


def _casting(operator: Any, casts: CastCache, choose: Callable[[Sequence[Any]], torch.dtype]) -> Kernel:
    positions = _tensor_positions(operator._schema)
    cast, outside = casts.cast, torch._C._ExcludeDispatchKeyGuard

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with outside(OUTSIDE):
            dtype = choose(args)
            ready, count = list(args), len(args)
            for i in positions:
                if i < count:
                    ready[i] = cast(ready[i], dtype)
            return operator(*ready, **kwargs)

    return kernel


def _lower(operator: Any, casts: CastCache) -> Kernel:
    return _casting(operator, casts, lambda _: torch.get_autocast_dtype("cuda"))


def _fp32(operator: Any, casts: CastCache) -> Kernel:
    return _casting(operator, casts, lambda _: WIDE)


def _promote(operator: Any, casts: CastCache) -> Kernel:
    positions = sorted(_tensor_positions(operator._schema))

    def widest(args: Sequence[Any]) -> torch.dtype:
        lower = found = torch.get_autocast_dtype("cuda")
        for i in positions[: len(args)]:
            for tensor in args[i] if isinstance(args[i], list | tuple) else (args[i],):
                found = _wider(found, tensor, lower)
        return found

    return _casting(operator, casts, widest)


def _wider(found: torch.dtype, tensor: Tensor | None, lower: torch.dtype) -> torch.dtype:
    if tensor is None or not is_eligible(tensor):
        return found
    if WIDE in (found, tensor.dtype):
        return WIDE
    if tensor.dtype is not lower:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return found


def _set_dtype(operator: Any, _: CastCache) -> Kernel:
    names = [argument.name for argument in operator._schema.arguments]
    at = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            given = args[at] if at < len(args) else kwargs.get("dtype")
            if given is None and is_eligible(args[0]):
                args, kwargs = args[:at], {**kwargs, "dtype": WIDE}
            return operator(*args, **kwargs)

    return kernel


def _append_dtype(operator: Any, _: CastCache) -> Kernel:
    schema = operator._schema
    name = "ScalarOpt" if schema.overload_name == "Scalar" else schema.overload_name
    target = _overload(f"norm.{name}_dtype")
    defaults = [argument.default_value for argument in schema.arguments]

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            dtype = WIDE if is_eligible(args[0]) else args[0].dtype
            return target(*args, *defaults[len(args) :], dtype=dtype)

    return kernel


def _banned(_: Any, __: CastCache) -> Kernel:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        )

    return kernel


_MAKERS: dict[Policy, Callable[[Any, CastCache], Kernel]] = {
    "lower": _lower,
    "fp32": _fp32,
    "set_dtype": _set_dtype,
    "append_dtype": _append_dtype,
    "promote": _promote,
    "banned": _banned,
}
