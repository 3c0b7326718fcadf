"""Lists of batches, and what looks like something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data.batches_stream import BatchesSource
from autoaccum.training.data.reading import Reading
from autoaccum.workload import nests
from autoaccum.workload.batches import batch_size, is_samples

_WHAT = "give a Dataset, a DataLoader, or an iterable of batches"


def listed_batches(data: Sequence[Any], *, target_batch: int, seed: int) -> BatchesSource:
    """The source of a list or a tuple of batches.

    Raises:
        UsageError: It is empty, an entry is no batch, or it looks like samples or like one batch.
    """
    name = f"{nests.kind(data)} of {len(data):,} batches"
    if not data:
        raise UsageError(f"data is an empty {nests.type_name(data)}", hint="give at least one batch")
    _check_first(data)
    samples = sum(_size(entry, number) for number, entry in enumerate(data))
    return BatchesSource(
        Reading(data, name, seed),
        target_batch=target_batch,
        unit="batches",
        length=len(data),
        samples_per_epoch=samples,
    )


def check_iterable(data: Any) -> None:
    """See that batches could come from `data`.

    Raises:
        UsageError: They could not.
    """
    if isinstance(data, Mapping):
        raise UsageError(
            f"data is {nests.kind(data)}", hint=f"for columns of tensors, wrap them in a Dataset; else {_WHAT}"
        )
    if isinstance(data, Dataset) and not hasattr(type(data), "__iter__"):
        raise UsageError(
            f"{nests.kind(data)} has no length",
            hint="define __len__, or give a DataLoader over it with a sampler",
        )
    # A module's or a string's entries are no batches, and a class is not yet anything.
    if isinstance(data, str | bytes | type | nn.Module) or not _is_iterable(data):
        raise UsageError(f"data is {nests.kind(data)}", hint=_WHAT)


def _check_first(data: Sequence[Any]) -> None:
    if _are_columns(data):
        raise UsageError(
            f"data is {nests.kind(data)} of tensors of different kinds, which looks like one batch",
            hint="give torch.utils.data.TensorDataset(*data) for all samples, or a list of batches",
        )
    reason = _what_is_no_batch(data[0])
    if reason is not None:
        raise UsageError(
            f"data is {nests.kind(data)} whose entries look like samples ({reason})",
            hint="a list is taken for batches; wrap samples in a Dataset (def __getitem__, def __len__)",
        )


def _are_columns(data: Sequence[Any]) -> bool:
    """Whether the entries are as long as each other and of different kinds: `(inputs, targets)`."""
    if len(data) < 2 or not all(nests.holds_rows(entry) for entry in data):
        return False
    return len({len(entry) for entry in data}) == 1 and not nests.are_alike(data)


def _what_is_no_batch(entry: Any) -> str | None:
    try:
        size = batch_size(entry)
    except WorkloadError as error:
        return error.message
    return _alone(entry, size, "data[0]", top=True)


def _alone(node: Any, size: int, path: str, *, top: bool = False) -> str | None:
    """A number or a tensor without dimensions that belongs to no sample; None where there is none."""
    if isinstance(node, bool | int | float | complex):
        return f"{path} is {nests.kind(node)}"
    if nests.is_leaf(node):
        return None if nests.holds_rows(node) else f"{path} is {nests.kind(node)} without dimensions"
    if is_samples(node, size, top=top):
        return None
    found = (_alone(child, size, path + step) for step, child in nests.children(node) or ())
    return next((reason for reason in found if reason is not None), None)


def _size(entry: Any, number: int) -> int:
    try:
        return batch_size(entry)
    except WorkloadError as error:
        raise UsageError(f"data[{number}] is no batch: {error.message}", hint="give a list of batches") from error


def _is_iterable(data: Any) -> bool:
    return hasattr(data, "__iter__") or hasattr(data, "__getitem__")
