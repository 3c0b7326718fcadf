"""`torch.cuda`, `torch.accelerator` and `torch.backends.cudnn` for the simulated card.

User code queries them before it chooses a device, a dtype or a kernel. Functions that need a driver raise the error
that PyTorch raises without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any, ClassVar, NoReturn
from uuid import NAMESPACE_URL, uuid5

import torch

from autoaccum.simulation.cards import Card, CardInUse
from autoaccum.simulation.torch_patches import cudnn_version, patch
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.unsupported import UnsupportedError

DEVICE = torch.device("cuda", 0)
ONE_CARD = "put everything on cuda:0, or plan on the machine that has the cards (--device cuda)"
_NO_OPERATION = """
caching_allocator_enable check_error ipc_collect manual_seed manual_seed_all
reset_accumulated_host_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached
reset_peak_host_memory_stats reset_peak_memory_stats seed seed_all set_per_process_memory_fraction set_rng_state
set_rng_state_all set_sync_debug_mode synchronize _lazy_init
"""
_NEEDS_DRIVER = """
caching_allocator_alloc caching_allocator_delete change_current_allocator clock_rate current_blas_handle
current_solver_handle graph_pool_handle power_draw temperature
"""
_EMPTY_CACHE = ("empty_cache", "_cuda_emptyCache", "_accelerator_emptyCache")
_NO_DRIVER = "cuda driver can't be loaded, is cuda enabled?"
"""The message of `torch.cuda` if NVML finds no driver."""


def patch_torch_cuda(card: CardInUse, recorder: Recorder, stack: ExitStack) -> None:
    """Make `torch.cuda`, `torch.accelerator` and `torch.backends.cudnn` report `card` until `stack` is closed."""
    streams = stream_answers(recorder)
    answers = streams | _answers(card, recorder)
    answers |= dict.fromkeys(_NO_OPERATION.split(), _do_nothing)
    answers |= dict.fromkeys(_NEEDS_DRIVER.split(), partial(_raise, _NO_DRIVER))
    for name, answer in answers.items():
        for owner in (torch.cuda, torch.cuda.memory, *((torch._C,) if name in _EMPTY_CACHE else ())):
            if hasattr(owner, name):
                patch(stack, owner, name, answer)
    patch(stack, torch.cuda, "_initialized", True)
    patch(stack, torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    of_streams = {name: streams[name] for name in ("current_stream", "set_stream")}
    for name, answer in (_accelerator_answers(card, recorder) | of_streams).items():
        for owner in (torch.accelerator, torch.accelerator.memory):
            if hasattr(owner, name):
                patch(stack, owner, name, answer)
    cudnn: Any = torch.backends.cudnn
    patch(stack, cudnn, "is_available", lambda: True)
    # PyTorch's own refuses the cards that this build's cuDNN has no kernels for.
    patch(stack, cudnn, "version", cudnn_version)
    nvtx: Any = torch.cuda.nvtx
    for name in ("range_push", "range_pop", "mark"):
        patch(stack, nvtx, name, _do_nothing)
    patch(stack, nvtx, "range", lambda *_, **__: nullcontext())


def _answers(card: CardInUse, recorder: Recorder) -> dict[str, Any]:
    return {
        **dict.fromkeys(("device", "device_of", "_DeviceGuard"), _Guard),
        **_memory_answers(card, recorder),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": check_index,
        "get_device_name": _query(lambda: card.answer(lambda one: one.title)),
        "get_device_capability": _query(lambda: card.answer(lambda one: one.capability)),
        "get_device_properties": _query(lambda: _CudaDeviceProperties(card)),
        "get_arch_list": lambda: ["sm_{}{}".format(*card.answer(lambda one: one.capability))],
        "get_gencode_flags": lambda: "",
        "can_device_access_peer": lambda *_: False,
        "get_sync_debug_mode": lambda: 0,
        "get_allocator_backend": lambda: "native",
        "initial_seed": lambda: 0,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        **dict.fromkeys(("utilization", "memory_usage"), _query(lambda: 0)),
        "list_gpu_processes": _query(lambda: "GPU:0\nno processes are running"),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.answer(_is_ampere),
        "is_tf32_supported": lambda: card.answer(_is_ampere),
    }


def _memory_answers(card: CardInUse, recorder: Recorder) -> dict[str, Callable[..., Any]]:
    held = [f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved", "cached")]
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        named = (f"{kind}.all.{figure}" for kind in kinds for figure in ("current", "peak"))
        return defaultdict(int, dict.fromkeys(named, recorder.live_bytes))

    def info(*_: Any, **__: Any) -> tuple[int, int]:
        total_bytes = card.answer(lambda one: one.total_bytes)
        return total_bytes - recorder.live_bytes, total_bytes

    return {
        **dict.fromkeys((*held, "device_memory_used"), lambda *_, **__: recorder.live_bytes),
        "mem_get_info": info,
        "get_per_process_memory_fraction": _query(lambda: 1.0),
        "memory_stats": stats,
        "memory_stats_as_nested_dict": _query(lambda: {}),
        "host_memory_stats": lambda: defaultdict(int),
        "host_memory_stats_as_nested_dict": dict,
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        **dict.fromkeys(_EMPTY_CACHE, recorder.record_empty_cache),
    }


def _accelerator_answers(card: CardInUse, recorder: Recorder) -> dict[str, Callable[..., Any]]:
    memory = _memory_answers(card, recorder)
    actions = ("synchronize", "empty_host_cache")
    resets = ("reset_accumulated_memory_stats", "reset_peak_memory_stats")
    return {
        **memory,
        **dict.fromkeys((*actions, *resets), _do_nothing),
        "get_memory_info": memory["mem_get_info"],
        # As on a real card.
        "get_device_capability": partial(_raise, "Backend doesn't support getting device capabilities."),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        **dict.fromkeys(("set_device_index", "set_device_idx"), check_index),
    }


class _CudaDeviceProperties:
    """Properties of the device; clock rates and the cache size are an A100's, and have no effect on memory."""

    def __init__(self, card: CardInUse) -> None:
        self._card = card

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return self._card.answer(_PROPERTIES[name])
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*_PROPERTIES, *_CONSTANTS]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in dir(self))})"


