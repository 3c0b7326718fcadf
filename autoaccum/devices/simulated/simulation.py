"""PyTorch on a card that is not there: CUDA tensors are fake, everything on the CPU stays real (facts 1).

`FakeTensorMode` alone runs no backward pass on CUDA tensors without a GPU: C++ asks a tensor for its device and takes
CUDA's guards and streams, which need one. Here that question (`prim.device`) is answered with `meta`, whose path every
build of PyTorch has; Python sees `cuda:0`, and the dispatch keys stay CUDA's, so that its kernels are still chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoaccum.devices.base import Phase
from autoaccum.devices.simulated import autocast, builds
from autoaccum.devices.simulated.adaptations import adapt_functions
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.checkpoints import read_checkpoints
from autoaccum.devices.simulated.impersonation import DEVICE, ONE_CARD, impersonate
from autoaccum.devices.simulated.kernels import (
    attention,
    convolution,
    ctc,
    dropout,
    foreach,
    normalisation,
    rnn,
    softmax,
)
from autoaccum.devices.simulated.kernels.release import torch_release
from autoaccum.devices.simulated.kernels.scratch_observer import ScratchObserver, Seen
from autoaccum.devices.simulated.patches import replaced
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.repetitions import Repetitions
from autoaccum.devices.simulated.values import SimulationLimit, answer_scalar

_META, _CPU = torch.device("meta"), torch.device("cpu")
_DEVICE_QUERY = torch.ops.prim.device.default
_READS = torch.ops.aten._local_scalar_dense.default
_aten = torch.ops.aten
_FACTORIES = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.randn.default,
    }
)
_INDEXING = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
        _aten._unsafe_index.Tensor,
        _aten._unsafe_index_put.default,
    }
)
_OVERRIDES = (builds, autocast, attention, convolution, ctc, dropout, foreach, normalisation, rnn, softmax)
"""Who chooses as CUDA would, where PyTorch's C++ decides by a device that it does not see here."""

_LAZY_ELEMENTS = 1 << 14
"""Tensors of at least so many elements are not materialised while a model is built; smaller ones are, since
constructors read them (a schedule of drop rates, say)."""


class CardMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on CUDA tensors without values, and shows their storages to a recorder.

    Operators on CPU tensors alone run as always.

    Attributes:
        recorder: Is shown what operators return.
        lazy: Whether large CPU tensors are left without values too, as they are made.
        notices: Sentences on what is simulated otherwise than it would run.
        phase: Where the last rehearsal was when it ended, one way or another.
    """

    avoid_device_init = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: without this, each operator pays for keeping the compiler away."""
        return False

    def __init__(self, card: Card, recorder: Recorder) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.recorder = recorder
        self.lazy = False
        self.notices: dict[str, None] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.phase: Phase = "start"
        self._depth = 0
        self._repetitions = Repetitions(self._make)
        self._observer = ScratchObserver(card, torch_release())
        self._seen: dict[Any, Seen] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUERY:  # Most of all calls are this question.
            return _device_seen_by_cpp(args[0])
        kwargs = {} if kwargs is None else kwargs
        if "device" in kwargs:
            kwargs = self._with_device(kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # It takes a driver; what is pinned is on the host.
        if not self._is_ours(func, args, kwargs):
            return func(*args, **kwargs)
        if func in _INDEXING:
            args = [args[0], _numbered(args[1]), *args[2:]]
        if func is _READS:
            return answer_scalar(args[0])
        if self._depth > 0:
            return self.dispatch(func, types, args, kwargs)
        key = self._repetitions.key(func, args, kwargs)
        remake = None if key is None else self._repetitions.find(key)
        if remake is not None:
            out = remake(args)
        else:
            self._depth = 1
            try:
                out = self.dispatch(func, types, args, kwargs)
            finally:
                self._depth = 0
            if key is not None:
                self._repetitions.learn(key, func, args, out)
        self.recorder.see(out)
        self._take_scratch(key, func, args, kwargs, out)
        return out

    def _take_scratch(self, key: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Show the recorder what the operator takes beside its tensors."""
        in_backward = torch._C._current_autograd_node() is not None
        seen = None if key is None else self._seen.get((key, in_backward))
        if seen is None:
            seen = self._observer.see(func, args, kwargs, out, in_backward=in_backward)
            if key is not None:
                self._seen[key, in_backward] = seen
        for scratch in seen.resident:
            self.recorder.keep(scratch)
        for index, scratch in seen.beside:
            self.recorder.accompany(out[index], scratch)
        if seen.transient:
            self.recorder.take(seen.transient)

    def _make(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        base: torch.Tensor | None = None,
        offset: int = 0,
        nbytes: int | None = None,
    ) -> FakeTensor:
        """A tensor on the card, of as many bytes if that is said; a view of `base` where one is given."""
        if base is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            if nbytes is not None and made.untyped_storage().nbytes() != nbytes:
                made.untyped_storage().resize_(nbytes)
            return FakeTensor(self, made, DEVICE)
        made = torch.empty(0, dtype=dtype, device=_META)
        with torch.no_grad(), fake_tensor.in_kernel_invocation_manager(self):
            made.set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(self, made, DEVICE)

    def _get_output_info_for_cache_entry(self, *args: Any) -> Any:
        """Keep tensors out of FakeTensorMode's own cache whose storage is larger than they are: it forgets that.

        Rows padded to a multiple of 8 are, such as the gradient of an attention mask. Source:
        `_get_output_tensor_from_cache_entry` in `torch/_subclasses/fake_tensor.py`.
        """
        info = super()._get_output_info_for_cache_entry(*args)
        if info.view_idx is None and info.inplace_idx is None and _is_padded(args[-1]):
            raise fake_tensor._BypassDispatchCache("a storage larger than its tensor")
        return info

    def _is_ours(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a fake tensor is among the arguments, or is to be made, or another operator takes itself apart."""
        if self._depth > 0 or _has_fake(args) or (kwargs and _has_fake(kwargs.values())):
            return True
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return True
        return self.lazy and func in _FACTORIES and math.prod(args[0]) >= _LAZY_ELEMENTS

    def _with_device(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with a device of the card: what C++ makes like a fake CUDA tensor, it makes on `meta`."""
        device = kwargs["device"]
        if device is None:
            return dict(kwargs)
        device = torch.device(device)
        if device.type == "meta" and (self._depth == 0 or not self.in_kernel_invocation):
            device = _CPU if self.lazy else DEVICE
        if device.type == "cuda" and device != DEVICE:
            if device.index is not None:
                raise SimulationLimit(f"a tensor is put on {device}, and one card is simulated", hint=ONE_CARD)
            device = DEVICE
        return {**kwargs, "device": device}


@contextmanager
def simulate(card: Card, recorder: Recorder | None = None) -> Iterator[CardMode]:
    """Have PyTorch believe in `card`; meant for a process of its own, and undone at the end all the same."""
    with ExitStack() as stack:
        mode = CardMode(card, recorder or Recorder())
        _answer_device_queries(stack)
        impersonate(card, mode.recorder, stack)
        adapt_functions(mode.notices, stack)
        read_checkpoints(stack)
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
        return _device_seen_by_cpp(args[0])

    def answer_first(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(args) if func is _DEVICE_QUERY else dispatch(cls, func, types, args, kwargs or {})

    stack.enter_context(replaced(FakeTensor, "__torch_dispatch__", classmethod(answer_first)))
    stack.enter_context(replaced(fake_tensor, "init_gpu_context", lambda device: None))
    before = handlers[_DEVICE_QUERY]
    handlers[_DEVICE_QUERY] = answer
    stack.callback(handlers.__setitem__, _DEVICE_QUERY, before)
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta")):
        stack.enter_context(replaced(FakeTensor, name, property(partial(_is_of, kind))))
    stack.enter_context(replaced(FakeTensor, "get_device", lambda tensor: 0 if tensor.device.type == "cuda" else -1))


def _device_seen_by_cpp(tensor: FakeTensor) -> torch.device:
    device = tensor.fake_device
    return _META if device.type == "cuda" or tensor.fake_mode.in_kernel_invocation else device


def _is_of(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind


def _numbered(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks on the host have values: the indices they stand for, as `expandTensors` in `IndexingUtils.h` has them."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        else:
            found.extend(index.nonzero().unbind(1))
    return found


def _is_padded(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() != (last + 1) * tensor.itemsize


def _has_fake(values: Any) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            return True
        if isinstance(value, list | tuple) and value and _has_fake(value):
            return True
    return False
