"""A batch sampler for PyTorch's DataLoader that packs the samples of each update into micro-batches by their tokens."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from autoaccum.accumulation.packing import check_target, cut_windows, pack, share_by_length
from autoaccum.accumulation.ranks.group import world_size as count_ranks
from autoaccum.accumulation.rng_state import derive_seed
from autoaccum.checks import check_word, describe_type, read_count
from autoaccum.errors import UsageError
from autoaccum.sources.token_costs import is_length_sequence
from autoaccum.spec import Padding


class TokenBudgetSampler(Sampler[list[int]]):
    """Yields the indices of one micro-batch after the other, each within a token budget.

        sampler = TokenBudgetSampler(lengths, micro_tokens=8192, target_batch=256)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=4)
        for epoch in range(sampler.epoch, 3):
            for window in sampler.windows(loader):
                result = accumulator.step_parts(window)

    A *window* is one update: the next samples in the epoch's random order, divided among ranks so that each has about
    as many tokens, and packed into micro-batches. A sample is never split: one over the budget is a micro-batch of its
    own. All ranks make the sampler with the same arguments. The position is counted in windows, so a run may resume
    with another budget or number of ranks.

    Args:
        lengths: The tokens of each sample of the dataset, in its order.
        micro_tokens: The most padded tokens of a micro-batch: the length of its longest sample times the number of
            samples, or the sum of their lengths.
        target_batch: The samples of a window.
        target_tokens: Instead of `target_batch`: a window has as many whole samples as reach so many tokens.
        padding: `longest` (default) if `collate_fn` pads micro-batches to their longest sample, `none` if it does not.
        shuffle: Whether each epoch has a random order of its own; otherwise that of the dataset.
        seed: The seed of the orders, equal on all ranks.
        rank: The number of this rank, and `world_size` that of all; by default those of `torch.distributed`.

    Attributes:
        epoch: The current epoch, from 0. The end of `windows` begins the next one.

    Raises:
        UsageError: An argument is invalid, or neither target or both are given.

    Examples:
        >>> [*TokenBudgetSampler([3, 9, 4, 4], micro_tokens=9, target_batch=4, shuffle=False)]
        [[1], [2, 3], [0]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | np.ndarray[Any, Any],
        *,
        micro_tokens: int,
        target_batch: int | None = None,
        target_tokens: int | None = None,
        padding: Padding = "longest",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not is_length_sequence(lengths):
            seen = "empty" if isinstance(lengths, Sized) and len(lengths) == 0 else describe_type(lengths)
            raise UsageError(f"lengths is {seen}", hint="give the tokens of each sample of the dataset, in order")
        check_word(padding, "padding", get_args(Padding))
        self._micro_tokens, self._padding = read_count(micro_tokens, "micro_tokens"), padding
        values = lengths.tolist() if isinstance(lengths, Tensor | np.ndarray) else lengths
        self._lengths = [max(1, read_count(value, "a length", least=0)) for value in values]
        targets = {"target_batch": target_batch, "target_tokens": target_tokens}
        self._targets = {name: None if value is None else read_count(value, name) for name, value in targets.items()}
        check_target(target_batch, target_tokens)
        self._shuffle, self._seed = shuffle, read_count(seed, "seed", least=0)
        self._ranks = count_ranks() if world_size is None else read_count(world_size, "world_size")
        own = 0 if self._ranks == 1 else torch.distributed.get_rank() if count_ranks() > 1 else -1
        self._rank = own if rank is None else rank
        if self._rank not in range(self._ranks):
            raise UsageError(
                f"rank {rank} of world_size {self._ranks}", hint="ranks count from 0; give both, or neither"
            )
        self.epoch, self._position = 0, 0
        checksum = zlib.crc32(repr(self._lengths).encode())
        self._facts = {"samples": len(self._lengths), "lengths_checksum": checksum, **self._targets}
        self._facts |= {"shuffle": shuffle, "seed": self._seed}

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's micro-batches of the epoch, from the position on."""
        return chain.from_iterable(self._windows_from(self._position))

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches of the whole epoch."""
        return sum(map(len, self._windows_from(0)))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is in it already, as after `load_state_dict`."""
        if epoch != self.epoch:
            self.epoch, self._position = read_count(epoch, "epoch", least=0), 0

    def windows(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield what `loader` makes of this sampler's micro-batches in windows, to the end of the epoch.

        A window counts as done when it is yielded: `state_dict` continues after it. It may be empty if there are fewer
        samples than ranks.

        Raises:
            UsageError: The loader has another sampler, or ends early.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise UsageError(
                "the loader has another batch_sampler", hint="make it with DataLoader(dataset, batch_sampler=sampler)"
            )
        shares, batches = self._windows_from(self._position), iter(loader)
        for share in shares:
            window = list(islice(batches, len(share)))
            if len(window) != len(share):
                raise UsageError("the loader ends within an update", hint="let it yield every batch of the sampler")
            self._position += 1
            yield window
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values: the epoch, and its windows that `windows` has handed out."""
        return {"epoch": self.epoch, "windows": self._position, "of": dict(self._facts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned.

        Raises:
            UsageError: It is that of other samples, or of other windows of them.
        """
        for name, here in self._facts.items():
            if (there := state["of"].get(name)) != here:
                seen = f"the saved state has {name}={there}, this sampler {here}"
                raise UsageError(seen, hint="make the sampler with the same arguments")
        self.epoch, self._position = state["epoch"], state["windows"]

    def _windows_from(self, position: int) -> Iterator[list[list[int]]]:
        """Yield the indices of this rank's micro-batches of each window of the epoch, from a window on."""
        order = list(range(len(self._lengths)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", self.epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        samples = ((index, self._lengths[index]) for index in order)
        for window in islice(cut_windows(samples, **self._targets), position, None):
            indices, lengths = zip(*window, strict=True)
            share = share_by_length(lengths, self._ranks)[self._rank]
            parts = pack(lengths, self._micro_tokens, self._padding, share)
            yield [[indices[at] for at in part] for part in parts]
