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
from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.unsupported import UnsupportedError

DEVICE = torch.device("cuda", 0)
ONE_CARD = "put everything on cuda:0, or plan on the machine that has the cards (--device cuda)"
_NO_OPERATION = """
caching_allocator_enable check_error empty_host_cache ipc_collect manual_seed manual_seed_all
reset_accumulated_host_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached
reset_peak_host_memory_stats reset_peak_memory_stats seed seed_all set_per_process_memory_fraction set_rng_state
set_rng_state_all set_sync_debug_mode synchronize _lazy_init
"""
_NEEDS_DRIVER = """
caching_allocator_alloc caching_allocator_delete change_current_allocator clock_rate current_blas_handle
current_solver_handle graph_pool_handle power_draw temperature
"""
_HELD_BYTES = """
memory_allocated memory_reserved memory_cached max_memory_allocated max_memory_reserved max_memory_cached
device_memory_used
"""
_NO_DRIVER = "cuda driver can't be loaded, is cuda enabled?"
"""The message of `torch.cuda` if NVML finds no driver."""


def patch_torch_cuda(card: CardInUse, recorder: Recorder, cudnn_version: int, stack: ExitStack) -> None:
    """Make `torch.cuda`, `torch.accelerator` and `torch.backends.cudnn` report `card` until `stack` is closed."""
    answers = {
        **{name: _query(answer) for name, answer in _queries(card, recorder).items()},
        **dict.fromkeys(_NO_OPERATION.split(), _do_nothing),
        **dict.fromkeys(_NEEDS_DRIVER.split(), partial(_raise, _NO_DRIVER)),
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), check_index),
        **dict.fromkeys(("device", "device_of", "_DeviceGuard"), _Guard),
        "can_device_access_peer": lambda *_: False,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "empty_cache": recorder.record_empty_cache,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.answer(_is_ampere),
        "memory_snapshot": lambda *_, **__: [],
        **stream_answers(recorder),
    }
    cuda: Any = torch.cuda
    for owner in (cuda, cuda.memory, cuda.random, cuda.streams, torch.accelerator, torch.accelerator.memory):
        for name, answer in answers.items():
            if hasattr(owner, name):
                patch(stack, owner, name, answer)
    for name in ("_cuda_emptyCache", "_accelerator_emptyCache"):
        if hasattr(torch._C, name):
            patch(stack, torch._C, name, recorder.record_empty_cache)
    if hasattr(torch.accelerator, "get_device_capability"):  # As on a real card.
        raises = partial(_raise, "Backend doesn't support getting device capabilities.")
        patch(stack, torch.accelerator, "get_device_capability", raises)
    cudnn: Any = torch.backends.cudnn
    nvtx: Any = torch.cuda.nvtx
    for owner, name, value in (
        (torch.cuda, "_initialized", True),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (cudnn, "is_available", lambda: True),
        # PyTorch's own refuses the cards that this build's cuDNN has no kernels for.
        (cudnn, "version", lambda: cudnn_version),
        *((nvtx, name, _do_nothing) for name in ("range_push", "range_pop", "mark")),
        (nvtx, "range", lambda *_, **__: nullcontext()),
    ):
        patch(stack, owner, name, value)


def _queries(card: CardInUse, recorder: Recorder) -> dict[str, Callable[[], Any]]:
    """Return the answers to functions that ask for nothing but a device, by name."""

    def memory_info() -> tuple[int, int]:
        total_bytes = card.answer(lambda one: one.total_bytes)
        return total_bytes - recorder.live_bytes, total_bytes

    def memory_stats() -> dict[str, int]:
        kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
        named = (f"{kind}.all.{figure}" for kind in kinds for figure in ("current", "peak"))
        return defaultdict(int, dict.fromkeys(named, recorder.live_bytes))

    return {
        **dict.fromkeys(_HELD_BYTES.split(), lambda: recorder.live_bytes),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), memory_info),
        "memory_stats": memory_stats,
        "memory_stats_as_nested_dict": dict,
        "host_memory_stats": lambda: defaultdict(int),
        "host_memory_stats_as_nested_dict": dict,
        "memory_summary": str,
        "get_per_process_memory_fraction": lambda: 1.0,
        "get_allocator_backend": lambda: "native",
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), lambda: 0),
        "get_device_name": lambda: card.answer(lambda one: one.title),
        "get_device_capability": lambda: card.answer(lambda one: one.capability),
        "get_device_properties": lambda: _CudaDeviceProperties(card),
        "get_arch_list": lambda: ["sm_{}{}".format(*card.answer(lambda one: one.capability))],
        "get_gencode_flags": str,
        "get_sync_debug_mode": lambda: 0,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        **dict.fromkeys(("utilization", "memory_usage"), lambda: 0),
        "list_gpu_processes": lambda: "GPU:0\nno processes are running",
        "is_tf32_supported": lambda: card.answer(_is_ampere),
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

    def query(device: Any = None, *_: Any, **__: Any) -> Any:
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
