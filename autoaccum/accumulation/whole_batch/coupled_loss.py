"""A coupled loss: computed once, of the outputs of all parts of an update, of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord, UpdateParts
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.ranks.group import Ranks
from autoaccum.accumulation.rng_state import RngState, restore_rng_state
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.errors import WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size
from autoaccum.sources.pytree import CustomBatch


def output_gradients(
    backpropagation: Backpropagation, update: UpdateParts, outputs: Sequence[Any]
) -> list[list[Tensor | None]]:
    """Return the gradients of the loss by the `outputs` of each of this rank's parts.

    What else the loss uses, such as its own parameters, gets its gradients on the first rank only.
    """
    leaves = [_require_gradients(of_part) for of_part in outputs]
    loss = loss_of_outputs(backpropagation, update, leaves)
    backpropagation.on_phase("backward")
    tensors = [[*pytree.tensors(of_part)] for of_part in leaves]
    inputs = [leaf for part in tensors for leaf in part if leaf.requires_grad]
    backpropagation.backward(loss, None if backpropagation.ranks.rank == 0 else inputs)
    return [[leaf.grad for leaf in part] for part in tensors]


def loss_of_outputs(backpropagation: Backpropagation, update: UpdateParts, outputs: Sequence[Any]) -> Tensor:
    """Return the loss of the `outputs` of this rank's parts, with those of other ranks."""
    ranks, sizes = backpropagation.ranks, [*map(batch_size, update.parts)]
    if ranks.size == 1:
        return backpropagation.coupled_loss(join_outputs(outputs, sizes), update.batches, update.losses)
    read = [backpropagation.objective.read_by_coupled_loss(batch) for batch in update.batches]
    everything, all_sizes, all_read = _gather_outputs(backpropagation, outputs, sizes, read)
    joined = join_outputs(everything, all_sizes)
    with _same_random_numbers(ranks, backpropagation.device):
        return backpropagation.coupled_loss(joined, all_read, update.losses if ranks.rank == 0 else LossRecord())


def _require_gradients(outputs: Any) -> Any:
    """Return outputs as leaves that collect gradients."""
    return pytree.map_tensors(
        outputs, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    )


def _gather_outputs(
    backpropagation: Backpropagation, outputs: Sequence[Any], sizes: Sequence[int], batches: Sequence[Any]
) -> tuple[list[Any], list[int], list[Any]]:
    """Return the outputs and sizes of all ranks' parts, and what the loss reads of their batches, in order.

    This rank's outputs are those given. A parameter or buffer among the outputs is not sent: the receiver takes its
    own, so that it is known for one.

    Raises:
        WorkloadError: The workload splits its batches itself, or a constant that is no buffer is an output.
    """
    if any(isinstance(batch, CustomBatch) for batch in batches):
        raise WorkloadError(
            "the loss reads batches with a split(batch, sizes) of their own, which cannot be joined over ranks",
            hint="return what it reads of them from outputs(model, batch)",
        )
    model, ranks, device = backpropagation.model, backpropagation.ranks, backpropagation.device
    of_model = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    tables = {tensor.untyped_storage()._cdata: tensor for tensor in of_model}
    numbers = {storage: number for number, storage in enumerate(tables)}
    _check_constants(outputs, numbers.keys())

    def view(tensor: Tensor) -> Any:
        number = numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else (number, tensor.shape, tensor.stride(), tensor.storage_offset())

    views = [view(tensor) for tensor in pytree.tensors(outputs[0])] if outputs else []

    def send(tensor: Tensor, view: Any) -> Tensor:
        return tensor if view is None else tensor.new_empty(0)

    def receive(tensor: Tensor, view: Any) -> Tensor:
        return tensor.to(device) if view is None else torch.as_strided([*tables.values()][view[0]], *view[1:])

    sent = [_map_in_order(part, views, send) for part in outputs]
    rows = ranks.gather((sent, list(sizes), list(batches), views))

    everything, all_sizes, all_batches = list[Any](), list[int](), list[Any]()
    for rank, (of_parts, sizes, batches, views) in enumerate(rows):
        received = [_require_gradients(_map_in_order(part, views, receive)) for part in of_parts]
        everything += outputs if rank == ranks.rank else received
        all_sizes += sizes
        all_batches += batches
    return everything, all_sizes, all_batches


