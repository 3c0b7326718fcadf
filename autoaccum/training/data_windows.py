"""Windows, the samples of one update each, and what gives them from epoch to epoch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.workload import pytree
from autoaccum.workload.batches import Batching, batch_size, has_size, is_samples, join_batches, split_batch, wrap_batch
from autoaccum.workload.samples import LongestBatches, longest_first


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What data of any kind is read by.

    Attributes:
        target_batch: Samples of a window.
        seed: What order and augmentation depend on, with the epoch.
        workers: TrialProcesses that read ahead, where the data is no DataLoader with workers of its own.
        collate: From a list of samples to a batch; None: torch's `default_collate`. A DataLoader has its own.
        batching: How batches are counted and cut; None: by their rows.
        card: The card for whose copies parts are put into pinned memory; None: they are not.
    """

    target_batch: int
    seed: int
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    batching: Batching | None = None
    card: torch.device | None = None


@dataclass(frozen=True)
class Window:
    """The samples of one update, as parts for `Accumulator.step_parts`.

    Attributes:
        parts: Collated batches on the CPU, in order; each keeps its own form (padding, say).
        samples: How many they hold together: the target batch, or fewer at the end of an epoch.
    """

    parts: list[Any]
    samples: int

    def whole(self, multiple_of: int) -> Window:
        """The window without the last samples that make no multiple, as an epoch may end with."""
        left = self.samples % multiple_of
        if not left:
            return self
        parts, room = [], self.samples - left
        for part in self.parts:
            size = batch_size(part)
            kept = min(size, room)
            if kept:
                parts.append(part if kept == size else split_batch(part, [kept, size - kept])[0])
            room -= kept
        return Window(parts, self.samples - left)


class WindowSource(abc.ABC):
    """Windows of data, from epoch to epoch; its place can be kept and found again.

    Args:
        settings: What it is read by.
        name: What the data is, for messages: `a map-style dataset`.

    Attributes:
        part_size: The largest part to make, in samples; set before the first window, like all of these.
        multiple_of: What the sizes of parts are multiples of; what an epoch has left over is a part of its own.
        interruptible: Entered where `next_window` waits, or runs the user's code: what is raised there at any moment
            loses nothing. Random states are put back outside of it.
        saves_position: Whether `state_dict` will be asked for.
        samples_per_epoch: None where the data does not tell.
    """

    def __init__(self, settings: DataSettings, name: str) -> None:
        self.part_size, self.multiple_of = settings.target_batch, 1
        self.interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.saves_position = True
        self.samples_per_epoch: int | None = None
        self._settings, self._name = settings, name
        self._epoch, self._is_restored = 0, False

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0; the one that `load_state_dict` went to goes on where it was."""
        restored, self._is_restored = self._is_restored, False
        if not (restored and epoch == self._epoch):
            self._begin(epoch)

    @abc.abstractmethod
    def _begin(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""

    def _check_first(self, samples: int, epoch: int = 0) -> None:
        """Refuse an epoch that does not fill one window: a smaller batch than asked for is never trained unsaid.

        Raises:
            UsageError: It does not, or there is nothing at all.
        """
        if samples == 0 and epoch > 0:
            raise UsageError(
                f"{self._name} yields nothing in epoch {epoch + 1}: it can be gone through only once",
                hint="give what starts anew each time (a list, a DataLoader, an object whose __iter__ does), or ask"
                " for fewer epochs",
            )
        if samples == 0:
            raise UsageError(f"{self._name} has no samples", hint="give data that has some")
        if samples < self._settings.target_batch:
            raise UsageError(
                f"{self._name} has {samples:,} samples, fewer than the target batch of {self._settings.target_batch:,}",
                hint=f"use --target-batch {samples} or less (target_batch in code), or give more data",
            )

    def _counted(self, part: Any, size: int) -> Any:
        """A collated part, counted as the workload does.

        Raises:
            WorkloadError: `collate` made more or fewer samples than it was given.
        """
        made = wrap_batch(part, self._settings.batching)
        if not has_size(made, size):
            raise WorkloadError(
                f"collate made {batch_size(made)} samples of {size}", hint="return as many as it is given"
            )
        return made

    def _longest(self, samples: list[Any], collate: Callable[[list[Any]], Any] | None) -> LongestBatches:
        """Batches of `samples`, the longest first; as they come where nothing in them can be counted."""
        with suppress(WorkloadError):
            samples = longest_first(samples, len(samples))
        return LongestBatches(samples, collate, self._settings.batching)

    def _joined(self, parts: list[Any], sizes: list[int]) -> list[Any]:
        """`parts`, where consecutive ones of one form are joined if that makes fewer micro-batches.

        Sizes that are to be multiples are joined, too, where they are none. Differently padded parts stay apart.
        """
        runs: list[tuple[Any, list[int]]] = []
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            form = _form(part, size, top=True)
            if runs and runs[-1][0] == form:
                runs[-1][1].append(number)
            else:
                runs.append((form, [number]))
        return [part for _, run in runs for part in self._join([parts[at] for at in run], [sizes[at] for at in run])]

    def _join(self, parts: list[Any], sizes: list[int]) -> list[Any]:
        each, total = self.multiple_of, sum(sizes)
        together, apart = (
            sum(len(split_evenly(size, self.part_size, each)) for size in counts) for counts in ([total], sizes)
        )
        if len(parts) == 1 or (together == apart and not any(size % each for size in sizes)):
            return parts  # A join would be a copy for nothing.
        whole = join_batches(parts)
        # Lists have more than one reading, which may change with their length.
        return [whole] if batch_size(whole) == total else parts


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a sampler, a dataset or another iterable its epoch, where it has a `set_epoch`."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def start_loader_epoch(loader: DataLoader[Any], epoch: int, seed: int) -> None:
    """Tell a loader and its samplers their epoch, and seed the generators they were given."""
    for thing in (loader, loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        set_epoch(thing, epoch)
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def _form(node: Any, size: int, *, top: bool = False) -> Any:
    """What two batches must have in common to be joined: the nest, types, dtypes, trailing shapes, and single values.

    A batch that the workload cuts, a tensor that asks for a gradient, and an unknown object equal themselves alone.
    """
    if isinstance(node, pytree.CustomBatch) or getattr(node, "requires_grad", False):
        return id(node)
    if pytree.is_leaf(node):
        place = node.device if isinstance(node, Tensor) else "numpy"
        if pytree.has_batch_dimension(node) and len(node) == size:
            return type(node), place, node.dtype, tuple(node.shape[1:])
        return type(node), place, node.dtype, str(node.tolist())
    children = pytree.children(node)
    if children is None:
        return (type(node), node) if pytree.is_plain(node) else id(node)
    if pytree.is_sequence(node) and is_samples(node, size, top=top):
        return type(node), "samples", frozenset(map(type, node))
    return type(node), [(step, _form(child, size)) for step, child in children]
