"""Workspaces of attention kernels: mostly sums in fp32, from which a kernel writes a gradient.

Sources, in ATen/native: transformers/cuda/flash_attn/flash_api.cpp (`mha_bwd`, `set_params_splitkv`);
transformers/cuda/mem_eff_attention/kernel_backward.h (`workspace_size`) and kernel_forward.h
(`kNeedsOutputAccumulatorBuffer`); transformers/cuda/attention_backward.cu (`delta`, `kKernelComputesDelta`);
cudnn/MHA.cpp (`get_workspace_size`, which only cuDNN knows: assumed to be as large as flash attention's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspaces import (
    Estimate,
    Handler,
    Numbers,
    OperatorCall,
    Tensor,
    before_outputs,
    by_name,
    bytes_of,
    ceil_div,
    product_rule,
    round_up,
)
from autoaccum.simulation.trace_records import Freed, MemoryStep, Workspace


def flash_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The query's gradient in fp32 (`dq_accum`). Numbers: batch, heads, queries, head size, deterministic (0 or 1)."""
    batch, heads, queries, head_size, deterministic = numbers
    rounded = round_up(head_size, 32)
    each = 4 * batch * heads * round_up(queries, 128)
    copies = max(1, ceil_div(card.multiprocessors, max(1, batch * heads))) if deterministic else 1
    band = each * copies * max(0, 256 - rounded) if head_size > 192 else 0
    return Estimate(bytes=each * rounded * copies, band_bytes=band, measured=band == 0)


def flash_row_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The row sums of the softmax's gradient (`softmax_d`). Numbers: batch, heads, queries."""
    batch, heads, queries = numbers
    return Estimate(bytes=4 * batch * heads * round_up(queries, 128))


