"""PyTorch on a simulated card: CUDA tensors are fake, tensors on the CPU stay real.

`FakeTensorMode` alone cannot run a backward pass on CUDA tensors without a GPU: C++ asks a tensor for its device and
then uses CUDA's guards and streams. Here this query (`prim.device`) returns `meta`, which every build of PyTorch
supports. Python still sees `cuda:0`, and the dispatch keys stay CUDA's, so CUDA's kernels are chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, thread, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, partialmethod, wraps
from importlib import import_module
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from autoaccum.messages import Message, message
from autoaccum.simulation.cards import Card, CardInUse
from autoaccum.simulation.operators.registry import install_kernels
from autoaccum.simulation.releases import Release
from autoaccum.simulation.torch_patches import cudnn_version, patch, patch_hashes, register_missing, torch_release
from autoaccum.simulation.tracing import autocast
from autoaccum.simulation.tracing.dispatch_mode import DEVICE_QUERY, FakeCudaMode, device_seen_by_cpp
from autoaccum.simulation.tracing.fake_cuda import DEVICE, check_index, patch_torch_cuda
from autoaccum.simulation.tracing.placement import patch_placement
from autoaccum.simulation.tracing.reads import calling_module, read_array, read_list, unknown_value_error
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.values import find_tensors, forget_values
from autoaccum.simulation.unsupported import UnsupportedError

_CUDA_KERNELS = ("mish_backward", "silu_backward", "_fused_rms_norm")
"""Operators with a CUDA kernel and a composite kernel for other devices (native_functions.yaml). A build without CUDA
would run the composite kernel, which allocates temporaries."""
_METAS: Any = torch._meta_registrations
_GROUPED_MM = _METAS._meta_grouped_mm_common
_META = torch.device("meta")
_AS_TENSOR, _TENSOR = torch.as_tensor, torch.tensor
_NATIVE_GENERATOR: Any = torch.Generator
_WAIT_SECONDS = 1.0
"""Long enough to load a tensor in another thread; work that waits for its caller goes on afterwards."""
_Thread: Any = threading.Thread


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `_grouped_mm` without values in fp32 and fp16 like CUDA (`GroupedMMUtils.h`), where PyTorch would not."""
    try:
        return _GROUPED_MM(mat_a, mat_b, *args, **kwargs)
    except RuntimeError:
        if mat_a.dtype not in (torch.float32, torch.float16) or mat_b.dtype != mat_a.dtype:
            raise
    return _METAS._create_grouped_mm_output_tensor(mat_a, mat_b, kwargs["offs"], None)


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a CUDA kernel of the simulated card was called with real tensors")


@contextmanager
def simulate(
    card: Card | CardInUse, recorder: Recorder | None = None, torch_version: Release | None = None
) -> Iterator[FakeCudaMode]:
    """Simulate `card` in this process, preferably one of its own; everything is restored at the end.

    `torch_version` is the release whose `releases.RULES` are followed, None the installed one; operators of Python and
    C++ stay the installed ones.
    """
    in_use, torch_version = CardInUse(card) if isinstance(card, Card) else card, torch_version or torch_release()
    with ExitStack() as stack:
        mode = FakeCudaMode(recorder or Recorder(), torch_version)
        _patch_device_queries(stack)
        _hide_fake_tensors(stack)
        patch_torch_cuda(in_use, mode.recorder, cudnn_version(torch_version), stack)
        _patch_functions(mode, stack)
        patch_placement(stack)
        patch_hashes(mode.numbering, stack)
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        stack.callback(library._destroy)
        # They are never called, but without them their operators would be decomposed.
        register_missing(library, dict.fromkeys(_CUDA_KERNELS, _never_called), "CUDA")
        autocast.install(library, stack)
        install_kernels(library, in_use, torch_version, stack)
        stack.enter_context(mode)
        _follow_threads(mode, stack)
        yield mode


