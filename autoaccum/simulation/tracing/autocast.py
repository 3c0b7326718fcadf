"""Autocast on the simulated card, as CUDA does it.

The C++ kernels of autocast would see tensors on `meta`, not on CUDA, and cast nothing; Python kernels replace them.

Sources: aten/src/ATen/autocast_mode.h (the lists `AT_FORALL_*`, the same from 2.9 to 2.15 except for `rms_norm`, new
in 2.12 or 2.13, and overloads with named dimensions, removed then) and autocast_mode.cpp (what CUDA adds:
`cudnn_convolution*`, `binary_cross_entropy`; in 2.15 also `linalg_matrix_sqrth`, found by running that binary).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from autoaccum.simulation.torch_patches import patch

Policy = Literal["lower_precision_fp", "fp32", "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned"]

_LISTS: Mapping[Policy, str] = {
    "lower_precision_fp": """
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
    "fp32_set_opt_dtype": """
prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
sum.dim_IntList sum.dim_DimnameList
""",
    "fp32_append_dtype": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
POLICIES: Mapping[str, Policy] = {name: policy for policy, names in _LISTS.items() for name in names.split()}
"""Policies by operator and overload, as the dispatcher names them without `aten::`.

- `lower_precision_fp` casts arguments to the autocast dtype, `fp32` to fp32, `promote` to the widest dtype among them.
- `fp32_set_opt_dtype` sets the optional argument `dtype` to fp32 if it is missing, and casts nothing.
- `fp32_append_dtype` calls the overload that takes a dtype, with fp32.
- `banned` raises an error.
"""

