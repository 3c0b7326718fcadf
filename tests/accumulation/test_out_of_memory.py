"""Out-of-memory errors are recognised, Ctrl-C waits within a step, and a real out-of-memory error is recovered."""

from __future__ import annotations

import copy
import errno
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import environment
from state_digests import state_digest
from torch import Tensor, nn
from warm_children import WarmPython

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.out_of_memory import OutOfMemory, find_out_of_memory, is_context_dead

CERTAIN = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB",
    "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback: CUDA out of memory. Tried to allocate",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
    "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "failed with cudaErrorMemoryAllocation",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
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
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
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
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "Invalid buffer size: 24.00 GB",
    "could not create a primitive",
    "could not execute a primitive",
]
NOT_OUT_OF_MEMORY = [
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable",
    "out of memory budget in my code",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "expected all tensors to have the same memory format",
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376.",
    "NCCL error: ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "PeerToPeerAccess.cpp":83',
    "pin memory thread exited unexpectedly",
    "",
]
DEAD = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS",
]


TEXTS = {True: CERTAIN, False: UNCERTAIN, None: [*NOT_OUT_OF_MEMORY, *DEAD]}


@pytest.mark.parametrize(
    ("text", "is_definite"), [(text, is_definite) for is_definite, texts in TEXTS.items() for text in texts]
)
def test_texts_mean_out_of_memory_surely_perhaps_or_not(text: str, is_definite: bool | None) -> None:
    """None: neither; of these, some mean that the device's context is lost."""
    oom = find_out_of_memory(RuntimeError(text))
    assert (None if oom is None else oom.is_definite_oom) == is_definite
    assert is_context_dead(RuntimeError(text)) == (text in DEAD)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("anything"), MemoryError(), OSError(errno.ENOMEM, "no more")], ids=repr
)
def test_types_come_first(error: Exception) -> None:
    assert getattr(find_out_of_memory(error), "is_definite_oom", False)


def test_c_code_that_fails_without_an_exception_may_have_had_no_memory() -> None:
    oom = find_out_of_memory(SystemError("error return without exception set"))
    assert oom is not None
    assert not oom.is_definite_oom


def test_real_errors_of_torch_and_numpy_are_recognised() -> None:
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 50)
    found = find_out_of_memory(torch_error.value)
    assert found is not None
    assert found.is_definite_oom
    assert found.text.startswith("DefaultCPUAllocator: ")
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(1 << 55)
    assert find_out_of_memory(numpy_error.value) is not None


OUT: Any = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("error", "cause", "context", "found"),
    [
        (ValueError("forward failed"), OUT, None, "OutOfMemoryError"),
        (ValueError("forward failed"), None, OUT, "OutOfMemoryError"),
        (RuntimeError(UNCERTAIN[0]), MemoryError(), None, "MemoryError"),
        (RuntimeError(DEAD[0]), None, OUT, None),
        (KeyboardInterrupt(), None, OUT, None),
    ],
    ids=["from it", "while it is handled", "uncertain from is_definite", "a dead context", "an interruption"],
)
def test_errors_after_an_out_of_memory_error(error: Any, cause: Any, context: Any, found: str | None) -> None:
    error.__context__ = context
    if cause is not None:  # To set it to None would say that there is no context either.
        error.__cause__ = cause
    assert find_out_of_memory(error) == (None if found is None else OutOfMemory(is_definite_oom=True, text=found))


def test_an_error_raised_from_none_has_another_cause() -> None:
    error = ValueError("no such size")
    error.__context__, error.__suppress_context__ = MemoryError(), True
    assert find_out_of_memory(error) is None


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class Pressing(nn.Module):
    """Sends itself a Ctrl-C during forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.when: dict[str, Callable[[], None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        self.when.pop("forward", lambda: None)()
        if "backward" in self.when and out.requires_grad:
            hooked: Any = out
            hooked.register_hook(lambda _: self.when.pop("backward", lambda: None)())
        return out


def make(dtype: torch.dtype = torch.float32) -> tuple[Pressing, torch.optim.Optimizer, Accumulator, Any]:
    torch.manual_seed(0)
    model = Pressing().to(dtype)
    model.norm.eval()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(6, 3, dtype=dtype), torch.randn(6, 2, dtype=dtype)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=2)
    accumulator.step(batch)
    return model, optimizer, accumulator, batch


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ctrl_c_before_the_update_undoes_the_step(when: str, dtype: torch.dtype) -> None:
    model, optimizer, accumulator, batch = make(dtype)
    before = state_digest(model, optimizer)
    model.when[when] = press
    with pytest.raises(KeyboardInterrupt):
        accumulator.step(batch)
    assert accumulator.phase == when, "it waits for the end of that phase, not for the whole step"
    assert state_digest(model, optimizer) == before
    assert accumulator.step(batch).updated


def test_ctrl_c_within_an_unprotected_update_comes_after_it() -> None:
    model, optimizer, accumulator, batch = make()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    handle = optimizer.register_step_pre_hook(lambda *_: press())
    with pytest.raises(KeyboardInterrupt):
        accumulator.step_parts([batch])
    handle.remove()
    Accumulator(twin, twin_optimizer, nn.MSELoss(), micro_batch=2).step(batch)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert accumulator.step(batch).updated


def test_a_second_ctrl_c_comes_at_once() -> None:
    model, optimizer, accumulator, batch = make()
    before, reached = state_digest(model, optimizer), []

    def press_twice() -> None:
        press(2)
        reached.append(True)

    model.when["forward"] = press_twice
    with pytest.raises(KeyboardInterrupt):
        accumulator.step(batch)
    assert not reached
    assert state_digest(model, optimizer) == before


SCRIPT = """
import json, re, resource, warnings
import torch
from pathlib import Path
from torch import nn
from autoaccum.accumulation.accumulator import Accumulator

torch.set_num_threads(1)
MIB = 2**20

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())])

def limit(extra):
    held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + extra, resource.RLIM_INFINITY))

x = torch.randn(4096, 256)
model, other = build(), build()
optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, other)]
full = Accumulator(other, optimizers[1], nn.MSELoss(), micro_batch=4096)
mine = Accumulator(model, optimizers[0], nn.MSELoss(), micro_batch=4096)
full.step((x, x))
mine.step((x, x))
expected = full.step((x, x))
limit(30 * MIB)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = mine.step((x, x))
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
scale = max(float(p.detach().abs().max()) for p in other.parameters())
error = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters()))
print(json.dumps({
    "retries": result.retries, "parts": result.micro_batches, "loss": [result.loss, expected.loss],
    "error": error / scale, "warnings": [str(warning.message) for warning in caught],
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds anonymous memory on Linux only")
def test_a_step_shrinks_and_its_update_is_the_full_batch_s(tmp_path: Path, warm_python: WarmPython) -> None:
    child = warm_python(tmp_path, "-c", SCRIPT, environment=environment(), measured=True)
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["retries"] >= 1
    assert len(seen["warnings"]) == seen["retries"]
    assert sum(seen["parts"]) == 4096
    assert max(seen["parts"]) < 4096
    assert seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-5)
    assert seen["error"] < 1e-3  # AdamW's first updates turn rounding near zero gradients into a share of lr