def _launch_nothing(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Stand for a launch of a kernel of Triton: it writes to tensors that are there, and takes no memory itself."""
    for tensor in find_tensors((*args, *kwargs.values())):
        if isinstance(tensor, FakeTensor):
            forget_values(tensor)


def _patch_device_queries(stack: ExitStack) -> None:
    dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__
    handlers = fake_tensor._DISPATCH_META_HANDLERS

    def answer(args: Sequence[Any]) -> torch.device:
        return device_seen_by_cpp(args[0])

    def answer_first(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(args) if func is DEVICE_QUERY else dispatch(cls, func, types, args, kwargs or {})

    patch(stack, FakeTensor, "__torch_dispatch__", classmethod(answer_first))
    patch(stack, fake_tensor, "init_gpu_context", lambda device: None)
    before = handlers[DEVICE_QUERY]
    handlers[DEVICE_QUERY] = answer
    stack.callback(handlers.__setitem__, DEVICE_QUERY, before)
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta")):
        patch(stack, FakeTensor, name, property(partial(_is_of, kind)))
    patch(stack, FakeTensor, "get_device", lambda tensor: 0 if tensor.device.type == "cuda" else -1)


def _hide_fake_tensors(stack: ExitStack) -> None:
    """Hide `FakeTensor` from libraries, which would otherwise behave as under tracing; PyTorch itself still sees it."""
    names: dict[str, Any] = vars(torch._subclasses)

    def get_attribute(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
        return FakeTensor if f"{calling_module()}.".startswith("torch.") else _NoTensor

    names["__getattr__"] = get_attribute
    del names["FakeTensor"]
    stack.callback(names.pop, "__getattr__")
    stack.callback(names.__setitem__, "FakeTensor", FakeTensor)


class _NoTensor:
    """A class without instances."""


def _is_of(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind


def _patch_functions(mode: FakeCudaMode, stack: ExitStack) -> None:
    """Patch functions of PyTorch that create, move or read tensors until `stack` is closed."""
    resize = torch.UntypedStorage.resize_

    def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
        """Record memory that code frees and takes again without an operator, as FSDP2 does."""
        resized = resize(storage, size)
        mode.recorder.record_resized(storage)
        return resized

    for owner, name, value in (
        (torch.Tensor, "to", _to),
        (torch.Tensor, "cuda", lambda tensor, device=None, *_, **__: _to(tensor, DEVICE if device is None else device)),
        (torch.UntypedStorage, "resize_", resize_and_record),
        (torch, "Generator", Generator),
        (FakeTensor, "__getitem__", _indexed(torch.Tensor.__getitem__)),
        (FakeTensor, "__setitem__", _indexed(torch.Tensor.__setitem__)),
        (FakeTensor, "tolist", read_list),
        (torch, "tensor", lambda data, *args, **kwargs: _TENSOR(_read_scalars(data), *args, **kwargs)),
        (torch, "as_tensor", _as_tensor),
        (torch, "compile", partial(_eager, mode.notices)),
        (torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor),
        (FakeTensor, "numpy", read_array),
        (FakeTensor, "__array__", read_array),
        (FakeTensor, "__dlpack__", _raise_unknown_value),
        (FakeTensor, "data_ptr", _data_ptr),
        (torch.nn.DataParallel, "forward", run_on_card),
        (_METAS, "_meta_grouped_mm_common", _grouped_mm),
        (DeviceContext, "__torch_function__", partialmethod(_make_in_context, DeviceContext.__torch_function__)),
        (torch.distributions.Distribution, "_validate_args", False),  # It would read values.
    ):
        patch(stack, owner, name, value)
    with suppress(ImportError):
        triton: Any = import_module("triton.runtime.jit")
        patch(stack, triton.JITFunction, "run", _launch_nothing)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `Tensor.to` with a device that C++ accepts for the card.

    This is `cuda:0`, since a CPU build would ask the driver which card `cuda` means; or `meta` for a tensor that is
    already on the card, which would be copied otherwise.
    """
    on_card = isinstance(tensor, FakeTensor) and tensor.device == DEVICE
    args = tuple(_device_for_cpp(arg, on_card) for arg in args)
    kwargs = {name: _device_for_cpp(value, on_card) for name, value in kwargs.items()}
    return torch._C.TensorBase.to(tensor, *args, **kwargs)


def _device_for_cpp(value: Any, on_card: bool) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # `.cuda(0)`
        value = torch.device("cuda", value)
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        device = torch.device(value)
        if device.index in (None, 0):
            return _META if on_card else DEVICE
    return value


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return _to(data, **{name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None})
    return _AS_TENSOR(_read_scalars(data), dtype=dtype, device=_device_for_cpp(device, on_card=False))


def _read_scalars(data: Any) -> Any:
    """Replace fake tensors in nested lists by their values, which C++ would read without a check."""
    if not isinstance(data, list | tuple) or not any(isinstance(item, FakeTensor | list | tuple) for item in data):
        return data
    return [item.tolist() if isinstance(item, FakeTensor) else _read_scalars(item) for item in data]


def _indexed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__getitem__` or `__setitem__` with lists of the index moved to the card, as C++ would without values."""

    def run(tensor: Tensor, index: Any, *value: Any) -> Any:
        if isinstance(index, tuple):
            index = tuple(_move_list(part, tree_leaves(part), tensor.device) for part in index)
        elif isinstance(index, list | range):  # One with lists in it is a tuple for C++.
            index = _move_list(index, index, tensor.device)
        return function(tensor, index, *value)

    return run


def _move_list(index: Any, numbers: Sequence[Any], device: torch.device) -> Any:
    if not isinstance(index, list | tuple | range) or not all(isinstance(number, int | range) for number in numbers):
        return index
    return _to(torch.tensor(index, dtype=None if numbers else torch.int64), device)


class _Generators(type(_NATIVE_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _NATIVE_GENERATOR)


class Generator(_NATIVE_GENERATOR, metaclass=_Generators):  # type: ignore[misc]
    """`torch.Generator`; one for the card is a CPU generator, since its numbers are never used."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator for a device."""
        return super().__new__(cls, "cpu" if torch.device(device).type == "cuda" else device)

    def __init__(self, device: Any = "cpu") -> None:
        check_index(device)
        requested = torch.device(device)
        self._device = DEVICE if requested.type == "cuda" else requested

    @property
    def device(self) -> torch.device:
        """The requested device."""
        return self._device


def _raise_unknown_value(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    raise unknown_value_error(tensor)


def _data_ptr(tensor: FakeTensor) -> int:
    """Return a distinct number for each address, as code that compares needs; 0 to code that checks for memory."""
    caller = calling_module()
    mode: Any = tensor.fake_mode
    if not f"{caller}.".startswith("torch.") and mode.refuses_reads():
        raise UnsupportedError("the address of a tensor on the card is read, as for a custom kernel")
    address = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
    return 0 if caller == "torch._tensor" else address


def run_on_card(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Run what `nn.DataParallel` or DDP wraps, with its inputs on the card."""
    inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), (inputs, kwargs))
    return wrapper.module(*inputs, **kwargs)


def _make_in_context(context: Any, run: Callable[..., Any], func: Any, *call: Any) -> Any:
    """Make real meta tensors under `torch.device("meta")`: elsewhere in a simulation, `meta` stands for the card."""
    is_plain = context.device.type == "meta" and func in _device_constructors()
    with _disable_current_modes() if is_plain else nullcontext():
        return run(context, func, *call)


def _eager(notices: dict[Message, None], model: Any = None, **options: Any) -> Any:
    """Replace `torch.compile`, as a function or a decorator: return the model or function without compiling it.

    The notice is given when it first runs, since libraries compile functions on import that are never called.
    """
    if model is None:
        return partial(_eager, notices)

    def note(*_: Any) -> None:
        notices[message("compiled")] = None

    if isinstance(model, torch.nn.Module):
        model.register_forward_pre_hook(note)
        return model

    @wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(leaf.is_cuda for leaf in tensors):  # Functions that prepare a batch do not count.
            note()
        return model(*args, **kwargs)

    return run


def _follow_threads(mode: FakeCudaMode, stack: ExitStack) -> None:
    """Enter `mode`, which belongs to a thread, in each thread that starts until `stack` is closed.

    On a real card, the allocations of threads come in any order. Here, whoever starts a thread or gives work to a pool
    waits for it a little, so that the order is nearly always the same. A function is no longer waited for once the
    waits in which it left the card alone add up to `_WAIT_SECONDS`, as those of downloads and endless workers do.
    """
    start, run, submit = _Thread.start, _Thread._bootstrap_inner, ThreadPoolExecutor.submit
    idle: dict[str, float] = {}

    def wait_for(function: Any, wait: Callable[[float], Any]) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        begun, events = perf_counter(), len(mode.recorder.events)
        if (left := _WAIT_SECONDS - idle.setdefault(name, 0.0)) > 0:
            wait(left)
            if len(mode.recorder.events) == events:
                idle[name] += perf_counter() - begun

    def start_and_wait(starting: Any) -> None:
        start(starting)
        function = getattr(starting, "_target", None) or type(starting)
        if not starting.daemon and function is not thread._worker:
            wait_for(function, starting.join)

    def run_thread(running: Any) -> None:
        with mode:
            run(running)

    def submit_and_wait(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = submit(pool, function, *args, **kwargs)
        wait_for(function, partial(wait, [future]))
        return future

    patch(stack, _Thread, "start", start_and_wait)
    patch(stack, _Thread, "_bootstrap_inner", run_thread)
    patch(stack, ThreadPoolExecutor, "submit", submit_and_wait)
    run_plainly = MethodType(_run_plainly, mode)  # For threads that outlive the simulation.
    stack.callback(setattr, mode, "__torch_dispatch__", run_plainly)


def _run_plainly(_: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    return func(*args, **kwargs or {})
