"""What is evaluated on is read from its start each time, and apart from training."""

from collections.abc import Iterator
from typing import Any

import pytest
from small_evaluations import (
    SAMPLES,
    Batches,
    Stream,
    dataset,
    samples,
)
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.errors import UsageError
from autoaccum.training.evaluation import EvaluationData


@pytest.mark.parametrize("data", [iter([1]), (x for x in [1]), 5], ids=["iterator", "generator", "number"])
def test_what_cannot_be_read_from_the_start_is_refused(data: Any) -> None:
    with pytest.raises(
        UsageError, match=r"the evaluation data is an? \w+, which cannot be read again.*: give a dataset, a DataLoader"
    ):
        EvaluationData(data)


# --- beside training ------------------------------------------------------------------------------------------------


class Placed(IterableDataset[Any]):
    """Goes on where it was, and can tell where that is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            self.place += 1
            yield tuple(part[self.place - 1] for part in samples())

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_what_keeps_one_place_for_both_is_refused() -> None:
    one = Placed()
    for trained_on, data in ((one, one), (DataLoader(one), one), (one, DataLoader(one))):
        with pytest.raises(UsageError, match="the same Placed, which keeps its place in itself: give a second"):
            EvaluationData(data, trained_on=trained_on)
        EvaluationData(DataLoader(Placed()), trained_on=trained_on)
    loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(UsageError, match="the same DataLoader, which keeps its place in itself"):
        EvaluationData(loader, trained_on=loader)


@pytest.mark.parametrize("make", [dataset, Stream, Batches, lambda: DataLoader(Stream(), batch_size=4)])
def test_what_starts_anew_each_time_is_shared_with_training(make: Any) -> None:
    shared = make()
    data = EvaluationData(shared, trained_on=shared)
    assert sum(len(batch[0]) for batch in data.batches(4, 0)) == SAMPLES
