"""How a batch is cut into the parts of an update: by a number of samples, or by a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeAlias

from autoaccum.accumulation.packing import pack, pack_in_order, part_cost
from autoaccum.accumulation.schedule import check_multiple, slices, split_evenly
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.messages import message
from autoaccum.sources.batches import batch_size, select_samples, split_batch
from autoaccum.sources.pytree import CustomBatch
from autoaccum.sources.token_costs import TokenCosts


@dataclass(frozen=True)
class Cut:
    """The parts of one batch.

    Attributes:
        sizes: The samples of each part, in order.
        largest: What the largest part that can be made smaller counts, in samples or tokens; 0 if there is none.
        indices: The samples of each part; None if they are in the order of the batch.
    """

    sizes: tuple[int, ...]
    largest: int
    indices: list[list[int]] | None = None


@dataclass(frozen=True)
class SampleCuts:
    """Cuts batches evenly into parts of at most so many samples, multiples of `multiple_of`."""

    multiple_of: int
    unit: ClassVar[str] = "micro_batch"

    def measure(self, batch: Any, _most: int) -> int:
        """Return the samples of a batch."""
        size = batch_size(batch)
        check_multiple(size, self.multiple_of, "a batch's size")
        return size

    def cut(self, _batch: Any, size: int, most: int) -> Cut:
        """Return the cut of a batch of this size into parts of at most `most` samples."""
        sizes = split_evenly(size, most, self.multiple_of)
        return Cut(sizes, max(sizes))

    def parts(self, batch: Any, cut: Cut) -> list[Any]:
        """Return the parts, which are views."""
        return split_batch(batch, cut.sizes)

    def in_order(self, batch: Any, _cut: Cut) -> Any:
        """Return the batch in the order of its parts."""
        return batch


@dataclass
class TokenCuts:
    """Cuts batches into parts within a budget of tokens (`packing.pack`), each trimmed to its longest sample.

    A batch within the budget is one part, and keeps its order. So does a batch with a `split` of its own.

    Attributes:
        costs: How samples are measured and batches trimmed.
        wrap_batch: Reads what the user's `trim` returns.
    """

    costs: TokenCosts
    wrap_batch: Callable[[Any], Any]
    unit: ClassVar[str] = "micro_tokens"
    _has_warned: bool = False

    def measure(self, batch: Any, most: int) -> list[int]:
        """Return the length of each sample; warn once of one that costs more than `most` tokens."""
        lengths = self.costs.of_batch(batch)
        if max(lengths) > most and not self._has_warned:
            self._has_warned = True
            warn_caller(message("sample_over_budget", length=max(lengths), micro_tokens=most))
        return lengths

    def cut(self, batch: Any, lengths: list[int], most: int) -> Cut:
        """Return the cut of a batch of samples of these lengths into parts of at most `most` tokens."""
        padding, indices = self.costs.padding, None
        if isinstance(batch, CustomBatch) or part_cost(lengths, padding) <= most:
            sizes = pack_in_order(lengths, most, padding)
            parts = [lengths[part] for part in slices(sizes)]
        else:
            indices = pack(lengths, most, padding)
            parts = [[lengths[index] for index in part] for part in indices]
        largest = max((part_cost(part, padding) for part in parts if len(part) > 1), default=0)
        return Cut(tuple(map(len, parts)), largest, indices)

    def parts(self, batch: Any, cut: Cut) -> list[Any]:
        """Return the parts, trimmed; they are copies, unless they are in the order of the batch."""
        split = split_batch(batch, cut.sizes) if cut.indices is None else select_samples(batch, cut.indices)
        return [self.trim(part) for part in split]

    def trim(self, part: Any) -> Any:
        """Return a part without the padding that none of its samples needs."""
        trimmed = self.costs.cut(part)
        return trimmed if self.costs.trim is None else self.wrap_batch(trimmed)

    def in_order(self, batch: Any, cut: Cut) -> Any:
        """Return the batch in the order of its parts."""
        return batch if cut.indices is None else select_samples(batch, [[*chain(*cut.indices)]])[0]


Cuts: TypeAlias = SampleCuts | TokenCuts
