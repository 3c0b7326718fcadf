"""What is an out-of-memory error, how its memory comes back, and Ctrl-C, held back to where nothing is half done.

Recover outside of `except`: while an exception is being handled its traceback pins every tensor of the frames it
passed through. Leave the block, drop the exception, then call `release_memory`.
"""

from __future__ import annotations

import errno
import gc
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class OutOfMemory:
    """An error that means memory ran out.

    Attributes:
        certain: False where bugs share the text: it counts only if a smaller size then succeeds.
        text: What matched, or the name of the exception's type.
    """

    certain: bool
    text: str


# Texts as PyTorch 2.x, its libraries and their drivers write them. `(?! \w)` keeps prose such as "out of memory
# budget" out. What is uncertain is also said by bugs: unsupported shapes, broken installations, races.
_CERTAIN = re.compile(
    "|".join(
        (
            r"\bCUDA out of memory\b(?! \w)",
            r"\bCUDA (?:driver )?error: out of memory\b(?! \w)",
            r"\bcuda runtime error \(2\)",
            "CUDA ran out of memory outside PyTorch's allocator",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "cudaErrorMemoryAllocation",
            r"\bTriton Error \[\w+\]: out of memory\b(?! \w)",
            r"\b(?:CU|HIP|ROC)BLAS_STATUS_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b",
            r"\bCU(?:SOLVER|SPARSE)_STATUS_ALLOC_FAILED\b",
            "CUFFT_ALLOC_FAILED",
            r"NVML_SUCCESS == r\b",
            r"\bHIP out of memory\b(?! \w)",
            r"\bHIP error: out of memory\b(?! \w)",
            r"\bhipError(?:OutOfMemory|MemoryAllocation)\b",
            "miopenStatusAllocFailed",
            r"\bMPS backend out of memory\b(?! \w)",
            r"\bXPU out of memory\b(?! \w)",
            r"\b(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b",
            r"\bCuda failure (?:\d+ )?'out of memory'",
            r"\bFailed to CUDA (?:host )?(?:c|m)alloc\b",
            r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            "std::bad_alloc",
            r"\bCannot allocate memory\b",
        )
    )
)
_UNCERTAIN = re.compile(
    "|".join(
        (
            r"\b(?:CU|HIP|ROC)BLAS_STATUS_NOT_INITIALIZED\b",
            "CUDNN_STATUS_NOT_INITIALIZED",
            "CUDNN_STATUS_NOT_SUPPORTED",
            "CUDNN_STATUS_INTERNAL_ERROR",
            "CUSOLVER_STATUS_INTERNAL_ERROR",
            "CUFFT_INTERNAL_ERROR",
            "Unable to find a valid cuDNN algorithm",
            r"\b(?:GET|FIND) was unable to find an engine\b",
            r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES\b",
            "^Invalid buffer size: ",
            # A descriptor is made before any memory is asked for: without one, the processor lacks the kernel.
            r"\bcould not create a (?:primitive(?! descriptor)|memory)\b",
            r"\bcould not execute a primitive\b",
        )
    )
)

_DEAD_CONTEXT = re.compile(
    r"an illegal memory access was encountered|device-side assert|unspecified launch (?:failure|error)"
    r"|misaligned address|an illegal instruction was encountered|invalid program counter|hardware stack error"
    r"|uncorrectable ECC error|the launch timed out and was terminated"
    r"|(?:CUDA_ERROR|hipError|cudaError)_?ILLEGAL_?ADDRESS",
    re.IGNORECASE,
)


def find_out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Say whether `error`, or one it was raised from, means that memory ran out.

    By type first (`torch.OutOfMemoryError`, `MemoryError`, an `OSError` with ENOMEM), then by the texts above, which
    is read for `RuntimeError` and `OSError` only. A dead context (`is_context_dead`) and an interruption are never a
    shortage, whatever they were raised from.
    """
    if not isinstance(error, Exception) or is_context_dead(error):
        return None
    found = [shortage for link in _chain(error) if (shortage := _match(link)) is not None]
    return next((shortage for shortage in found if shortage.certain), found[0] if found else None)


def is_context_dead(error: BaseException) -> bool:
    """Whether the device's context is lost: only a fresh process helps, never a smaller batch."""
    return any(isinstance(link, RuntimeError) and _DEAD_CONTEXT.search(str(link)) for link in _chain(error))


def release_memory(device: torch.device | None = None) -> None:
    """Collect cyclic garbage, then give the device's cached blocks back.

    Args:
        device: The device whose cache is emptied; None for the accelerator this build of PyTorch has, if any.
    """
    gc.collect()
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).empty_cache()


def shrink(micro_batch: int, retries: int, multiple_of: int = 1) -> int:
    """The ceiling to try after `micro_batch` samples did not fit and `retries` attempts were repeated before.

    Gentle at first, since a size that was found to fit mostly misses by little: 7/8, 3/4, 2/3, then halves. From 256
    that is 224, 168, 112, 56, ... 1: at most nine retries, and never less than half of a size that might have fitted.
    Of sizes that are multiples, it is the next one below.

    >>> [shrink(256, 0), shrink(224, 1), shrink(168, 2), shrink(112, 3), shrink(2, 4)]
    [224, 168, 112, 56, 1]
    >>> shrink(256, 0, 64), shrink(16, 3, 8)
    (192, 8)
    """
    factor = (7 / 8, 3 / 4, 2 / 3)[retries] if retries < 3 else 1 / 2
    smaller = min(micro_batch - 1, int(micro_batch * factor))
    return max(multiple_of, smaller - smaller % multiple_of)


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames of `error`, and of the errors it came from, hold: tensors, mostly."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)


def _match(error: BaseException) -> OutOfMemory | None:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return OutOfMemory(certain=True, text=type(error).__name__)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return OutOfMemory(certain=True, text="ENOMEM")
    if not isinstance(error, (RuntimeError, OSError)):
        return None
    text = str(error)
    certain = _CERTAIN.search(text)
    found = certain or _UNCERTAIN.search(text)
    return None if found is None else OutOfMemory(certain is not None, found.group())


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        if link.__context__ is not None and not link.__suppress_context__:
            waiting.append(link.__context__)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DelayedInterrupts:
    """Within it SIGINT, and SIGTERM where Python handles it, wait for `deliver` or the end; a second comes at once.

    A KeyboardInterrupt strikes between any two bytecodes: half-way through an update, or within the `__exit__` of a
    context manager, after which gradients stay disabled or a hook stays registered. Only the main thread hears
    signals; elsewhere this does nothing. A handler that says `only_records` is left in place: it raises nothing at the
    first signal, and should know when the second comes. So is one that is `at_once`, where copies run that nobody
    needs afterwards. Not to be entered again within itself.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def __enter__(self) -> DelayedInterrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {
                number: handler
                for number, handler in handlers.items()
                if callable(handler)
                and not (getattr(handler, "only_records", False) or getattr(handler, "at_once", False))
            }
            for number in self._handlers:
                signal.signal(number, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Let the handlers have what has come meanwhile; Python's own raises KeyboardInterrupt."""
        while self._waiting:
            number, frame = self._waiting.popitem()
            self._handlers[number](number, frame)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._waiting:
            del self._waiting[number]
            self._handlers[number](number, frame)
        else:
            self._waiting[number] = frame
