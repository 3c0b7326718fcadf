"""What is evaluated on is read from its start each time, and apart from training."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_evaluations import (
    CRITERION,
    SAMPLES,
    Batches,
    Numbers,
    Stream,
    dataset,
    evaluation,
    net,
    reason,
    samples,
    values,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.evaluation.evaluation_data import EvaluationData
from autoaccum.training.events import Evaluated


class Ending(Numbers):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index > 10:
            raise StopIteration
        return super().__getitem__(index)


def ending_collate(items: Any) -> Any:
    raise StopIteration


class BySteps(IterableDataset[Any]):
    """Iterated by an object without a generator, whose end is its own frame."""

    def __iter__(self) -> Any:
        self.left = 9
        return BySteps.Steps(self)

    class Steps:
        def __init__(self, owner: Any) -> None:
            self.owner = owner

        def __next__(self) -> Any:
            if self.owner.left == 0:
                raise StopIteration("done")
            self.owner.left -= 1
            return tuple(part[self.owner.left] for part in samples())


@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (Ending(), None),
        (dataset(), ending_collate),
        (Stream(), ending_collate),
        (DataLoader(Ending(), batch_size=4), None),
        (DataLoader(Ending(), batch_size=4, num_workers=1), None),
        (DataLoader(Ending(), batch_size=None), None),
    ],
    ids=["map-style", "collate", "iterable's collate", "loader", "workers", "unbatched"],
)
def test_a_stop_iteration_within_the_data_is_not_its_end(data: Any, collate: Any) -> None:
    said = reason(evaluation(data, collate=collate, evaluate=lambda model, batch: 0.0), net())
    assert said.startswith("StopIteration was raised within the evaluation data")
    assert "at test_evaluation_data.py" in said or getattr(data, "num_workers", 0) == 1


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_iterator_of_ones_own_ends_as_any(batch_size: int | None) -> None:
    outcome = evaluation(DataLoader(BySteps(), batch_size=batch_size, drop_last=False), evaluate=lambda m, b: 1.0)
    done = outcome.run(net(), 1)
    assert isinstance(done, Evaluated)
    assert done.samples == 9 if batch_size else done.samples > 0


@pytest.mark.parametrize("data", [iter([1]), (x for x in [1]), 5], ids=["iterator", "generator", "number"])
def test_what_cannot_be_read_from_the_start_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"the evaluation data is an? \w+.*: give a dataset, a DataLoader or"):
        EvaluationData(data)


# --- beside training ------------------------------------------------------------------------------------------------


class Shuffled:
    """A batch sampler with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(20, generator=self.generator).view(-1, 4).tolist())


class Jittered(Dataset[Any]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples()
        return x[index] + self.generator.normal(), y[index]


def test_generators_that_lie_deep_in_the_data_are_put_back() -> None:
    sampler, jittered = Shuffled(), Jittered()
    data = DataLoader(Subset(jittered, range(20)), batch_sampler=sampler)
    states = sampler.generator.get_state(), copy.deepcopy(jittered.generator.bit_generator.state)
    seen: list[Any] = []

    def see(model: nn.Module, batch: Any) -> float:
        seen.append(batch[0])
        return 0.0

    made, model = evaluation(data, evaluate=see), net()
    values(made, model)
    assert torch.equal(sampler.generator.get_state(), states[0])
    assert jittered.generator.bit_generator.state == states[1]
    first, seen[:] = torch.cat(seen), []
    list(data)  # An epoch of training.
    values(made, model)
    assert torch.equal(torch.cat(seen), first)


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


class OwnIterator(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    "share",
    [
        lambda one: (one, one),
        lambda one: (DataLoader(one), one),
        lambda one: (one, DataLoader(one)),
        lambda one: (DataLoader(one), DataLoader(one)),
    ],
    ids=["itself", "in a loader trained on", "in a loader evaluated", "in loaders"],
)
def test_what_keeps_one_place_for_both_is_refused(share: Any) -> None:
    for one in (Placed(), OwnIterator()):
        trained_on, data = share(one)
        with pytest.raises(UsageError, match=r"keeps its place in itself: give a second|read only once"):
            EvaluationData(data, trained_on=trained_on)
        EvaluationData(DataLoader(Placed()), trained_on=trained_on)


def test_a_training_says_what_it_trains_on() -> None:
    data = Placed()
    options: dict[str, Any] = {"target_batch": 4, "micro_batch": 4, "steps": 1, "progress": False}
    with pytest.raises(UsageError, match="evaluation and training read the same Placed"):
        autoaccum.fit(net(), DataLoader(data, batch_size=4), loss=CRITERION, eval_data=data, **options)


def test_a_loader_that_keeps_its_workers_is_read_apart_from_training() -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
    training = iter(loader)
    seen = [next(training)]
    data = EvaluationData(loader, trained_on=loader)
    assert sum(len(batch[0]) for batch in data.batches(4, 0)) == SAMPLES
    seen.extend(training)
    assert sum(len(batch[0]) for batch in seen) == SAMPLES


@pytest.mark.parametrize("make", [dataset, Stream, Batches, lambda: DataLoader(Stream(), batch_size=4)])
def test_what_starts_anew_each_time_is_shared_with_training(make: Any) -> None:
    shared = make()
    data = EvaluationData(shared, trained_on=shared)
    assert sum(len(batch[0]) for batch in data.batches(4, 0)) == SAMPLES
