from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import (
    DrawingBatches,
    DrawingStream,
    StatefulBatches,
    assert_same,
    drawing_collate,
    indices_of,
    opened,
    remaining,
    windows_of,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.errors import UsageError
from autoaccum.training.fit_events import Notice

SIZES = [5, 3, 12, 1, 8, 8]
COUNT, TARGET = sum(SIZES), 10


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


class Shuffling(DrawingBatches):
    """Buffers a few batches, and yields one of them at random."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        for batch in super().__iter__():
            buffer.append(batch)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


FORMS: dict[str, Any] = {
    "batches": lambda: DrawingBatches(SIZES),
    "list": lambda: list(DrawnOnce(SIZES)),
    "samples": lambda: DrawingStream(COUNT),
    "loader of samples": lambda: DataLoader(DrawingStream(COUNT), 4),
    "loader with a generator": lambda: DataLoader(DrawingStream(COUNT), 4, generator=generator()),
    "loader without batches": lambda: DataLoader(ManyRows(SIZES), batch_size=None),
    "stateful": lambda: StatefulBatches(SIZES),
    "stateful loader": lambda: StatefulLoader(DrawingStream(COUNT), 4),
    "unkeepable state": lambda: Unsavable(SIZES),
    "shuffling": lambda: Shuffling(SIZES),
    "generator of its own": lambda: OwnStream(COUNT),
    "loader over a generator of its own": lambda: DataLoader(OwnStream(COUNT), 4),
}
FORWARD = r"^the data has no state_dict: [\d]+ windows were read forward$"
NOTES = {
    "batches": FORWARD,
    "samples": FORWARD,
    "stateful": r"^the data resumed from its own state_dict$",
    "stateful loader": r"^the data resumed from its own state_dict$",
    "unkeepable state": r"^its state_dict could not be saved: [\d]+ windows were read forward$",
}


class OwnStream(DrawingStream):
    """Adds numbers from a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[Tensor]:
        return (row + self.rng.random() for row in super().__iter__())


class ManyRows(IterableDataset[Tensor]):
    """Yields batches."""

    def __init__(self, sizes: list[int]) -> None:
        self.batches = DrawingBatches(sizes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class DrawnOnce(DrawingBatches):
    """The same rows each time."""

    def __iter__(self) -> Iterator[Tensor]:
        random.seed(9)
        np.random.seed(9)
        torch.manual_seed(9)
        return super().__iter__()


@settings(max_examples=count_examples(50))
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12), target=st.integers(1, 15), part=st.integers(1, 20))
def test_windows_hold_every_sample_once_in_order(sizes: list[int], target: int, part: int) -> None:
    for data in (DrawingBatches(sizes), DrawingStream(sum(sizes))):
        source = opened(data, target, part_size=part)
        if sum(sizes) < target:
            source.start_epoch(0)
            with pytest.raises(UsageError, match=f"has {sum(sizes)} samples, fewer than the target batch of {target}"):
                source.next_window()
            continue
        windows = windows_of(source, range(2))
        for epoch in range(2):
            assert indices_of(windows, epoch) == list(range(sum(sizes)))
            full, rest = divmod(sum(sizes), target)
            counts = [window.samples for at, window in windows if at == epoch]
            assert counts == [target] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("planned", [False, True], ids=["", "planned"])
@pytest.mark.parametrize("form", FORMS)
def test_resumes_at_any_window_bit_for_bit(form: str, planned: bool) -> None:
    more: dict[str, Any] = {"collate": drawing_collate} if form == "samples" else {}
    source = opened(FORMS[form](), **more)
    if planned:
        source.planning_batch()
    whole, states = remaining(source, range(3))
    for number, state in enumerate(states):
        resumed = opened(FORMS[form](), **more)
        if planned and number % 2:
            resumed.planning_batch()
        note = resumed.load_state_dict(state)
        windows = windows_of(resumed, range(whole[number][0], 3))
        assert_same(windows, whole[number + 1 :])
        is_last = number + 1 == len(whole) or whole[number + 1][0] != whole[number][0]
        if form in NOTES and not is_last and not planned:
            assert note is not None
            assert not note.warns
            assert re.search(NOTES[form], note.text)


