"""Autocast on a card that is not there, as CUDA does it (facts 1.3).

CUDA's kernels ask in C++ whether a tensor is on CUDA and are told `meta`, so they would cast nothing: Python kernels
take their place. Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp; `autocast_policies` has the lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.autocast_casts import OUTSIDE, WIDE, Casts, eligible
from autoaccum.devices.simulated.autocast_policies import DTYPE_OVERLOADS, RNN, Policy, policy_of
from autoaccum.devices.simulated.autocast_rnn import rnn_kernel
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.patches import replaced

_KEY = "AutocastCUDA"
_aten: Any = torch.ops.aten

Kernel = Callable[..., Any]


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have autocast cast fake CUDA tensors until `library` is destroyed and `stack` is closed.

    Args:
        library: Of `aten`, to register kernels in.
        card: Any: autocast is the same on all (bf16 before compute capability 8.0 is emulated, and allowed).
        stack: Its end clears the cache and gives `torch.clear_autocast_cache` back.
    """
    cache = Casts()
    native = torch.clear_autocast_cache

    def clear() -> None:
        cache.clear()
        native()

    stack.enter_context(replaced(torch, "clear_autocast_cache", clear))
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

    stack.enter_context(replaced(torch, "autocast_increment_nesting", lambda: count(1, enter)))
    stack.enter_context(replaced(torch, "autocast_decrement_nesting", lambda: count(-1, leave)))


def cast_operators() -> list[str]:
    """Operators this PyTorch casts on CUDA by a policy, without `aten::`, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    ours = (name.removeprefix("aten::") for name in names if name.startswith("aten::") and _has_kernel(name))
    return sorted(name for name in ours if name != RNN)


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)


def _kernel(name: str, casts: Casts) -> Kernel:
    return _MAKERS[policy_of(name)](_overload(name), casts)


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


def _tensor_positions(schema: torch.FunctionSchema) -> tuple[int, ...]:
    """Where tensors and lists of tensors stand, last first: C++ as GCC compiles it casts them in that order."""
    types = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    return tuple(i for i, argument in reversed(list(enumerate(schema.arguments))) if str(argument.type) in types)


def _casting(operator: Any, casts: Casts, choose: Callable[[Sequence[Any]], torch.dtype]) -> Kernel:
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


def _lower(operator: Any, casts: Casts) -> Kernel:
    return _casting(operator, casts, lambda _: torch.get_autocast_dtype("cuda"))


def _fp32(operator: Any, casts: Casts) -> Kernel:
    return _casting(operator, casts, lambda _: WIDE)


def _promote(operator: Any, casts: Casts) -> Kernel:
    positions = sorted(_tensor_positions(operator._schema))

    def widest(args: Sequence[Any]) -> torch.dtype:
        lower = found = torch.get_autocast_dtype("cuda")
        for i in positions[: len(args)]:
            for tensor in args[i] if isinstance(args[i], list | tuple) else (args[i],):
                found = _wider(found, tensor, lower)
        return found

    return _casting(operator, casts, widest)


def _wider(found: torch.dtype, tensor: Tensor | None, lower: torch.dtype) -> torch.dtype:
    if tensor is None or not eligible(tensor):
        return found
    if WIDE in (found, tensor.dtype):
        return WIDE
    if tensor.dtype is not lower:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return found


def _set_dtype(operator: Any, _: Casts) -> Kernel:
    names = [argument.name for argument in operator._schema.arguments]
    at = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            given = args[at] if at < len(args) else kwargs.get("dtype")
            if given is None and eligible(args[0]):
                args, kwargs = args[:at], {**kwargs, "dtype": WIDE}
            return operator(*args, **kwargs)

    return kernel


def _append_dtype(operator: Any, _: Casts) -> Kernel:
    schema = operator._schema
    target = _overload(DTYPE_OVERLOADS[f"{schema.name.removeprefix('aten::')}.{schema.overload_name}"])
    defaults = [argument.default_value for argument in schema.arguments]

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            dtype = WIDE if eligible(args[0]) else args[0].dtype
            return target(*args, *defaults[len(args) :], dtype=dtype)

    return kernel


def _banned(_: Any, __: Casts) -> Kernel:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        )

    return kernel


_MAKERS: dict[Policy, Callable[[Any, Casts], Kernel]] = {
    "lower": _lower,
    "fp32": _fp32,
    "set_dtype": _set_dtype,
    "append_dtype": _append_dtype,
    "promote": _promote,
    "banned": _banned,
}
