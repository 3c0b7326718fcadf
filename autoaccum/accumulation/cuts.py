"""How a batch is cut into the parts of an update: by a number of samples, or by a token budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from autoaccum.accumulation.packing import pack, pack_in_order, part_cost
from autoaccum.accumulation.schedule import check_multiple, slices, split_evenly
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.messages import message
from autoaccum.sources.batches import batch_size, select_samples, split_batch
from autoaccum.sources.pytree import CustomBatch
from autoaccum.sources.token_costs import TokenCosts


@dataclass(frozen=True)
class Limit:
    """The most of a micro-batch: a number of samples or padded tokens, and the argument that it is given by."""

    number: int
    unit: Literal["micro_batch", "micro_tokens"] = "micro_batch"

    @property
    def counted(self) -> Literal["sample", "token"]:
        """What the number counts."""
        return "sample" if self.unit == "micro_batch" else "token"


@dataclass(frozen=True)
class Cut:
    """The parts of one batch.

    Attributes:
        sizes: The samples of each part, in order.
        largest: The cost of the largest part; by tokens, of one with more than one sample, 0 if there is none.
        indices: The samples of each part; None if they are in the order of the batch.
    """

    sizes: tuple[int, ...]
    largest: int
    indices: list[list[int]] | None = None

    def sort(self, batch: Any) -> Any:
        """Return the batch in the order of its parts."""
        return batch if self.indices is None else select_samples(batch, [[*chain(*self.indices)]])[0]


@dataclass
class Cuts:
    """Cuts batches evenly by samples, or by `costs` as `packing` does within a token budget, each part trimmed.

    A batch within the budget is one part, and keeps its order. So does a batch with a `split` of its own.

    Attributes:
        multiple_of: The number that the samples of each part are a multiple of.
        costs: How tokens are counted and parts are trimmed; None if samples are counted.
        wrap_batch: Reads what the user's `trim` returns.
    """

    multiple_of: int
    costs: TokenCosts | None
    wrap_batch: Callable[[Any], Any]
    _has_warned: bool = False

    def measure(self, batch: Any, limit: int) -> list[int]:
        """Return the length of each sample, or 1; warn once of one that costs more than the `limit` of a part."""
        if self.costs is None:
            check_multiple(size := batch_size(batch), self.multiple_of, "a batch's size")
            return [1] * size
        lengths = self.costs.of_batch(batch)
        if max(lengths) > limit and not self._has_warned:
            self._has_warned = True
            warn_caller(message("sample_over_budget", length=max(lengths), micro_tokens=limit))
        return lengths

    def cut(self, batch: Any, lengths: list[int], limit: int) -> Cut:
        """Return the cut of a batch of samples of these lengths into parts that cost at most `limit`."""
        if self.costs is None:
            sizes = split_evenly(len(lengths), limit, self.multiple_of)
            return Cut(sizes, max(sizes))
        padding, indices = self.costs.padding, None
        if isinstance(batch, CustomBatch) or part_cost(lengths, padding) <= limit:
            parts = [lengths[part] for part in slices(pack_in_order(lengths, limit, padding))]
        else:
            indices = pack(lengths, limit, padding)
            parts = [[lengths[index] for index in part] for part in indices]
        largest = max((part_cost(part, padding) for part in parts if len(part) > 1), default=0)
        return Cut(tuple(map(len, parts)), largest, indices)

    def parts(self, batch: Any, cut: Cut) -> list[Any]:
        """Return the parts; they are copies unless they are in the order of the batch."""
        parts = split_batch(batch, cut.sizes) if cut.indices is None else select_samples(batch, cut.indices)
        return [self.trim(part) for part in parts]

    def trim(self, part: Any) -> Any:
        """Return a part without the padding that none of its samples needs."""
        trimmed = part if self.costs is None else self.costs.cut(part)
        return trimmed if self.costs is None or self.costs.trim is None else self.wrap_batch(trimmed)