def _map_in_order(part: Any, values: Sequence[Any], change: Callable[[Tensor, Any], Tensor]) -> Any:
    """Return a structure with `change(tensor, value)` in place of each tensor."""
    remaining = iter(values)
    return pytree.map_tensors(part, lambda tensor: change(tensor, next(remaining)), lambda node: node)


def _check_constants(outputs: Sequence[Any], known: Collection[Any]) -> None:
    """Raise WorkloadError if a tensor that is not the model's is an output of two parts, as no rows are."""
    places = ({_place(tensor) for tensor in pytree.tensors(part) if tensor.ndim} for part in outputs)
    seen = Counter(place for part in places for place in part if place[0] not in known)
    if any(count > 1 for count in seen.values()):
        raise WorkloadError(
            "an output is one tensor for all parts of the batch, and other ranks do not know it as that",
            hint="make it a buffer of the model (register_buffer), or use it in the loss without returning it",
        )


@contextmanager
def _same_random_numbers(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Draw rank 0's random numbers within, and leave the generators of the others as they were."""
    before = RngState([device])
    restore_rng_state(ranks.gather(before.states)[0], [device])
    yield
    if ranks.rank:
        before.restore()


def join_outputs(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of `parts` of these `sizes` as one structure, with tensors joined along their first dimension.

    A tensor that belongs to no sample is the first part's: a number such as a learned temperature, a parameter. Tuples,
    lists and mappings are records: their entries are joined, each with those of the other parts.

    Raises:
        WorkloadError: The parts' outputs differ in structure, shape, or in a value that is no tensor; a tensor has no
            rows for its samples; or a list may have an entry for each sample, or a number count them.
    """
    return parts[0] if len(parts) == 1 else _join(parts, sizes)


def _join(nodes: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = nodes[0]
    if all(isinstance(node, Tensor) for node in nodes):
        return _join_tensors(nodes, sizes)
    inner = [None if isinstance(node, Tensor) else pytree.children(node) for node in nodes]
    pairs = list(zip(nodes, sizes, strict=True))
    if inner[0] is None:
        if all(type(node) is int and node == size for node, size in pairs):
            raise WorkloadError(
                f"an output is {sizes[0]}, the number of samples of a part, which is not that of the whole batch",
                hint="return no such number, and count samples in the loss",
            )
        is_equal = {repr(node) for node in nodes} == {repr(first)} and not pytree.contains_tensors(first)
        return first if is_equal or all(node is first for node in nodes) else _refuse_structure()
    if all(isinstance(node, list) and len(node) == size for node, size in pairs):
        raise WorkloadError(
            f"an output is a list of {sizes[0]} entries for a part of {sizes[0]} samples, which may be one for each",
            hint="stack what belongs to samples to a tensor, and return other entries as a tuple or a dict",
        )
    rows = [children or [] for children in inner]
    steps = [[step for step, _ in row] for row in rows]
    if any(type(node) is not type(first) for node in nodes) or any(one != steps[0] for one in steps):
        _refuse_structure()
    columns = zip(*([child for _, child in row] for row in rows), strict=True)
    return pytree.rebuild(first, [_join(column, sizes) for column in columns])


def _join_tensors(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = column[0]
    if len(set(map(_place, column))) == 1:
        return first
    if not first.ndim:
        plain = [number.nan_to_num() for number in column if is_plain_tensor(number)]
        if any(not torch.equal(number, plain[0]) for number in plain):
            raise WorkloadError(
                "an output is a number that differs between two parts of the batch",
                hint="return the rows that it is computed of, and compute it in the loss",
            )
        return first
    if any(not rows.ndim or len(rows) % size for rows, size in zip(column, sizes, strict=True)):
        raise WorkloadError(
            f"an output of a part of {sizes[0]} samples has the shape {list(first.shape)}",
            hint="return tensors whose first dimension is the sample, or else a parameter itself",
        )
    try:
        return torch.cat([*column])
    except RuntimeError as error:
        if find_out_of_memory(error) is not None:
            raise
        raise WorkloadError(
            f"the outputs of two parts of the batch cannot be joined: {error}",
            hint="return tensors whose first dimension is the sample, and make the others equal",
        ) from None


def _refuse_structure() -> NoReturn:
    raise WorkloadError(
        "the outputs of two parts of the batch have different structures, or other values that are no tensors",
        hint="return tensors whose first dimension is the sample, and count samples in the loss",
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
