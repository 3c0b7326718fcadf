"""Opens training data of any kind as a source of windows, and refuses what is not data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from autoaccum.checks import describe_type, type_name
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data_windows import DataSettings
from autoaccum.training.iterable_data import BatchesSource, SamplesSource
from autoaccum.training.map_style_data import MapStyleSource
from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size, wrap_batch
from autoaccum.workload.readings import is_samples

Source: TypeAlias = MapStyleSource | SamplesSource | BatchesSource

_DATA_HINT = "give a Dataset, a DataLoader, or an iterable of batches"


def open_source(data: Any, settings: DataSettings) -> Source:
    """Return the source of windows for `data`.

    Args:
        data: A map-style Dataset, or another object with `__getitem__` and `__len__` that is not a list or tuple; an
            IterableDataset of samples; a DataLoader; or any other iterable, of batches.
        settings: How to read it.

    Raises:
        UsageError: The data is none of these, or has fewer samples than a window.
    """
    if settings.ranks > 1 and isinstance(data, DataLoader):
        _check_undivided(data)
    if isinstance(data, DataLoader) and can_fetch_samples(data):
        return MapStyleSource(data.dataset, settings, data)
    if is_map_style(data):
        return MapStyleSource(data, settings)
    if isinstance(data, IterableDataset):
        return SamplesSource(data, settings)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        return BatchesSource(data, settings, _count_samples(data, settings))
    _check_iterable(data)
    return BatchesSource(data, settings)


def _check_undivided(loader: DataLoader[Any]) -> None:
    """Raise UsageError if the loader itself leaves out the samples of other ranks."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UsageError(
                f"the DataLoader has a {type_name(sampler)}, and fit deals the samples to the ranks itself",
                hint="give it a sampler of all samples, such as shuffle=True",
            )


def can_fetch_samples(loader: DataLoader[Any]) -> bool:
    """Return whether samples can be fetched without the loader: not if a subclass iterates in its own way."""
    gives_indices = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    iterates_plainly = type(loader).__iter__ is DataLoader.__iter__ or hasattr(loader, "state_dict")
    return gives_indices and iterates_plainly


def is_map_style(data: Any) -> bool:
    """Return whether `data` gives samples by index. A list or another sequence counts as batches."""
    if isinstance(data, Mapping | IterableDataset | DataLoader | nn.Module | type):
        return False
    if isinstance(data, Sequence) and not isinstance(data, Dataset | range):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _check_iterable(data: Any) -> None:
    if isinstance(data, Mapping):
        raise UsageError(f"data is {describe_type(data)}", hint=f"wrap tensors by column in a Dataset, or {_DATA_HINT}")
    if isinstance(data, Dataset) and not hasattr(type(data), "__iter__"):
        raise UsageError(f"{describe_type(data)} has no length", hint="define __len__, or give a DataLoader of it")
    # Modules and strings are iterable but hold no batches; a class still has to be called.
    is_iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, str | bytes | type | nn.Module) or not is_iterable:
        raise UsageError(f"data is {describe_type(data)}", hint=_DATA_HINT)


def _count_samples(data: Sequence[Any], settings: DataSettings) -> int:
    """Count the samples of a list of batches; raise UsageError if it is empty, or looks like something else."""
    if not data:
        raise UsageError(f"data is an empty {type_name(data)}", hint="give at least one batch")
    try:
        sizes = [batch_size(wrap_batch(entry, settings.batching)) for entry in data]
        reason = _single_value(wrap_batch(data[0], settings.batching), sizes[0], "data[0]", top=True)
    except WorkloadError as error:
        reason = error.message
    if reason is not None:
        raise UsageError(
            f"data is {describe_type(data)} whose entries are no batches ({reason})",
            hint="a list must hold batches; wrap samples in a Dataset (def __getitem__, def __len__)",
        )
    return sum(sizes)


def _single_value(node: Any, size: int, path: str, *, top: bool = False) -> str | None:
    """Describe a number or a tensor without dimensions that belongs to no sample; None if there is none."""
    if isinstance(node, bool | int | float | complex):
        return f"{path} is {describe_type(node)}"
    if isinstance(node, pytree.CustomBatch) or is_samples(node, size, top=top):
        return None
    if pytree.is_leaf(node):
        return None if pytree.has_batch_dimension(node) else f"{path} is {describe_type(node)} without dimensions"
    reasons = (_single_value(child, size, path + step) for step, child in pytree.children(node) or ())
    return next((reason for reason in reasons if reason is not None), None)
