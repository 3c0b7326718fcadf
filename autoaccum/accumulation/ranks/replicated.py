"""Ranks that each hold the whole model: give all the same weights, and sum their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from autoaccum.accumulation.gradients import HALF_DTYPES, GradientBuffers
from autoaccum.accumulation.ranks.group import Ranks
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.sharded_tensors import is_sharded
from autoaccum.units import MIB

_BUCKET_BYTES = 25 * MIB
"""Gradients below this size are summed together, in buckets of up to this size; it is that of PyTorch's DDP."""


def copy_from_first(ranks: Ranks, named: Iterable[tuple[str, Tensor]]) -> None:
    """Give all ranks the tensors of rank 0; of those that are sharded each rank keeps its own part.

    Those on `meta` have no values.

    Raises:
        UsageError: The ranks' tensors differ in name, shape or dtype.
    """
    if ranks.size == 1:
        return
    named = list(named)
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    for rank, other in enumerate(ranks.gather(layout)):
        if other != layout:
            only = next((entry for entry in layout if entry not in other), layout[-1] if layout else None)
            raise UsageError(
                f"the models of rank {ranks.rank} and rank {rank} differ: only one has {only}",
                hint="build the same model on all ranks",
            )
    for tensor in {id(tensor): tensor for _, tensor in named}.values():
        if not is_sharded(tensor) and tensor.device.type != "meta":
            _copy(ranks, tensor)


def _copy(ranks: Ranks, tensor: Tensor) -> None:
    """Copy `tensor` of rank 0 into those of the others."""
    if tensor.layout is not torch.strided:
        first = ranks.gather(tensor if ranks.rank == 0 else None)[0]
        assert first is not None
        with torch.no_grad():
            tensor.copy_(first.to(tensor.device))
        return
    tensor = tensor.detach()
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    # A copy where values are not in a row, and as bytes: gloo lacks dtypes.
    plain = tensor.contiguous()
    ranks.copy_first(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8))
    if plain is not tensor:
        tensor.copy_(plain)


def sum_gradients(ranks: Ranks, parameters: Sequence[Tensor], buffers: GradientBuffers | None) -> None:
    """Sum the gradients of `parameters` over all ranks, in place; those of half precision are added in float32.

    FSDP2 has summed those of sharded parameters. A parameter that has a gradient on some ranks only has the sum on all.
    Memory is taken before a rank tells the others that its parts have run, so that none waits in a collective for one
    that has no memory left.

    Raises:
        OtherRanksFailed: Another rank did not get so far.
        WorkloadError: A gradient is sparse.
        UsageError: The ranks do not train the same parameters.
    """
    if ranks.size == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad and not is_sharded(parameter)]
    sums = {} if buffers is None else buffers.sums
    gradients = [sums.get(parameter, parameter.grad) for parameter in trained]
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise WorkloadError(
            "a gradient is sparse and cannot be summed over ranks", hint="build Embedding(sparse=False)"
        )
    # Those without a gradient are counted in, since other ranks may have one.
    pairs = zip(trained, gradients, strict=True)
    expected = [parameter if gradient is None else gradient for parameter, gradient in pairs]
    position = {id(tensor): at for at, tensor in enumerate(expected)}
    buckets = list(_buckets(expected))
    room = _allocate([bucket for bucket in buckets if _needs_room(bucket)])
    mask = [gradient is not None for gradient in gradients]
    masks, flags = zip(*ranks.gather((mask, [tensor.requires_grad for tensor in parameters])), strict=True)
    if any(of_rank != flags[0] for of_rank in flags):
        raise UsageError("parameters are frozen (requires_grad) on some ranks only", hint="freeze the same on all")
    if any(of_rank != masks[0] for of_rank in masks):
        for at, (parameter, is_used) in enumerate(zip(trained, map(any, zip(*masks, strict=True)), strict=True)):
            if is_used and gradients[at] is None and buffers is not None:
                gradients[at] = buffers.add_zeros(parameter)
            elif is_used and gradients[at] is None:
                gradients[at] = parameter.grad = torch.zeros_like(parameter)
        ranks.gather(None)  # Each has got the memory for it.
    for bucket in buckets:
        of_bucket = [gradients[position[id(tensor)]] for tensor in bucket]
        if present := [gradient for gradient in of_bucket if gradient is not None]:
            _sum_bucket(ranks, present, room)