@pytest.mark.parametrize("form", FORMS)
def test_resumes_with_the_epoch_after_a_finished_one(form: str) -> None:
    whole, states = remaining(opened(FORMS[form]()), range(3))
    last = max(number for number, (epoch, _) in enumerate(whole) if epoch == 1)
    ended = opened(FORMS[form]())
    remaining(ended, range(2))
    started = opened(FORMS[form]())
    remaining(started, range(2))
    started.start_epoch(2)
    for state in (states[last], ended.state_dict(), started.state_dict()):
        resumed = opened(FORMS[form]())
        resumed.load_state_dict(state)
        assert_same(windows_of(resumed, range(2, 3)), whole[last + 1 :])


def test_data_with_a_state_is_not_reread() -> None:
    source = opened(StatefulBatches(SIZES))
    source.start_epoch(0)
    assert source.next_window() is not None
    source.commit()
    data = StatefulBatches(SIZES)
    resumed = opened(data)
    resumed.load_state_dict(source.state_dict())
    windows = windows_of(resumed, range(1))
    assert indices_of(windows, 0) == list(range(10, COUNT))
    assert data.reads == 3, "the rest of the third batch comes from the checkpoint"


def test_a_generator_is_read_once_and_loses_nothing_to_planning() -> None:
    source = opened(batch for batch in DrawingBatches(SIZES))
    assert len(source.planning_batch()) == SIZES[0]
    windows, states = remaining(source, range(1))
    assert indices_of(windows, 0) == list(range(COUNT))
    source.start_epoch(1)
    with pytest.raises(UsageError, match="a generator of batches yields nothing in epoch 2: it can be iterated"):
        source.next_window()
    resumed = opened(batch for batch in DrawingBatches(SIZES))
    resumed.planning_batch()
    note = resumed.load_state_dict(states[0])
    assert note == Notice("the data has no state_dict: 1 windows were read forward", warns=False)
    assert_same(windows_of(resumed, range(1)), windows[1:])


@pytest.mark.parametrize("form", FORMS)
def test_training_and_reading_do_not_disturb_each_other(form: str) -> None:
    first = windows_of(opened(FORMS[form]()), range(2))
    source = opened(FORMS[form]())
    source.planning_batch()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = [(random.random(), np.random.standard_normal(), torch.randn(1).item()) for _ in range(8)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    drawn, windows = [], []
    for epoch in range(2):
        source.start_epoch(epoch)
        while (window := source.next_window()) is not None:
            drawn.append((random.random(), np.random.standard_normal(), torch.randn(1).item()))
            source.commit()
            source.state_dict()
            windows.append((epoch, window))
    assert drawn == expected[: len(drawn)]
    assert_same(windows, first)


@pytest.mark.parametrize("form", ["batches", "samples"])
def test_data_that_became_shorter_is_reported(form: str) -> None:
    source = opened(FORMS[form]())
    _, states = remaining(source, range(1))
    shorter: Any = DrawingBatches(SIZES[:2]) if form == "batches" else DrawingStream(8)
    with pytest.raises(UsageError, match="ends after 1 windows, but the run had read 3"):
        opened(shorter).load_state_dict(states[2])


def test_entries_read_after_a_commit_do_not_move_the_position() -> None:
    for form in ("batches", "samples", "stateful"):
        source = opened(FORMS[form]())
        source.start_epoch(0)
        source.next_window()
        source.commit()
        lost = source.next_window()
        resumed = opened(FORMS[form]())
        resumed.load_state_dict(source.state_dict())
        resumed.start_epoch(0)
        again = resumed.next_window()
        assert lost is not None
        assert again is not None
        assert_same([(0, lost)], [(0, again)])