_PROPERTIES: Mapping[str, Callable[[Card], Any]] = {
    "name": lambda card: card.title,
    "major": lambda card: card.capability[0],
    "minor": lambda card: card.capability[1],
    "total_memory": lambda card: card.total_bytes,
    "multi_processor_count": lambda card: card.multiprocessors,
    "max_threads_per_multi_processor": lambda card: card.threads_per_multiprocessor,
    "gcnArchName": lambda card: card.title,  # As in builds for CUDA.
    "uuid": lambda card: uuid5(NAMESPACE_URL, card.name),
}
_CONSTANTS: Mapping[str, int] = {
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 99 << 10,
    "shared_memory_per_multiprocessor": 100 << 10,
    "L2_cache_size": 40 << 20,
    "memory_bus_width": 384,
    "clock_rate": 1_410_000,
    "memory_clock_rate": 1_512_000,
    "warp_size": 32,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "pci_bus_id": 0,
    "pci_device_id": 0,
    "pci_domain_id": 0,
}


def _is_ampere(card: Card) -> bool:
    return card.capability >= (8, 0)


class _Guard(nullcontext[None]):
    """`torch.cuda.device(...)`, which accepts only the first card."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        check_index(device)


def _query(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that takes a device and returns what `answer` does."""

    def query(device: Any = None) -> Any:
        check_index(device)
        return answer()

    return query


def check_index(device: Any = None) -> None:
    """Raise `UnsupportedError` for any card but the first."""
    if isinstance(device, torch.Tensor):
        device = device.device
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index not in (None, -1, 0):
        raise UnsupportedError(f"cuda:{index} is used, but only one card is simulated", hint=ONE_CARD)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _raise(message: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(message)


class Event:
    """An event, which has already happened: no time passes."""

    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return 0: no time passes."""
        return 0.0

    def wait(self, *_: Any) -> None:
        """Do nothing, since all work is done."""

    synchronize = record = wait


class Stream:
    """A stream, current within `with`."""

    device, device_index, device_type, priority = DEVICE, 0, 1, 0
    recorder: ClassVar[Recorder]
    current: ClassVar[Stream]
    _numbers: ClassVar[count[int]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = self.cuda_stream = next(self._numbers)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(self.current)
        self.make_current()
        return self

    def __exit__(self, *_: object) -> None:
        self._before.pop().make_current()

    def make_current(self) -> None:
        """Make this the stream that tensors are allocated on."""
        type(self).current = self
        self.recorder.stream = self.stream_id

    def is_capturing(self) -> bool:
        """Return False: no graph is captured."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Return `event`, or a new one."""
        return event or Event()

    query = Event.query
    wait_stream = wait_event = synchronize = Event.wait


def stream_answers(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Return the functions and classes of `torch.cuda` for streams and events, by name."""

    class CudaStream(Stream):
        """`torch.cuda.Stream`."""

    CudaStream.__name__ = CudaStream.__qualname__ = "Stream"
    CudaStream.recorder, CudaStream._numbers = recorder, count()
    CudaStream.current = default = CudaStream()

    def using(stream: Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            stream.make_current()

    return {
        **dict.fromkeys(("Stream", "ExternalStream", "get_stream_from_external"), CudaStream),
        "Event": Event,
        "current_stream": lambda *_, **__: CudaStream.current,
        "default_stream": lambda *_, **__: default,
        "set_stream": set_stream,
        "stream": using,
    }
