"""PyTorch on a card that is not there: CUDA tensors are fake, everything on the CPU stays real.

`FakeTensorMode` alone runs no backward pass on CUDA tensors without a GPU: C++ asks a tensor for its device and takes
CUDA's guards and streams, which need one. Here that question (`prim.device`) is answered with `meta`, whose path every
build of PyTorch has; Python sees `cuda:0`, and the dispatch keys stay CUDA's, so that its kernels are still chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.simulated import autocast
from autoaccum.devices.simulated.adaptations import adapt_functions
from autoaccum.devices.simulated.card_mode import DEVICE_QUERY, CardMode, device_seen_by_cpp
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.impersonation import impersonate
from autoaccum.devices.simulated.kernels import attention, layers, rnn, sparse
from autoaccum.devices.simulated.patches import hash_by_number, replaced, torch_release
from autoaccum.devices.simulated.placement import read_checkpoints
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.values import asked_by_torch

OWN_KERNELS = ("mish_backward", "silu_backward", "_fused_rms_norm")
"""Operators with a kernel of CUDA's and a composite one for the rest (native_functions.yaml): a build that has not the
first takes the second, and with it a handful of temporaries."""
_METAS: Any = torch._meta_registrations
_GROUPED_PRODUCT = _METAS._meta_grouped_mm_common


def _install_own_kernels(library: torch.library.Library, stack: ExitStack) -> None:
    """Have operators stay whole that CUDA has kernels for; none of these is ever called."""
    register: Any = library.impl
    for name in OWN_KERNELS:
        known = f"aten::{name}" in torch._C._dispatch_get_all_op_names()
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            register(name, _never_called, "CUDA")
    if torch_release() < (2, 15):
        stack.enter_context(replaced(_METAS, "_meta_grouped_mm_common", _grouped_product))


def _grouped_product(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`_grouped_mm` without values; up to 2.14 that knows bf16 alone, a card fp32 and fp16 too (`GroupedMMUtils.h`)."""
    if mat_a.dtype not in (torch.float32, torch.float16) or mat_b.dtype != mat_a.dtype:
        return _GROUPED_PRODUCT(mat_a, mat_b, *args, **kwargs)
    return _METAS._create_grouped_mm_output_tensor(mat_a, mat_b, kwargs["offs"], None)


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of the simulated card was reached: fake tensors stop before")


_OVERRIDES = (autocast, attention, layers, rnn, sparse)
"""Who chooses as CUDA would, where PyTorch's C++ decides by a device that it does not see here."""


@contextmanager
def simulate(card: Card, recorder: Recorder | None = None) -> Iterator[CardMode]:
    """Have PyTorch believe in `card`; meant for a process of its own, and undone at the end all the same."""
    with ExitStack() as stack:
        mode = CardMode(card, recorder or Recorder())
        _answer_device_queries(stack)
        _hide_fake_tensors(stack)
        impersonate(card, mode.recorder, stack)
        adapt_functions(mode.notices, stack)
        read_checkpoints(stack)
        hash_by_number(mode.numbering, stack)
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        stack.callback(library._destroy)
        _install_own_kernels(library, stack)
        for overrides in _OVERRIDES:
            overrides.install(library, card, stack)
        stack.enter_context(mode)
        yield mode


def _answer_device_queries(stack: ExitStack) -> None:
    dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__
    handlers = fake_tensor._DISPATCH_META_HANDLERS

    def answer(args: Sequence[Any]) -> torch.device:
        return device_seen_by_cpp(args[0])

    def answer_first(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(args) if func is DEVICE_QUERY else dispatch(cls, func, types, args, kwargs or {})

    stack.enter_context(replaced(FakeTensor, "__torch_dispatch__", classmethod(answer_first)))
    stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
    before = handlers[DEVICE_QUERY]
    handlers[DEVICE_QUERY] = answer
    stack.callback(handlers.__setitem__, DEVICE_QUERY, before)
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta")):
        stack.enter_context(replaced(FakeTensor, name, property(partial(_is_of, kind))))
    stack.enter_context(replaced(FakeTensor, "get_device", lambda tensor: 0 if tensor.device.type == "cuda" else -1))


def _hide_fake_tensors(stack: ExitStack) -> None:
    """Let no library see that tensors are fake: it would take another path, as one that is being traced.

    PyTorch itself, which has to know, is told as before.
    """
    names: dict[str, Any] = vars(torch._subclasses)

    def tell(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
        return FakeTensor if asked_by_torch() else _NoTensor

    names["__getattr__"] = tell
    del names["FakeTensor"]
    stack.callback(names.pop, "__getattr__")
    stack.callback(names.__setitem__, "FakeTensor", FakeTensor)


class _NoTensor:
    """A class no tensor is an instance of."""


def _is_of(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind
