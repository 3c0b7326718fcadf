"""A map-style dataset, alone and in a DataLoader: every sample once an epoch, and the same after resuming anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import (
    DrawingRows,
    UnevenRows,
    assert_same,
    drawing_collate,
    indices_of,
    opened,
    padding_collate,
    remaining,
    windows_of,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data_source import Source

COUNT = 37


class GlobalSampler(Sampler[int]):
    """Draws from every global generator, as late as possible."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(COUNT))
        while rest:
            place = int((random.random() + np.random.rand() + torch.rand(()).item()) / 3 * len(rest))
            yield rest.pop(place)

    def __len__(self) -> int:
        return COUNT


class EpochSampler(Sampler[int]):
    """Knows its epoch only from `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % COUNT for index in range(COUNT)])

    def __len__(self) -> int:
        return COUNT


class OwnGenerator(Sampler[int]):
    """Draws from a generator under a name of its own, some numbers at the start and some late."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self, below: int) -> int:
        if isinstance(self.rng, torch.Generator):
            return int(torch.randint(below, (), generator=self.rng))
        return int(self.rng.integers(below) if isinstance(self.rng, np.random.Generator) else self.rng.randint(0, 99))

    def __iter__(self) -> Iterator[int]:
        rest, start = list(range(COUNT)), self.draw(COUNT)
        while rest:
            yield rest.pop((start + self.draw(COUNT)) % len(rest))

    def __len__(self) -> int:
        return COUNT


class Pairs(Sampler[list[int]]):
    """Takes its indices from another sampler, through a generator of its own as well."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.drawn = sampler, {"own": random.Random(4)}

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        self.drawn["own"].shuffle(indices)
        return (indices[at : at + 2] for at in range(0, COUNT, 2))


class Reshuffled(Sampler[int]):
    """Shuffles the order of the epoch before: it depends on all epochs so far."""

    def __init__(self) -> None:
        self.order, self.rng = list(range(COUNT)), random.Random(1)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return iter(self.order[:])

    def __len__(self) -> int:
        return COUNT


class Counting(EpochSampler):
    """Counts its epochs itself."""

    def __iter__(self) -> Iterator[int]:
        self.seen = getattr(self, "seen", 0) + 1
        return iter([(index * 5 + self.seen) % COUNT for index in range(COUNT)])


class AugmentedRows(DrawingRows):
    """Draws from generators of its own, one of them within an object, as libraries of augmentations have them."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self.rng, self.transform = np.random.RandomState(3), SimpleNamespace(random_generator=np.random.default_rng(3))

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.rng.rand() + self.transform.random_generator.random()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


FORMS: dict[str, Any] = {
    "dataset": lambda: DrawingRows(COUNT),
    "loader": lambda: DataLoader(DrawingRows(COUNT), 4, shuffle=True, collate_fn=drawing_collate),
    "larger batches": lambda: DataLoader(DrawingRows(COUNT), 16, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(DrawingRows(COUNT), 7, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        DrawingRows(COUNT), 4, sampler=RandomSampler(range(COUNT), replacement=True, generator=generator())
    ),
    "weighted": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),
    "global generators": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=GlobalSampler()),
    "batch sampler": lambda: DataLoader(
        DrawingRows(COUNT), batch_sampler=BatchSampler(SubsetRandomSampler(range(COUNT)), 3, False)
    ),
    "batches of its own": lambda: DataLoader(DrawingRows(COUNT), batch_sampler=[list(range(n)) for n in range(1, 10)]),
    "epochs": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=EpochSampler()),
    "dataset's own generators": lambda: DataLoader(AugmentedRows(), 4, shuffle=True),
    **{
        f"sampler's own {type(rng()).__name__}": lambda rng=rng: DataLoader(
            DrawingRows(COUNT), 4, sampler=OwnGenerator(rng())
        )
        for rng in (torch.Generator, random.Random, np.random.default_rng, np.random.RandomState)
    },
    "batch sampler's own generators": lambda: DataLoader(
        DrawingRows(COUNT), batch_sampler=Pairs(OwnGenerator(torch.Generator()))
    ),
}


