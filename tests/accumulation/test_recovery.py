from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from autoaccum.accumulation.recovery import Shortage, find_shortage, is_context_dead

CERTAIN = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB",
    "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback: CUDA out of memory. Tried to allocate",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
    "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "failed with cudaErrorMemoryAllocation",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838',
    "HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 15.98 GiB",
    "HIP error: out of memory",
    "HIP error: hipErrorOutOfMemory",
    "MIOpen Error: miopenStatusAllocFailed",
    "MPS backend out of memory (MPS allocated: 8.80 GB, other allocations: 400 MB, max allowed: 9.07 GB).",
    "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.56 GiB.",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY)",
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
    "std::bad_alloc",
    "unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)",
]
UNCERTAIN = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "Invalid buffer size: 24.00 GB",
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
]
NOT_A_SHORTAGE = [
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable",
    "out of memory budget in my code",
    "CUDA out of memory budget of this cluster",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "expected all tensors to have the same memory format",
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376.",
    "NCCL error: ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "PeerToPeerAccess.cpp":83',
    "pin memory thread exited unexpectedly",
    "",
]
DEAD = [
    "CUDA error: an illegal memory access was encountered",
    "HIP error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS",
]


@pytest.mark.parametrize("text", CERTAIN)
def test_texts_that_mean_a_shortage(text: str) -> None:
    shortage = find_shortage(RuntimeError(text))
    assert shortage is not None
    assert shortage.certain
    assert shortage.text


@pytest.mark.parametrize("text", UNCERTAIN)
def test_texts_that_some_bugs_share(text: str) -> None:
    shortage = find_shortage(RuntimeError(text))
    assert shortage is not None
    assert not shortage.certain


@pytest.mark.parametrize("text", NOT_A_SHORTAGE)
def test_texts_that_mean_something_else(text: str) -> None:
    assert find_shortage(RuntimeError(text)) is None
    assert not is_context_dead(RuntimeError(text))


@pytest.mark.parametrize("text", DEAD)
def test_a_dead_context_is_no_shortage(text: str) -> None:
    assert is_context_dead(RuntimeError(text))
    assert find_shortage(RuntimeError(text)) is None


def test_a_dead_context_outranks_the_shortage_it_came_from() -> None:
    error = RuntimeError(DEAD[0])
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert find_shortage(error) is None


class OwnMemoryError(MemoryError):
    pass


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("anything"), MemoryError(), OwnMemoryError("x"), OSError(errno.ENOMEM, "no more")],
    ids=lambda error: type(error).__name__,
)
def test_types_come_first(error: Exception) -> None:
    shortage = find_shortage(error)
    assert shortage is not None
    assert shortage.certain


def test_what_torch_and_numpy_really_raise() -> None:
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 50)
    assert find_shortage(torch_error.value) == Shortage(certain=True, text="DefaultCPUAllocator")
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(1 << 55)
    assert find_shortage(numpy_error.value) is not None


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError])
def test_the_table_is_read_for_runtime_errors_only(kind: type[Exception]) -> None:
    assert find_shortage(kind(CERTAIN[0])) is None


def test_errors_raised_from_a_shortage() -> None:
    def wrap(explicit: bool) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            if explicit:
                raise ValueError("forward failed") from error
            raise ValueError("forward failed")  # noqa: B904 - the implicit context is what is tested

    for explicit in (True, False):
        with pytest.raises(ValueError, match="forward failed") as caught:
            wrap(explicit)
        assert find_shortage(caught.value) == Shortage(certain=True, text="OutOfMemoryError")


def test_a_certain_link_outranks_an_uncertain_one() -> None:
    error = RuntimeError("could not create a primitive")
    error.__cause__ = MemoryError()
    assert find_shortage(error) == Shortage(certain=True, text="MemoryError")


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert find_shortage(first) is None


def test_an_interruption_while_a_shortage_was_handled_stays_one() -> None:
    error = KeyboardInterrupt()
    error.__context__ = MemoryError()
    assert find_shortage(error) is None
