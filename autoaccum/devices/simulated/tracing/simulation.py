"""PyTorch on a card that is not there: CUDA tensors are fake, everything on the CPU stays real.

`FakeTensorMode` alone runs no backward pass on CUDA tensors without a GPU: C++ asks a tensor for its device and takes
CUDA's guards and streams, which need one. Here that question (`prim.device`) is answered with `meta`, whose path every
build of PyTorch has; Python sees `cuda:0`, and the dispatch keys stay CUDA's, so that its kernels are still chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.kernels import attention, layers, rnn, sparse
from autoaccum.devices.simulated.patches import patch_hashes, patched, torch_release
from autoaccum.devices.simulated.tracing import autocast
from autoaccum.devices.simulated.tracing.dispatch_mode import DEVICE_QUERY, FakeCudaMode, device_seen_by_cpp
from autoaccum.devices.simulated.tracing.fake_cuda import DEVICE, check_index, patch_torch_cuda
from autoaccum.devices.simulated.tracing.placement import convert_module, patch_torch_load
from autoaccum.devices.simulated.tracing.recorder import Recorder
from autoaccum.devices.simulated.tracing.value_reads import (
    calling_torch_module,
    read_array,
    read_list,
    unknown_value_error,
)
from autoaccum.devices.simulated.unsupported import UnsupportedError

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
        stack.enter_context(patched(_METAS, "_meta_grouped_mm_common", _grouped_product))


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
def simulate(card: Card, recorder: Recorder | None = None) -> Iterator[FakeCudaMode]:
    """Have PyTorch believe in `card`; meant for a process of its own, and undone at the end all the same."""
    with ExitStack() as stack:
        mode = FakeCudaMode(card, recorder or Recorder())
        _answer_device_queries(stack)
        _hide_fake_tensors(stack)
        patch_torch_cuda(card, mode.recorder, stack)
        patch_functions(mode.notices, stack)
        patch_torch_load(stack)
        patch_hashes(mode.numbering, stack)
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

    stack.enter_context(patched(FakeTensor, "__torch_dispatch__", classmethod(answer_first)))
    stack.enter_context(patched(fake_tensor, "init_gpu_context", lambda device: None))
    before = handlers[DEVICE_QUERY]
    handlers[DEVICE_QUERY] = answer
    stack.callback(handlers.__setitem__, DEVICE_QUERY, before)
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta")):
        stack.enter_context(patched(FakeTensor, name, property(partial(_is_of, kind))))
    stack.enter_context(patched(FakeTensor, "get_device", lambda tensor: 0 if tensor.device.type == "cuda" else -1))


def _hide_fake_tensors(stack: ExitStack) -> None:
    """Let no library see that tensors are fake: it would take another path, as one that is being traced.

    PyTorch itself, which has to know, is told as before.
    """
    names: dict[str, Any] = vars(torch._subclasses)

    def tell(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
        return FakeTensor if calling_torch_module() else _NoTensor

    names["__getattr__"] = tell
    del names["FakeTensor"]
    stack.callback(names.pop, "__getattr__")
    stack.callback(names.__setitem__, "FakeTensor", FakeTensor)


class _NoTensor:
    """A class no tensor is an instance of."""


def _is_of(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind


COMPILED = (
    "the model is compiled (torch.compile), and its eager step is what is predicted: compiled, it takes less as a rule"
)
_META = torch.device("meta")
_AS_TENSOR, _TENSOR = torch.as_tensor, torch.tensor
_NATIVE_GENERATOR: Any = torch.Generator


def patch_functions(notices: dict[str, None], stack: ExitStack) -> None:
    """Exchange them until `stack` is closed."""
    for owner, name, value in (
        (torch.Tensor, "to", _to),
        (torch.Tensor, "cuda", _cuda),
        (torch, "Generator", Generator),
        (FakeTensor, "tolist", read_list),
        (torch, "tensor", _tensor),
        (torch, "as_tensor", _as_tensor),
        (torch, "compile", partial(_eager, notices)),
        (torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor),
        (FakeTensor, "numpy", read_array),
        (FakeTensor, "__array__", read_array),
        (FakeTensor, "__dlpack__", _unreadable),
        (FakeTensor, "data_ptr", _data_ptr),
        (torch.nn.Module, "_apply", convert_module),
        (torch.nn.DataParallel, "forward", _scattered),
        (torch.distributions.Distribution, "_validate_args", False),  # They would read values of the card.
    ):
        stack.enter_context(patched(owner, name, value))


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, with the card as C++ knows it.

    By its index, since a CPU build would ask the driver which card `cuda` means; and as `meta` for a tensor that is
    there already, which would be copied otherwise.
    """
    here = isinstance(tensor, FakeTensor) and tensor.device == DEVICE
    args = tuple(_as_seen(arg, here) for arg in args)
    kwargs = {name: _as_seen(value, here) for name, value in kwargs.items()}
    return torch._C.TensorBase.to(tensor, *args, **kwargs)


def _as_seen(value: Any, here: bool) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # `.cuda(0)`
        value = torch.device("cuda", value)
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        device = torch.device(value)
        if device.index in (None, 0):
            return _META if here else DEVICE
    return value


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return _to(data, **{name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None})
    return _AS_TENSOR(_read(data), dtype=dtype, device=_as_seen(device, here=False))


def _tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _TENSOR(_read(data), *args, **kwargs)


def _read(data: Any) -> Any:
    """A nest of numbers without those of the card, which C++ would ask for their values unseen."""
    if not isinstance(data, list | tuple) or not any(isinstance(one, FakeTensor | list | tuple) for one in data):
        return data
    return [one.tolist() if isinstance(one, FakeTensor) else _read(one) for one in data]


def _cuda(tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return _to(tensor, DEVICE if device is None else device)


class _Generators(type(_NATIVE_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _NATIVE_GENERATOR)


class Generator(_NATIVE_GENERATOR, metaclass=_Generators):  # type: ignore[misc]
    """`torch.Generator`; one for the card is the host's, whose numbers nobody sees."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator for a device."""
        return super().__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)

    def __init__(self, device: Any = "cpu") -> None:
        check_index(device)
        asked = torch.device(device)
        self._asked = DEVICE if asked.type == "cuda" else asked

    @property
    def device(self) -> torch.device:
        """Return what it was asked for."""
        return self._asked


def _unreadable(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    raise unknown_value_error(tensor)


def _data_ptr(tensor: torch.Tensor) -> int:
    """A number of its own for each place, for those who only compare; 0 for who asks whether there is memory."""
    asker = calling_torch_module()
    if asker is None:
        raise UnsupportedError("the address of a tensor on the card is taken, as for a kernel of one's own")
    place = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
    return 0 if asker == "torch._tensor" else place


def _scattered(module: torch.nn.DataParallel[Any], *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "nn.DataParallel divides a batch among cards, and one card is simulated",
        hint="plan the module without it: have model() return what it wraps",
    )


def _eager(notices: dict[str, None], model: Any = None, **options: Any) -> Any:
    """`torch.compile`, as a function or as a decorator with options: there is no kernel to compile for.

    It is said once what was compiled runs: libraries compile functions as they are imported that nobody calls.
    """
    if model is None:
        return partial(_eager, notices)

    def note(*_: Any) -> None:
        notices[COMPILED] = None

    if isinstance(model, torch.nn.Module):
        model.register_forward_pre_hook(note)
        return model

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not given or any(leaf.is_cuda for leaf in given):  # What prepares a batch is not the step's.
            note()
        return model(*args, **kwargs)

    return run