@given(
    count=st.integers(1, 60),
    target=st.integers(1, 60),
    part_size=st.integers(1, 70),
    loader_batch=st.none() | st.integers(1, 70),
)
def test_windows_hold_every_sample_once_an_epoch(
    count: int, target: int, part_size: int, loader_batch: int | None
) -> None:
    rows = DrawingRows(count)
    data = rows if loader_batch is None else DataLoader(rows, loader_batch, shuffle=True)
    if count < target:
        with pytest.raises(UsageError, match=f"has {count} samples, fewer than the target batch of {target}"):
            opened(data, target)
        return
    source = opened(data, target, part_size=part_size)
    windows = windows_of(source, range(2))
    assert source.samples_per_epoch == count
    for epoch in range(2):
        sizes = [window.samples for at, window in windows if at == epoch]
        assert sizes == [target] * (count // target) + [count % target] * (count % target > 0)
        assert sorted(indices_of(windows, epoch)) == list(range(count))
    assert all(sum(len(part) for part in window.parts) == window.samples for _, window in windows)
    assert max(len(part) for _, window in windows for part in window.parts) <= part_size


def test_parts_are_divided_as_a_plan_divides_them() -> None:
    for data in (DrawingRows(COUNT), DataLoader(DrawingRows(COUNT), 7, shuffle=True)):
        windows = windows_of(opened(data), range(1))
        assert [[len(part) for part in window.parts] for _, window in windows] == [[4, 3, 3]] * 3 + [[4, 3]]
    source = opened(DrawingRows(36), 12, part_size=5)
    source.multiple_of = 4
    assert {len(part) for _, window in windows_of(source, range(1)) for part in window.parts} == {4}


@pytest.mark.parametrize("form", FORMS)
def test_resumes_at_any_window_bit_for_bit(form: str) -> None:
    more: dict[str, Any] = {"collate": drawing_collate} if form == "dataset" else {}
    source = opened(FORMS[form](), **more)
    source.planning_batch()
    whole, states = remaining(source, range(3))
    for number, state in enumerate(states):
        data = FORMS[form]()
        random.seed(number)
        torch.manual_seed(number)
        resumed = opened(data, **more)
        assert resumed.load_state_dict(state) is None
        windows = windows_of(resumed, range(whole[number][0], 3))
        assert_same(windows, whole[number + 1 :])
        rows = data if form == "dataset" else data.dataset
        assert len(rows.read) == sum(window.samples for _, window in windows), "nothing is read twice"
    resumed = opened(FORMS[form](), **more)
    resumed.load_state_dict(next(state for (epoch, _), state in zip(whole, states, strict=True) if epoch == 1))
    assert_same(windows_of(resumed, range(2, 3)), [entry for entry in whole if entry[0] == 2])


@pytest.mark.parametrize("sampler", [Reshuffled, Counting])
def test_an_order_that_cannot_be_repeated_is_told_when_it_changes(sampler: Any) -> None:
    def make() -> Source:
        return opened(DataLoader(DrawingRows(COUNT), 4, sampler=sampler()))

    _, states = remaining(make(), range(2))
    note = make().load_state_dict(states[5])
    assert note is not None
    assert note.text.startswith("the sampler's order has changed")
    assert note.warns


@pytest.mark.parametrize("form", ["dataset", "loader", "global generators", "own generator"])
def test_does_not_change_the_callers_generators(form: str) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    np.random.standard_normal()  # leaves one in store
    torch.randn(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    source = opened(FORMS[form]())
    source.planning_batch()
    remaining(source, range(2))
    resumed = opened(FORMS[form]())
    resumed.load_state_dict(source.state_dict())
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == str(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_custom_batches_of_one_layout_are_joined_and_differently_padded_ones_are_not() -> None:
    lengths = [2, 2, 2, 2, 5, 5, 2, 2]
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    loader = DataLoader(UnevenRows(lengths), batch_sampler=pairs, collate_fn=padding_collate)
    ((_, window),) = windows_of(opened(loader, 8, part_size=8), range(1))
    assert [tuple(part.shape) for part in window.parts] == [(4, 2), (2, 5), (2, 2)]


def test_plans_with_the_longest_samples() -> None:
    rows = UnevenRows([1, 2, 9, 4, 4, 4, 4, 4, 4, 4])
    for data in (rows, DataLoader(rows, 2, shuffle=True, collate_fn=padding_collate)):
        assert tuple(opened(data, collate=padding_collate).planning_batch()(3).shape) == (3, 9)


def test_a_collate_that_drops_samples_is_refused() -> None:
    source = opened(DrawingRows(COUNT), collate=lambda rows: torch.stack(rows[1:]))
    source.start_epoch(0)
    with pytest.raises(WorkloadError, match=r"collate\(\) returned 3 samples"):
        source.next_window()


def test_a_sampler_of_unknown_length_is_too_short_when_it_ends() -> None:
    source = opened(DataLoader(DrawingRows(COUNT), batch_sampler=[[1, 2], [3]]))
    source.start_epoch(0)
    with pytest.raises(UsageError, match="has 3 samples, fewer than the target batch of 10"):
        source.next_window()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_dataset_are_raised_and_a_stop_iteration_ends_nothing(workers: int) -> None:
    class Broken(DrawingRows):
        raises: Any = KeyError("mine")

        def __getitem__(self, index: int) -> Any:
            raise self.raises

    class Stopping(Broken):
        raises = StopIteration()

    random.seed(1)
    state = random.getstate()
    for data, error, note in (
        (Broken(COUNT), KeyError, "mine"),
        (Stopping(COUNT), RuntimeError, "end the epoch early"),
    ):
        source = opened(data, workers=workers)
        source.start_epoch(0)
        with pytest.raises(error, match=note):
            source.next_window()
        source.close()
    assert random.getstate() == state
