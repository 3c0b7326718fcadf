"""The plans that cuDNN prefers for a convolution, as the library in a CUDA build of PyTorch answers without a card.

Since 9.8, cuDNN's heuristics answer for a card that is described to them (`CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`;
"Deviceless Ahead-of-time Compilation" in the documentation of cudnn-frontend). The numbers of descriptors, attributes
and types are those of cudnn_graph.h.

Answers depend on the compute capability alone; a few for 9.0 depend on the memory's clock, which is an H100's here.
Only a card decides into how many parts a sum is split among its multiprocessors, and which plans run in cuBLASLt, as
those of 1 x 1 kernels do.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Sequence
from ctypes import byref, c_char, c_float, c_int, c_int64, c_void_p
from functools import cache
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

DATA_TYPES = {"torch.float32": 0, "torch.float64": 1, "torch.float16": 2, "torch.bfloat16": 9}
HALVES = (2, 9)
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
_DATA_TYPE, _INT64, _FLOAT, _MODE, _HEURISTIC = (1, c_int), (3, c_int64), (4, c_float), (7, c_int), (8, c_int)
_NOTE, _DESCRIPTOR, _CHAR = (11, c_int), (15, c_void_p), (24, c_char)
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4
_MOST_PLANS, _ALIGNMENT = 16, 32
_LIBRARIES = ("cublasLt", "cudnn")
_OPERATIONS = ((10, 700, (703, 704, 705)), (12, 706, (709, 710, 711)), (11, 712, (715, 716, 717)))
"""By kind: the descriptor, its first attribute, and those of weight, input and output."""
_SHARED_BYTES = {(7, 0): 98_304, (7, 5): 65_536, (8, 0): 166_912, (8, 7): 166_912, (9, 0): 232_448, (10, 0): 232_448}
_CARD = """{"deviceVer": %d, "maxSharedMemoryPerBlockOptin": %d, "multiProcessorCount": 100, "warpSize": 32,
"maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 16,
"maxThreadsPerBlock": 1024, "maxThreadsPerSM": 1024, "regsPerBlock": 65536, "totalGlobalMem": 17179869184,
"smClockRateKHz": 1700000, "memClockRateKHz": 2619000, "l2CacheSize": 4194304, "maxBlockSize": [1024, 1024, 64],
"maxGridSize": [2147483647, 65535, 65535], "supportCoopLaunch": 1, "pciDeviceId": 0, "isTccDriver": 0,
"cudaDeviceId": 0, "driverVer": 13000, "deviceName": ""}"""


class Convolution(NamedTuple):
    """A convolution in cuDNN, of one spatial dimension or more.

    Attributes:
        kind: `FORWARD`, or the gradient of its input or weight.
        data_type: One of `DATA_TYPES`.
        geometry: Sizes of input and weight; stride, padding and dilation for each spatial dimension.
    """

    kind: int
    data_type: int
    channels_last: int
    tf32: int
    deterministic: int
    geometry: tuple[int, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, which cuDNN leaves to cuBLASLt."""
        (weight, sizes, _), (stride, padding, _) = self.tensors, self.windows
        return weight[1] == sizes[1] and {*weight[2:], *stride} == {1} and not any(padding)

    @property
    def windows(self) -> list[Sequence[int]]:
        """Stride, padding and dilation."""
        count = len(self.geometry) // 5
        return [self.geometry[start : start + count] for start in range(2 * count + 4, len(self.geometry), count)]

    @property
    def tensors(self) -> list[Sequence[int]]:
        """The sizes of weight, input and output."""
        rank = len(self.geometry) // 5 + 2
        sizes, weight = self.geometry[:rank], self.geometry[rank : 2 * rank]
        spatial = zip(sizes[2:], weight[2:], *self.windows, strict=True)
        output = [(size + 2 * pad - step * (width - 1) - 1) // stride + 1 for size, width, stride, pad, step in spatial]
        return [weight, sizes, (sizes[0], weight[0], *output)]


@cache
def plan_workspaces(capability: tuple[int, int], asked: Convolution, count: int = 1) -> tuple[int, ...]:
    """Return the bytes that the first plans take, in PyTorch's order; none if no such cuDNN is installed.

    Source: `get_configs_from_heuristics` and `filterEngineConfigs` in ATen/native/cudnn/Conv_v8.cpp.
    """
    try:
        graph = _Descriptor(15).set(801, _DESCRIPTOR, _operation(asked)).finalize()
        heuristics = _Descriptor(4).set(201, _DESCRIPTOR, graph).set(200, _HEURISTIC, 0)
        plans = heuristics.set(204, _DESCRIPTOR, _card(capability)).finalize().parts(202, 3, _MOST_PLANS)
        tried = islice((plan for plan in plans if _is_tried(plan, asked)), count)
        return tuple(plan.get(303, (c_int64 * 1)())[0] for plan in tried)
    except _UnavailableError:
        return ()


@cache
def _card(capability: tuple[int, int]) -> _Descriptor:
    version, shared_bytes = 100 * capability[0] + 10 * capability[1], _SHARED_BYTES.get(capability, 101_376)
    letters = (_CARD % (version, shared_bytes)).encode()
    return _Descriptor(38).set(2702, _CHAR, *letters).finalize()


def _operation(asked: Convolution) -> _Descriptor:
    stride, padding, dilation = asked.windows
    sum_type = DATA_TYPES["torch.float64" if asked.data_type == DATA_TYPES["torch.float64"] else "torch.float32"]
    convolution = _Descriptor(1).set(100, _DATA_TYPE, sum_type).set(101, _MODE, 1).set(106, _INT64, len(stride))
    for attribute, numbers in ((102, dilation), (103, stride), (104, padding), (105, padding)):
        convolution.set(attribute, _INT64, *numbers)
    kind, first, names = _OPERATIONS[asked.kind]
    operation = _Descriptor(kind).set(first, _FLOAT, 1.0).set(first + 1, _FLOAT, 0.0)
    operation.set(first + 2, _DESCRIPTOR, convolution.finalize())
    for name, sizes in zip(names, asked.tensors, strict=True):
        order = (0, *range(2, len(sizes)), 1) if asked.channels_last else range(len(sizes))
        products = accumulate([sizes[dim] for dim in order[:0:-1]], mul, initial=1)
        strides = dict(zip(reversed(order), products, strict=True))
        tensor = _Descriptor(17).set(900, _INT64, _ALIGNMENT).set(901, _DATA_TYPE, asked.data_type)
        tensor.set(902, _INT64, *sizes).set(903, _INT64, *(strides[dim] for dim in range(len(sizes))))
        operation.set(name, _DESCRIPTOR, tensor.set(906, _INT64, name).finalize())
    return operation.finalize()


def _is_tried(plan: _Descriptor, asked: Convolution) -> bool:
    notes = plan.parts(300, 2, 1)[0].get(1303, (c_int * 10)(), _NOTE)
    refused = {_DOWN_CONVERT, *([_NONDETERMINISTIC] if asked.deterministic else [])}
    if asked.data_type == DATA_TYPES["torch.float32"] and not asked.tf32:
        refused.add(_TENSOR_CORE)
    return refused.isdisjoint(notes)


class _UnavailableError(Exception):
    """There is no cuDNN that answers this."""


class _Descriptor:
    """A descriptor of cuDNN's backend; it keeps those that it refers to."""

    def __init__(self, kind: int) -> None:
        self.pointer, self._kept = c_void_p(), list[Any]()
        _call("CreateDescriptor", kind, byref(self.pointer))
        weakref.finalize(self, _call, "DestroyDescriptor", self.pointer)

    def set(self, attribute: int, kind: tuple[int, Any], *values: Any) -> _Descriptor:
        self._kept += values
        array = (kind[1] * len(values))(*(getattr(value, "pointer", value) for value in values))
        _call("SetAttribute", self.pointer, attribute, kind[0], c_int64(len(values)), array)
        return self

    def finalize(self) -> _Descriptor:
        _call("Finalize", self.pointer)
        return self

    def get(self, attribute: int, array: Any, kind: tuple[int, Any] = _INT64) -> list[Any]:
        count = c_int64()
        _call("GetAttribute", self.pointer, attribute, kind[0], c_int64(len(array)), byref(count), array)
        return list(array)[: count.value]

    def parts(self, attribute: int, kind: int, most: int) -> list[_Descriptor]:
        parts = [_Descriptor(kind) for _ in range(most)]
        array = (c_void_p * most)(*(part.pointer for part in parts))
        return parts[: len(self.get(attribute, array, _DESCRIPTOR))]


def _call(name: str, *args: Any) -> None:
    library = _library()
    if library is None or getattr(library, f"cudnnBackend{name}")(*args):
        raise _UnavailableError(name)


@cache
def _library() -> ctypes.CDLL | None:
    """Load the cuDNN that PyTorch's wheels for CUDA bring, and cuBLASLt, which it looks for; None if they are not here.

    PyTorch need not be loaded: replays run without it.
    """
    try:
        folders = [Path(folder) for folder in importlib.import_module("nvidia").__path__]
        paths = [next(lib for folder in folders for lib in folder.glob(f"*/lib/lib{name}.so.*")) for name in _LIBRARIES]
        library = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in paths][-1]
        return library if hasattr(library, "cudnnBackendFinalize") else None  # cuDNN 8 brought it.
    except (ImportError, StopIteration, OSError):
        return None
