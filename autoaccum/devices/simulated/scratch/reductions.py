"""Sums, means, norms: a staging area in global memory when several blocks of threads share one output.

ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig::global_memory_size`), the same in 2.11 and 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch.estimates import Estimate, Numbers, ceil_div, power_below
from autoaccum.devices.simulated.scratch.iteration import Layout

_SOURCE = "ATen/native/cuda/Reduce.cuh, ReduceConfig::global_memory_size"
_FOREACH_NORM = "ATen/native/cuda/ForeachReduceOp.cu, output_per_tensor"
_FLAGS_SOURCE = "ATen/native/cuda/Reduce.cuh, ReduceConfig::semaphore_size"
_MAX_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_CHUNK = 65_536
_MOST_32_BIT = 2**31 - 1


def reduction(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The staging area. Numbers: `reduction_numbers`."""
    return Estimate(bytes=_launch(numbers, card).staging_bytes, source=_SOURCE)


def reduction_flags(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """A counter for each column of blocks. Numbers: `reduction_numbers`."""
    return Estimate(bytes=_launch(numbers, card).flag_bytes, source=_FLAGS_SOURCE)


def foreach_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """A partial norm for each chunk. Numbers: tensors, elements of the largest, bytes of a norm."""
    tensors, largest, norm_bytes = numbers
    return Estimate(bytes=tensors * ceil_div(largest, _CHUNK) * norm_bytes, source=_FOREACH_NORM)


def reduction_numbers(layout: Layout, *, accumulator_bytes: int, element_bytes: int, unroll: int = 4) -> Numbers:
    """What the rules take: bytes of an accumulator and of an input, values read at once, then the input's layout."""
    return (accumulator_bytes, element_bytes, unroll, layout.reduced, *layout.shape, *layout.strides)


@dataclass(frozen=True)
class _Launch:
    staging_bytes: int
    flag_bytes: int


def _launch(numbers: Numbers, card: Card) -> _Launch:
    accumulator, element, unroll, reduced, *rest = numbers
    shape, strides = list(rest[: len(rest) // 2]), rest[len(rest) // 2 :]
    if not shape or 0 in shape:
        return _Launch(0, 0)
    _halve_until_32_bit(shape, strides, element)
    layout = Layout(reduced, tuple(shape), tuple(strides))
    return _split(layout, accumulator, unroll, card)


def _halve_until_32_bit(shape: list[int], strides: list[int], element: int) -> None:
    """Cut as TensorIterator::with_32bit_indexing does: the parts run one after the other."""
    while sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) * element >= _MOST_32_BIT:
        widest = max(range(len(shape)), key=lambda dim: (shape[dim] - 1) * strides[dim])
        shape[widest] = ceil_div(shape[widest], 2)


def _split(layout: Layout, accumulator: int, unroll: int, card: Card) -> _Launch:
    inputs, outputs = prod(layout.shape[: layout.reduced]), prod(layout.shape[layout.reduced :])
    along = layout.reduced == len(layout.shape) or layout.strides[0] < layout.strides[layout.reduced]
    vector = 1 if along else _output_vector(layout)
    width, height = _block(inputs, outputs, vector, along, unroll, layout)
    values = ceil_div(inputs, width) if along else inputs
    if values < min(height * _LEAST_VALUES, _MOST_VALUES):
        return _Launch(0, 0)
    values = ceil_div(inputs, width * height if along else height)
    grid = ceil_div(outputs // vector, 1 if along else width)
    blocks = card.multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > blocks:
        return _Launch(0, 0)
    shares = max(min(ceil_div(blocks, grid), ceil_div(values, _LEAST_VALUES)), ceil_div(values, _MOST_VALUES))
    if shares == 1:
        return _Launch(0, 0)
    return _Launch(accumulator * outputs * shares * (1 if along else width * vector), 4 * grid)


def _block(inputs: int, outputs: int, vector: int, along: bool, unroll: int, layout: Layout) -> tuple[int, int]:
    first, second = (inputs, outputs) if along else (outputs // vector, inputs)
    if along and layout.strides[0] == 1 and inputs >= 128 and layout.reduced == 1:
        first //= unroll
    most = _MAX_THREADS // vector
    first, second = min(power_below(first), most), min(power_below(second), most)
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _output_vector(layout: Layout) -> int:
    """How many neighbouring outputs one thread takes: as many of four as shape and strides are multiples of."""
    if layout.strides[layout.reduced] != 1:
        return 1
    numbers = [layout.shape[layout.reduced]]
    numbers += [stride for dim, stride in enumerate(layout.strides) if dim != layout.reduced]
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))
