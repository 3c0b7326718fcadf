"""Recognise out-of-memory errors, free their memory, and delay Ctrl-C to where nothing is half done.

Recover outside of the `except` block: while an exception is handled, its traceback keeps the tensors of all its frames
alive. Leave the block, drop the exception, then call `release_memory`.
"""

from __future__ import annotations

import errno
import gc
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OutOfMemory:
    """An error that means memory ran out.

    Attributes:
        is_definite_oom: False if bugs can cause the same text; then it counts only if a smaller size succeeds.
        text: The text that matched, or the name of the exception's type.
    """

    is_definite_oom: bool
    text: str


# The texts of PyTorch 2.x, its libraries and their drivers. `(?! \w)` leaves out prose such as "out of memory budget".
# Uncertain texts are also those of bugs: unsupported shapes, broken installations, races.
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
            # A descriptor is made before any allocation: if that fails, the processor lacks the kernel.
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
    """Return the out-of-memory error that `error`, or an exception it was raised from, means; None if there is none.

    Types count first (`torch.OutOfMemoryError`, `MemoryError`, an `OSError` with ENOMEM), then the texts above in a
    `RuntimeError` or `OSError`. A dead context (`is_context_dead`) and an interruption never count, whatever they were
    raised from.
    """
    if not isinstance(error, Exception) or is_context_dead(error):
        return None
    errors = [oom for link in _chain(error) if (oom := _match(link)) is not None]
    return next((oom for oom in errors if oom.is_definite_oom), errors[0] if errors else None)


def is_context_dead(error: BaseException) -> bool:
    """Return whether the device's context is lost, so that only a new process helps, never a smaller batch."""
    return any(isinstance(link, RuntimeError) and _DEAD_CONTEXT.search(str(link)) for link in _chain(error))


def release_memory(device: torch.device | None = None) -> None:
    """Collect garbage, then empty the cache of `device`; None: of the accelerator of this build of PyTorch, if any."""
    gc.collect()
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).empty_cache()


def shrink(micro_batch: int, retries: int, multiple_of: int = 1) -> int:
    """Return the micro-batch to try after `micro_batch` samples did not fit, `retries` retries before this one.

    The first steps are small (7/8, 3/4, 2/3), since a planned size usually misses by little; then the size is halved.
    From 256 that gives 224, 168, 112, 56, ... 1: at most nine retries, and never less than half of a size that might
    have fitted. The result is rounded down to a multiple of `multiple_of`.

    >>> [shrink(256, 0), shrink(224, 1), shrink(168, 2), shrink(112, 3), shrink(2, 4)]
    [224, 168, 112, 56, 1]
    >>> shrink(256, 0, 64), shrink(16, 3, 8)
    (192, 8)
    """
    factor = (7 / 8, 3 / 4, 2 / 3)[retries] if retries < 3 else 1 / 2
    smaller = min(micro_batch - 1, int(micro_batch * factor))
    return max(multiple_of, smaller - smaller % multiple_of)


def clear_frames(error: BaseException) -> None:
    """Drop the local variables, such as tensors, in the frames of `error` and of the exceptions it was raised from."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)


def _match(error: BaseException) -> OutOfMemory | None:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return OutOfMemory(is_definite_oom=True, text=type(error).__name__)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return OutOfMemory(is_definite_oom=True, text="ENOMEM")
    if isinstance(error, SystemError):  # C code that fails without an exception of its own, as where it has no memory.
        return OutOfMemory(is_definite_oom=False, text="SystemError")
    if not isinstance(error, (RuntimeError, OSError)):
        return None
    text = str(error)
    certain = _CERTAIN.search(text)
    match = certain or _UNCERTAIN.search(text)
    return None if match is None else OutOfMemory(certain is not None, match.group())


def _chain(error: BaseException) -> Iterator[BaseException]:
    queue, seen = [error], set()
    while queue:
        link = queue.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            queue.append(link.__cause__)
        if link.__context__ is not None and not link.__suppress_context__:
            queue.append(link.__context__)