RNN = "_cudnn_rnn"
"""An operator with its own autocast kernel (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

_FP32 = torch.float32
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
"""Keys that are excluded while an autocast kernel calls its operator."""
_HALF = torch.float16
"""RNNs run in fp16 even if the autocast dtype is bf16, as a run of the binaries of 2.11 and 2.15 shows."""
_KEY = "AutocastCUDA"
_aten: Any = torch.ops.aten
_copy = _aten._to_copy.default
Kernel = Callable[..., Any]


def is_eligible(tensor: Tensor) -> bool:
    """Return whether autocast may change the dtype of `tensor`."""
    dtype = tensor.dtype
    return dtype.is_floating_point and dtype is not torch.float64 and tensor.is_cuda


class CastCache:
    """Casts arguments, and caches casts of weights until the outermost autocast ends (`cached_cast` in PyTorch).

    The cache takes memory: half a model's bytes. A weight is an fp32 leaf that requires a gradient and is not a view.
    It is cast with gradients enabled, even within `torch.no_grad`, so that a later use has a gradient
    (https://github.com/pytorch/pytorch/issues/158232). The cast's graph holds the weight, so its `id` is not reused.
    """

    def __init__(self) -> None:
        self._casts: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Drop all cached casts."""
        self._casts.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a tensor or a list of tensors to `dtype` where autocast may; return other values as they are."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if value is None or value.dtype is dtype or not is_eligible(value):
            return value
        if dtype is _FP32 or not (value.requires_grad and value.is_leaf and self._is_cacheable(value, dtype)):
            return _copy(value, dtype=dtype)
        cast = self._casts.get(id(value))
        if cast is None:
            with torch.enable_grad():
                cast = self._casts[id(value)] = _copy(value, dtype=dtype)
        return cast

    @staticmethod
    def _is_cacheable(weight: Tensor, dtype: torch.dtype) -> bool:
        return (
            weight.dtype is _FP32
            and dtype is torch.get_autocast_dtype("cuda")
            and not weight._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )


def make_rnn_kernel(casts: CastCache) -> Kernel:
    """Return the autocast kernel of `_cudnn_rnn`, which casts the weights at every call and caches none."""
    operator = _aten._cudnn_rnn.default

    def kernel(data: Tensor, weights: list[Tensor], stride: int, flat: Tensor | None, *rest: Any) -> Any:
        hidden, cell, *others = rest
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            weight = weights[0] if flat is None else flat
            if weight.dtype is not _HALF and is_eligible(weight):
                flat, weights = flatten(weights)
            cell, hidden, data = (casts.cast(value, _HALF) for value in (cell, hidden, data))
            return operator(data, weights, stride, flat, hidden, cell, *others)

    return kernel


def flatten(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return an fp16 buffer and copies of the weights in it (`copy_weights_to_flat_buf_views` in native/cudnn/RNN.cpp).

    Gradients flow back through the copies in the weights' own dtype. cuDNN may pad its buffer by a few bytes.
    """
    with torch.no_grad():
        sizes = [weight.numel() for weight in weights]
        flat = torch.zeros(sum(sizes), dtype=_HALF, device=weights[0].device)
        pieces = torch.split_with_sizes(flat, sizes)
        parts = [piece.view(weight.shape).detach() for piece, weight in zip(pieces, weights, strict=True)]
    return flat, [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]


def install(library: torch.library.Library, stack: ExitStack) -> None:
    """Make autocast cast fake CUDA tensors until `library` is destroyed and `stack` is closed."""
    casts = CastCache()
    clear_native = torch.clear_autocast_cache

    def clear() -> None:
        casts.clear()
        clear_native()

    patch(stack, torch, "clear_autocast_cache", clear)
    stack.callback(casts.clear)
    _patch_nesting(stack)
    register: Any = library.impl
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*overrid", category=UserWarning)  # as intended
        for name in cast_operators():
            # An operator that only a later PyTorch casts: fp32 rather overestimates its memory.
            make_kernel = _MAKERS[POLICIES.get(name, "fp32")]
            register(name, make_kernel(_overload(name), casts), _KEY, allow_override=True)
        register(RNN, make_rnn_kernel(casts), _KEY, allow_override=True)


def _patch_nesting(stack: ExitStack) -> None:
    """Count the autocast nesting depth from 0 in backward, which has its own thread on CUDA.

    So the end of each recomputed part clears the cache, even if `backward()` is called within autocast.
    """
    enter, leave = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    depth = [0]

    def count(step: int, count_native: Callable[[], int]) -> int:
        if torch._C._current_autograd_node() is None:
            return count_native()
        depth[0] += step
        return depth[0]

    patch(stack, torch, "autocast_increment_nesting", lambda: count(1, enter))
    patch(stack, torch, "autocast_decrement_nesting", lambda: count(-1, leave))


@cache
def cast_operators() -> list[str]:
    """Return the sorted names, without `aten::`, of operators that this PyTorch casts on CUDA by a policy."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    cast = (name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY))
    return sorted(name.removeprefix("aten::") for name in cast if name != f"aten::{RNN}")


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


def _tensor_positions(schema: torch.FunctionSchema) -> tuple[int, ...]:
    """Return the positions of tensors and tensor lists, last first: GCC compiles PyTorch to cast in that order."""
    types = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    return tuple(i for i, argument in reversed(list(enumerate(schema.arguments))) if str(argument.type) in types)


def _casting(operator: Any, casts: CastCache, choose: Callable[[Sequence[Any]], torch.dtype]) -> Kernel:
    positions = _tensor_positions(operator._schema)
    cast, excluding = casts.cast, torch._C._ExcludeDispatchKeyGuard

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluding(_AUTOCAST_KEYS):
            dtype = choose(args)
            casted, count = list(args), len(args)
            for i in positions:
                if i < count:
                    casted[i] = cast(casted[i], dtype)
            return operator(*casted, **kwargs)

    return kernel


def _promote(operator: Any, casts: CastCache) -> Kernel:
    positions = sorted(_tensor_positions(operator._schema))

    def widest(args: Sequence[Any]) -> torch.dtype:
        lower = dtype = torch.get_autocast_dtype("cuda")
        nested = (args[i] if isinstance(args[i], list | tuple) else (args[i],) for i in positions[: len(args)])
        for tensor in (tensor for group in nested for tensor in group):
            if tensor is not None and is_eligible(tensor):
                if _FP32 in (dtype, tensor.dtype):
                    dtype = _FP32
                elif tensor.dtype is not lower:
                    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return dtype

    return _casting(operator, casts, widest)


def _set_dtype(operator: Any, _: CastCache) -> Kernel:
    names = [argument.name for argument in operator._schema.arguments]
    at = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            dtype = args[at] if at < len(args) else kwargs.get("dtype")
            if dtype is None and is_eligible(args[0]):
                args, kwargs = args[:at], {**kwargs, "dtype": _FP32}
            return operator(*args, **kwargs)

    return kernel


def _append_dtype(operator: Any, _: CastCache) -> Kernel:
    schema = operator._schema
    name = "ScalarOpt" if schema.overload_name == "Scalar" else schema.overload_name
    target = _overload(f"norm.{name}_dtype")
    defaults = [argument.default_value for argument in schema.arguments]

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            dtype = _FP32 if is_eligible(args[0]) else args[0].dtype
            return target(*args, *defaults[len(args) :], dtype=dtype)

    return kernel


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


_MAKERS: dict[Policy, Callable[[Any, CastCache], Kernel]] = {
    "lower_precision_fp": partial(_casting, choose=lambda _: torch.get_autocast_dtype("cuda")),
    "fp32": partial(_casting, choose=lambda _: _FP32),
    "fp32_set_opt_dtype": _set_dtype,
    "fp32_append_dtype": _append_dtype,
    "promote": _promote,
    "banned": lambda operator, casts: _refuse,
}