def flash_splits(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The partial outputs of a forward pass that is split over the keys to keep the card busy (no dropout).

    Numbers: batch, heads, queries, keys, head size.
    """
    return Estimate(bytes=_flash_split_rows(numbers, card) * 4 * round_up(numbers[-1], 32))


def flash_split_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The logarithms of the row sums of partial outputs. Numbers: as of `flash_splits`."""
    return Estimate(bytes=_flash_split_rows(numbers, card) * 4)


def _flash_split_rows(numbers: Numbers, card: Card) -> int:
    """Return the rows of all partial outputs; 0 if the forward pass is not split."""
    batch, heads, queries, keys, head_size = numbers
    key_block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    blocks = batch * heads * ceil_div(queries, 64)
    splits = _flash_split_count(blocks, 2 * card.multiprocessors, ceil_div(keys, key_block))
    return splits * batch * heads * queries if splits > 1 else 0


def efficient_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of memory-efficient attention's backward pass, by the tile that fits in shared memory.

    Numbers: batch, heads, queries, keys, head size, value size, bytes of an element, dropout, deterministic (0 or 1).
    """
    _, _, _, _, head_size, value_size, element_bytes, *_ = numbers
    size = _efficient_workspace(numbers, _efficient_tile(numbers, card))
    other = _efficient_workspace(numbers, _Tile(64, 64, element_bytes == 4))
    band = abs(size - other) if max(head_size, value_size) > 64 else 0
    return Estimate(bytes=size, band_bytes=band, measured=band == 0)


def efficient_cast(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Half-precision output or gradient in fp32, if no kernel sums its rows. Numbers: as of `efficient_gradient`."""
    return _unless_summed(numbers, card, numbers[5] if numbers[6] < 4 else 0)


def efficient_product(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The output times its gradient in fp32, if no kernel sums its rows. Numbers: as of `efficient_gradient`."""
    return _unless_summed(numbers, card, numbers[5])


def efficient_product_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The row sums of that product, before they become `delta`. Numbers: as of `efficient_gradient`."""
    return _unless_summed(numbers, card, 1)


def _unless_summed(numbers: Numbers, card: Card, width: int) -> Estimate:
    """Return `width` fp32 values for each row, if operators sum the rows because no kernel does."""
    batch, heads, queries, *_ = numbers
    return Estimate(bytes=0 if _kernel_sums_rows(numbers, card) else 4 * batch * heads * queries * width)


def efficient_output(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The output of half-precision heads above 128 in fp32. Numbers: batch, heads, queries, value size, bytes."""
    batch, heads, queries, value_size, element_bytes = numbers
    needed = element_bytes < 4 and value_size > 128
    return Estimate(bytes=4 * batch * heads * queries * value_size if needed else 0)


def cudnn_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuDNN. Numbers: batch, query heads, key heads, queries, keys, head size, bytes of an element."""
    batch, heads, key_heads, queries, keys, head_size, element_bytes = numbers
    size = 4 * batch * heads * round_up(queries, 128) * (round_up(head_size, 32) + 1)
    if key_heads != heads:
        size += 2 * batch * heads * keys * head_size * element_bytes
    return Estimate(bytes=size, band_bytes=size, measured=False)


def _flash_split_count(blocks: int, slots: int, most: int) -> int:
    """Return the fewest splits that reach 85 % of the best use of the card (`num_splits_heuristic`)."""
    if 10 * blocks >= 8 * slots:
        return 1
    counts = [n for n in range(1, min(128, slots, most) + 1) if n == 1 or ceil_div(most, n) != ceil_div(most, n - 1)]
    waves = {count: blocks * count / slots for count in counts}
    busy = {count: wave / ceil_div(blocks * count, slots) for count, wave in waves.items()}
    best = max(busy.values(), default=0.0)
    return next((count for count in counts if busy[count] >= 0.85 * best), 1)


@dataclass(frozen=True)
class _Tile:
    """The queries and keys of one block of threads, and whether the gradients of keys stay in registers."""

    queries: int
    keys: int
    in_registers: bool


def _efficient_tile(numbers: Numbers, card: Card) -> _Tile:
    """Return the tile of the first kernel in `mem_eff_attention/kernels/cutlassB.h` that supports size and card."""
    _, _, _, _, size, value_size, element_bytes, dropout, _ = numbers
    head_size = max(size, value_size)
    half, major = element_bytes < 4, card.capability[0]
    small = card.capability in ((8, 6), (8, 9)) or major in (11, 12)
    if head_size <= 64:
        return _Tile(64, 64, True)
    if half and major >= 8 and head_size <= 128:
        if head_size <= 96 and not dropout and card.capability in ((8, 6), (8, 9)):
            return _Tile(128, 64, True)
        return _Tile(64, 64, False) if small else _Tile(128, 128, True)
    if half:
        return _Tile(128, 64, head_size <= 128)
    return _Tile(64, 64, True) if small or major < 8 else _Tile(128, 64, True)


def _kernel_sums_rows(numbers: Numbers, card: Card) -> bool:
    """Return whether the kernel sums the rows (`kKernelComputesDelta`): of halves, except for wide heads on Volta."""
    *_, element_bytes, _, _ = numbers
    on_volta = (7, 0) <= card.capability < (7, 5)
    return element_bytes < 4 and (_efficient_tile(numbers, card).in_registers or not on_volta)


def _efficient_workspace(numbers: Numbers, tile: _Tile) -> int:
    batch, heads, queries, keys, head_size, value_size, element_bytes, _, deterministic = numbers
    elements = ceil_div(queries, tile.queries) * ceil_div(head_size, tile.keys) * (tile.queries * tile.keys + 4)
    if element_bytes < 4 and not tile.in_registers:
        splits = 1 if deterministic else max(1, min(ceil_div(keys, tile.keys), 200 // max(1, batch * heads)))
        width = round_up(head_size, tile.queries) + round_up(value_size, tile.queries)
        elements += splits * tile.keys * width
    return 4 * batch * heads * round_up(elements, 4)


def _flash_workspaces(call: OperatorCall) -> list[Workspace]:
    query, key = call["query"], call["key"]
    if query.dim() != 4 or call["dropout_p"]:
        return []
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, queries, key.shape[2], size)
    return [Workspace("flash_split_sums", numbers), Workspace("flash_splits", numbers)]


def _flash_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    workspaces = before_outputs(_copies_of_rows(call["grad_out"], call["out"]), call)
    workspaces.append(Workspace("flash_row_sums", (batch, heads, queries)))
    workspaces.append(Workspace("flash_gradient", (batch, heads, queries, size, int(call.strictly_deterministic))))
    if key.shape[1] != heads:
        workspaces += [Workspace("flash_grouped", (batch, heads, key.shape[2], size, query.dtype.itemsize))] * 2
    return workspaces


def _efficient_workspaces(call: OperatorCall) -> list[Workspace]:
    query, value = call["query"], call["value"]
    batch, heads, queries, _ = query.shape
    return [Workspace("efficient_output", (batch, heads, queries, value.shape[3], query.dtype.itemsize))]


def _efficient_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    """The row sums of output times gradient come first if no kernel sums them; the rest is freed again."""
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, size = query.shape
    flags = (query.dtype.itemsize, int(bool(call["dropout_p"])), int(call.strictly_deterministic))
    numbers = (batch, heads, queries, key.shape[2], size, value.shape[3], *flags)
    names = ("cast", "cast", "product", "product_sums")
    products = [Workspace(f"efficient_{name}", numbers) for name in names]
    sums = Workspace("efficient_row_sums", (batch, heads, queries))
    copies = before_outputs(_copies_of_rows(call["grad_out_"]), call)
    return [*copies, sums, *products, Freed(len(products)), Workspace("efficient_gradient", numbers)]


def _cudnn_gradient_workspaces(call: OperatorCall) -> list[Workspace]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, key.shape[1], queries, key.shape[2], size, query.dtype.itemsize)
    return [Workspace("cudnn_gradient", numbers)]


def _copies_of_rows(*tensors: Tensor) -> list[Workspace]:
    """Return a copy for each tensor (samples, heads, rows, size) that is not contiguous with rows before heads."""
    return [Workspace("layout_copy", (bytes_of(tensor),)) for tensor in tensors if not _rows_come_first(tensor)]


def _rows_come_first(tensor: Tensor) -> bool:
    _, heads, rows, size = tensor.shape
    wanted = (rows * heads * size, size, heads * size, 1)
    dimensions = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    return all(extent == 1 or stride == right for extent, stride, right in dimensions)


WORKSPACES: Mapping[str, Handler] = {
    "_scaled_dot_product_flash_attention": _flash_workspaces,
    "_scaled_dot_product_flash_attention_backward": _flash_gradient_workspaces,
    "_scaled_dot_product_efficient_attention": _efficient_workspaces,
    "_scaled_dot_product_efficient_attention_backward": _efficient_gradient_workspaces,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_gradient_workspaces,
}
RULES = {
    **by_name(flash_gradient, flash_row_sums, flash_splits, flash_split_sums),
    **by_name(efficient_gradient, efficient_cast, efficient_product, efficient_product_sums, efficient_output),
    **by_name(cudnn_gradient),
    "flash_grouped": product_rule(),  # For every query head: batch, heads, keys, head size, bytes of an element.
    "efficient_row_sums": product_rule(4),  # The rows' sums (`delta`): batch, heads, queries.
}