@contextmanager
def without_calls(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse calls of `wrappers`, modules in DistributedDataParallel, within it.

    Each of their backwards would wait for all ranks, which need not run the same number of parts.
    """
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.callback(wrapper.register_forward_pre_hook(_refuse_call).remove)
        yield


def _refuse_call(wrapper: nn.Module, _: object) -> None:
    raise UsageError(
        f"the loss calls {type(wrapper).__name__}, which waits for all ranks in each backward",
        hint="call the model that the loss is given, or the wrapper's `module`",
    )


def take_room(parameters: Sequence[Tensor], *, in_fp32: bool, parts: int) -> None:
    """Take the memory that `sum_gradients` takes between backward and update, and give it back.

    A trial has one rank, and its memory is to be that of several.

    Args:
        parameters: The parameters of the optimizer.
        in_fp32: Whether gradients of half precision are summed in buffers, and need no copy.
        parts: The parts that ran. One alone was summed in no buffers, as it would be among those of other ranks.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buffered = HALF_DTYPES if in_fp32 else ()
    # As much again as `.grad` holds: sums in float32 take twice that.
    _missing = [torch.empty_like(tensor) for tensor in trained if parts == 1 and tensor.dtype in buffered]
    buckets = [bucket for bucket in _buckets(trained) if _needs_room(bucket)]
    _allocate([bucket for bucket in buckets if len(bucket) > 1 or bucket[0].dtype not in buffered])


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype


def _kind(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, _sum_dtype(tensor)


def _sum_bytes(tensor: Tensor) -> int:
    return tensor.numel() * _sum_dtype(tensor).itemsize


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors to be summed together, alike on all ranks: of one device and dtype, in order; large ones alone."""
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if _sum_bytes(tensor) >= _BUCKET_BYTES:
            yield [tensor]
            continue
        bucket = filling.setdefault(_kind(tensor), [])
        if bucket and sum(map(_sum_bytes, bucket)) + _sum_bytes(tensor) > _BUCKET_BYTES:
            yield filling.pop(_kind(tensor))
            bucket = filling.setdefault(_kind(tensor), [])
        bucket.append(tensor)
    yield from filling.values()


def _needs_room(bucket: list[Tensor]) -> bool:
    """Return whether a bucket is copied to be summed: a single tensor that lies in a row is summed where it is."""
    return len(bucket) > 1 or not bucket[0].is_contiguous() or bucket[0].dtype != _sum_dtype(bucket[0])


def _allocate(buckets: Sequence[list[Tensor]]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """Return a tensor for each device and dtype in which each of the buckets has room."""
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for bucket in buckets:
        kind = _kind(bucket[0])
        sizes[kind] = max(sizes.get(kind, 0), sum(tensor.numel() for tensor in bucket))
    return {kind: torch.empty(size, device=kind[0], dtype=kind[1]) for kind, size in sizes.items()}


def _sum_bucket(ranks: Ranks, bucket: list[Tensor], room: dict[tuple[torch.device, torch.dtype], Tensor]) -> None:
    if not _needs_room(bucket):
        ranks.add_up(bucket[0])
        return
    total, views, start = sum(tensor.numel() for tensor in bucket), [], 0
    kind = _kind(bucket[0])
    # A gradient may lie otherwise in memory than when the room was measured.
    flat = room[kind][:total] if kind in room else torch.empty(total, device=kind[0], dtype=kind[1])
    for tensor in bucket:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    for view, tensor in zip(views, bucket, strict=True):
        view.copy_(tensor)
    ranks.add_up(flat)
    for view, tensor in zip(views, bucket, strict=True):
        tensor.copy_(view)
