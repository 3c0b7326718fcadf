"""Windows hold every sample once an epoch, and are read on from any of them, bit for bit."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import (
    DrawingBatches,
    DrawingRows,
    DrawingStream,
    StatefulBatches,
    UnevenRows,
    assert_same,
    drawing_collate,
    indices_of,
    opened,
    padding_collate,
    planning_batches,
    remaining,
    windows_of,
)
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.training.fit_events import Notice
from autoaccum.training.windows import WindowReader

SIZES = [5, 3, 12, 1, 8, 8]
COUNT = sum(SIZES)


class Order(Sampler[int]):
    """An order of all rows, by a class derived from this one."""

    def __len__(self) -> int:
        return COUNT


class GlobalSampler(Order):
    """Draws from every global generator, as late as possible."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(COUNT))
        while rest:
            place = int((random.random() + np.random.rand() + torch.rand(()).item()) / 3 * len(rest))
            yield rest.pop(place)


class EpochSampler(Order):
    """Knows its epoch only from `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % COUNT for index in range(COUNT)])


class OwnGenerator(Order):
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


class Pairs(Sampler[list[int]]):
    """Takes its indices from another sampler, through a generator of its own as well."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.drawn = sampler, {"own": random.Random(4)}

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        self.drawn["own"].shuffle(indices)
        return (indices[at : at + 2] for at in range(0, COUNT, 2))


class AugmentedRows(DrawingRows):
    """Draws from generators of its own, one of them within an object, as libraries of augmentations have them."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self.rng, self.transform = np.random.RandomState(3), SimpleNamespace(random_generator=np.random.default_rng(3))

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.rng.rand() + self.transform.random_generator.random()


class StatefulLoader(DataLoader[Tensor]):
    """Like torchdata's: over an iterable, with a state of its own."""

    place, start = 0, 0

    def __iter__(self) -> Any:
        batches = super().__iter__()
        self.place, self.start = self.start, 0
        for _ in range(self.place):
            next(batches)
        return self._rest(batches)

    def _rest(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


class Unsavable(StatefulBatches):
    """Has a state that would run code when loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "what": StatefulBatches}


class OwnStream(DrawingStream):
    """Adds numbers from a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[Tensor]:
        return (row + self.rng.random() for row in super().__iter__())


def drawn_once() -> list[Tensor]:
    """Return the same batches each time."""
    seed_all(9)
    return list(DrawingBatches(SIZES))


def loader(*, rows: Any = None, batch: int = 4, **options: Any) -> Any:
    """Return a function that makes a loader, with new samplers and generators each time: `options` has their makers."""
    sizes: dict[str, Any] = {} if "batch_sampler" in options else {"batch_size": batch}
    return lambda: DataLoader(
        DrawingRows(COUNT) if rows is None else rows(),
        **sizes,
        **{name: make() if callable(make) and name != "collate_fn" else make for name, make in options.items()},
    )


MAP_STYLE: dict[str, Any] = {
    "dataset": lambda: DrawingRows(COUNT),
    "loader": loader(shuffle=True, collate_fn=drawing_collate),
    "own generator": loader(batch=7, shuffle=True, generator=torch.Generator),
    "sampler's generator": loader(
        sampler=lambda: RandomSampler(range(COUNT), replacement=True, generator=torch.Generator())
    ),
    "global generators": loader(sampler=GlobalSampler),
    "batch sampler": loader(batch_sampler=lambda: BatchSampler(SubsetRandomSampler(range(COUNT)), 3, False)),
    "batches of its own": loader(batch_sampler=[list(range(size)) for size in range(1, 10)]),
    "epochs": loader(sampler=EpochSampler),
    "dataset's own generators": loader(rows=AugmentedRows, shuffle=True),
    "sampler's own Generator": loader(sampler=lambda: OwnGenerator(torch.Generator())),
    "sampler's own Random": loader(sampler=lambda: OwnGenerator(random.Random())),
    "sampler's own generator of NumPy": loader(sampler=lambda: OwnGenerator(np.random.default_rng())),
    "batch sampler's own generators": loader(batch_sampler=lambda: Pairs(OwnGenerator(torch.Generator()))),
}
ITERABLE: dict[str, Any] = {
    "batches": lambda: DrawingBatches(SIZES),
    "list": drawn_once,
    "samples": lambda: DrawingStream(COUNT),
    "loader of samples": loader(rows=lambda: DrawingStream(COUNT)),
    "stateful": lambda: StatefulBatches(SIZES),
    "stateful loader": lambda: StatefulLoader(DrawingStream(COUNT), 4),
    "unkeepable state": lambda: Unsavable(SIZES),
    "generator of its own": lambda: OwnStream(COUNT),
}
FORMS = {**MAP_STYLE, **ITERABLE}
FORWARD = r"^the data has no state_dict: [\d]+ windows were read forward$"
NOTES = {
    "batches": FORWARD,
    "samples": FORWARD,
    "stateful": r"^the data resumed from its own state_dict$",
    "stateful loader": r"^the data resumed from its own state_dict$",
    "unkeepable state": r"^its state_dict could not be saved: [\d]+ windows were read forward$",
}


def opened_form(form: str, data: Any = None) -> WindowReader:
    collate = drawing_collate if form in ("dataset", "samples") else None
    return opened(FORMS[form]() if data is None else data, collate=collate)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.standard_normal()), torch.randn(1).item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@settings(max_examples=count_examples(50))
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    target=st.integers(1, 60),
    part_size=st.integers(1, 70),
    loader_batch=st.integers(1, 70),
)
def test_windows_hold_every_sample_once_an_epoch(
    sizes: list[int], target: int, part_size: int, loader_batch: int
) -> None:
    count = sum(sizes)
    rows = DrawingRows(count)
    for data in (rows, DataLoader(rows, loader_batch, shuffle=True), DrawingStream(count), DrawingBatches(sizes)):
        if count < target:
            with pytest.raises(UsageError, match=f"has {count} samples, fewer than one update .{target}."):
                opened(data, target).next_window()
            continue
        windows = windows_of(opened(data, target, part_size=part_size), range(2))
        for epoch in range(2):
            counts = [window.samples for at, window in windows if at == epoch]
            assert counts == [target] * (count // target) + [count % target] * (count % target > 0)
            indices = indices_of(windows, epoch)
            is_ordered = isinstance(data, DrawingStream | DrawingBatches)
            assert (indices if is_ordered else sorted(indices)) == list(range(count))
        assert all(sum(map(len, window.parts)) == window.samples for _, window in windows)
        if not isinstance(data, DrawingBatches):
            assert max(len(part) for _, window in windows for part in window.parts) <= part_size


@pytest.mark.parametrize("form", FORMS)
def test_resumes_at_any_window_bit_for_bit(form: str) -> None:
    source = opened_form(form)
    planning_batches(source)
    whole, states = remaining(source, range(3))
    for number, state in enumerate(states):
        seed_all(number)
        data = FORMS[form]()
        resumed = opened_form(form, data)
        if form in ITERABLE and number % 2:
            planning_batches(resumed)
        note = resumed.load_state_dict(state)
        windows = windows_of(resumed, range(whole[number][0], 3))
        assert_same(windows, whole[number + 1 :])
        if form in MAP_STYLE:
            assert note is None
            rows = data if form == "dataset" else data.dataset
            assert len(rows.read) == sum(window.samples for _, window in windows), "nothing is read twice"
        elif form in NOTES and (number + 1 < len(whole) and whole[number + 1][0] == whole[number][0]):
            assert note is not None
            assert not note.warns
            assert re.search(NOTES[form], str(note.message))
    # With the epoch after a finished one, from its last window, from its end, and from the start of the next.
    last = max(number for number, (epoch, _) in enumerate(whole) if epoch == 1)
    ended, started = opened_form(form), opened_form(form)
    remaining(ended, range(2))
    remaining(started, range(2))
    started.start_epoch(2)
    for state in (states[last], ended.state_dict(), started.state_dict()):
        resumed = opened_form(form)
        resumed.load_state_dict(state)
        assert_same(windows_of(resumed, range(2, 3)), whole[last + 1 :])


@pytest.mark.parametrize("form", FORMS)
def test_training_and_reading_do_not_disturb_each_other(form: str) -> None:
    first = windows_of(opened_form(form), range(2))
    source = opened_form(form)
    planning_batches(source)
    seed_all(1)
    expected = [draws() for _ in range(12)]
    seed_all(1)
    drawn, windows = [], []
    for epoch in range(2):
        source.start_epoch(epoch)
        while (window := source.next_window()) is not None:
            drawn.append(draws())
            source.state_dict()
            windows.append((epoch, window))
    assert drawn == expected[: len(drawn)]
    assert_same(windows, first)


# Map-style data.


class Reshuffled(Order):
    """Shuffles the order of the epoch before: it depends on all epochs so far."""

    def __init__(self) -> None:
        self.order, self.rng = list(range(COUNT)), random.Random(1)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return iter(self.order[:])


class Counting(Order):
    """Counts its epochs itself."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter([(index * 5 + self.epochs) % COUNT for index in range(COUNT)])


@pytest.mark.parametrize("sampler", [Reshuffled, Counting])
def test_an_order_that_cannot_be_repeated_is_told_when_it_changes(sampler: Any) -> None:
    _, states = remaining(opened(loader(sampler=sampler)()), range(2))
    note = opened(loader(sampler=sampler)()).load_state_dict(states[5])
    assert note is not None
    assert note.message.code == "order_changed"
    assert note.warns


def test_parts_are_divided_as_a_plan_divides_them() -> None:
    for data in (DrawingRows(COUNT), loader(batch=7, shuffle=True)()):
        windows = windows_of(opened(data), range(1))
        assert [[len(part) for part in window.parts] for _, window in windows] == [[4, 3, 3]] * 3 + [[4, 3]]
    source = opened(DrawingRows(36), 12, part_size=5)
    source.multiple_of = 4
    assert {len(part) for _, window in windows_of(source, range(1)) for part in window.parts} == {4}


def test_plans_with_the_longest_samples() -> None:
    rows = UnevenRows([1, 2, 9, 4, 4, 4, 4, 4, 4, 4])
    for data in (rows, DataLoader(rows, 2, shuffle=True, collate_fn=padding_collate)):
        assert tuple(planning_batches(opened(data, collate=padding_collate))(3).shape) == (3, 9)
    with pytest.raises(UsageError, match="longest_of is 9, but a list of batches has no single samples"):
        planning_batches(opened(drawn_once()), longest_of=9)


def test_a_collate_that_drops_samples_is_refused() -> None:
    source = opened(DrawingRows(COUNT), collate=lambda rows: torch.stack(rows[1:]))
    with pytest.raises(WorkloadError, match=r"collate\(\) returned 3 samples"):
        source.next_window()


def test_a_sampler_of_unknown_length_is_too_short_when_it_ends() -> None:
    source = opened(DataLoader(DrawingRows(COUNT), batch_sampler=[[1, 2], [3]]))
    with pytest.raises(UsageError, match="has 3 samples, fewer than one update .10."):
        source.next_window()


class Broken(DrawingRows):
    error: Any = KeyError("mine")

    def __getitem__(self, index: int) -> Any:
        raise self.error


class Stopping(Broken):
    error = StopIteration()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_dataset_are_raised_and_a_stop_iteration_ends_nothing(workers: int) -> None:
    state = random.getstate()
    for data, error, message in (
        (Broken(COUNT), KeyError, "mine"),
        (Stopping(COUNT), RuntimeError, "end the epoch early"),
    ):
        source = opened(data, workers=workers)
        with pytest.raises(error, match=message):
            source.next_window()
        source.close()
    assert random.getstate() == state


# Iterables.


def test_batches_of_one_layout_are_joined_and_differently_padded_ones_are_not() -> None:
    batches = [torch.ones(2, width) for width in (2, 2, 5, 2)]
    ((_, window),) = windows_of(opened(batches, 8, part_size=8), range(1))
    assert [tuple(part.shape) for part in window.parts] == [(4, 2), (2, 5), (2, 2)]


def test_batches_without_samples_are_skipped() -> None:
    rows = torch.zeros(8, 3)
    source = opened(iter([rows[:0], rows[:3], rows[:0], rows[:5]]), 4)
    windows = [source.next_window() for _ in range(3)]
    assert [window and window.samples for window in windows] == [4, 4, None]


def test_data_with_a_state_is_not_reread() -> None:
    source = opened(StatefulBatches(SIZES))
    assert source.next_window() is not None
    data = StatefulBatches(SIZES)
    resumed = opened(data)
    resumed.load_state_dict(source.state_dict())
    windows = windows_of(resumed, range(1))
    assert indices_of(windows, 0) == list(range(10, COUNT))
    assert data.reads == 3, "the rest of the third batch comes from the checkpoint"


def test_a_generator_is_read_once_and_loses_nothing_to_planning() -> None:
    source = opened(batch for batch in DrawingBatches(SIZES))
    assert len(planning_batches(source)(2)) == 2
    windows, states = remaining(source, range(1))
    assert indices_of(windows, 0) == list(range(COUNT))
    source.start_epoch(1)
    with pytest.raises(UsageError, match="a generator of batches yields nothing in epoch 2: it can be iterated"):
        source.next_window()
    resumed = opened(batch for batch in DrawingBatches(SIZES))
    planning_batches(resumed)
    note = resumed.load_state_dict(states[0])
    assert note == Notice(Message("read_forward", {"windows": 1, "has_state": False}), warns=False)
    assert_same(windows_of(resumed, range(1)), windows[1:])


@pytest.mark.parametrize(("form", "shorter"), [("batches", DrawingBatches(SIZES[:2])), ("samples", DrawingStream(8))])
def test_data_that_became_shorter_is_reported(form: str, shorter: Any) -> None:
    _, states = remaining(opened(FORMS[form]()), range(1))
    with pytest.raises(UsageError, match="ends after 1 windows, but the run had read 3"):
        opened(shorter).load_state_dict(states[2])
