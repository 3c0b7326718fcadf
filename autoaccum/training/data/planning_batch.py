"""What a plan is tried with: the worst of some samples, read without a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from autoaccum.errors import WorkloadError
from autoaccum.planning.request import LOOKED_AT as LOOKED_AT
from autoaccum.training.data.fetching import item
from autoaccum.training.data.kept_generators import find_generators, kept_states
from autoaccum.workload.batches import Batching
from autoaccum.workload.experiments import own_randomness
from autoaccum.workload.worst_case import LongestBatches, longest_first


class PlanningBatches(LongestBatches):
    """Batches of the longest samples, put together without a trace in the random states."""

    def __call__(self, size: int) -> Any:
        """One batch of `size` samples."""
        with own_randomness(), kept_states(find_generators(self._collate)):
            return super().__call__(size)


def longest_of_dataset(
    dataset: Any,
    choose: Callable[[int], Sequence[Any]],
    collate: Callable[[list[Any]], Any] | None,
    count: int = LOOKED_AT,
    batching: Batching | None = None,
) -> PlanningBatches:
    """Batches of the longest of some samples of `dataset`.

    Args:
        dataset: Read now; random states are put back.
        choose: From a number to at most as many of its indices.
        collate: As training's own.
        count: Samples to look at.
        batching: How batches are counted.
    """
    with own_randomness(), kept_states(find_generators(dataset)):
        return longest_of([item(dataset, index) for index in choose(count)], collate, batching)


def longest_of(
    samples: list[Any], collate: Callable[[list[Any]], Any] | None, batching: Batching | None = None
) -> PlanningBatches:
    """Batches of `samples`, the longest first; as they come where nothing in them can be counted."""
    with suppress(WorkloadError):
        samples = longest_first(samples, len(samples))
    return PlanningBatches(samples, collate, batching)
