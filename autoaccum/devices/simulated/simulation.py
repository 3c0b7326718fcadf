"""PyTorch on a card that is not there: CUDA tensors are fake, everything on the CPU stays real (facts 1).

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
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.simulated import autocast, builds
from autoaccum.devices.simulated.adaptations import adapt_functions
from autoaccum.devices.simulated.card_mode import DEVICE_QUERY, CardMode, device_seen_by_cpp
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.checkpoints import read_checkpoints
from autoaccum.devices.simulated.impersonation import impersonate
from autoaccum.devices.simulated.kernels import (
    attention,
    convolution,
    ctc,
    dropout,
    foreach,
    normalisation,
    rnn,
    softmax,
    sparse,
)
from autoaccum.devices.simulated.numbering import hash_by_number
from autoaccum.devices.simulated.patches import replaced
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.values import asked_by_torch

_OVERRIDES = (builds, autocast, attention, convolution, ctc, dropout, foreach, normalisation, rnn, softmax, sparse)
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
    """What no tensor is an instance of."""


def _is_of(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind
