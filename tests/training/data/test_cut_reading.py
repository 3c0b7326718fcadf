from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from small_data import DrawingBatches, DrawingRows, DrawingStream, drawing_collate
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import autoaccum
from autoaccum.accumulation.randomness import RandomState
from autoaccum.training.data.source import Source, open_source
from autoaccum.training.stopping import StopAsked, Stopping

PACKAGE = str(Path(autoaccum.__file__).parent)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class OwnRows(DrawingRows):
    """Draws from a generator of its own as well; its third item asks to stop where it `asks`."""

    def __init__(self, asks: bool) -> None:
        super().__init__(12)
        self.own, self.asks = np.random.default_rng(1), asks

    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index)
        if self.asks and len(self.read) == 3:
            ask_to_stop()
        return row + self.own.random()


class LateSampler(Sampler[int]):
    """Draws each index, here, when it is asked for."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            index = int(random.random() * 6 + torch.rand(()).item() * 6)
            if self.asks and number == 2:
                ask_to_stop()
            yield index

    def __len__(self) -> int:
        return 12


class Batches(DrawingBatches):
    def __init__(self, asks: bool) -> None:
        super().__init__([1, 1, 1, 1, 4, 4])
        self.asks = asks

    def __iter__(self) -> Iterator[Tensor]:
        for number, batch in enumerate(super().__iter__()):
            if self.asks and number == 2:
                ask_to_stop()
            yield batch


class Collate:
    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def __call__(self, rows: list[Tensor]) -> Tensor:
        batch = drawing_collate(rows)
        if self.asks:
            ask_to_stop()
        return batch


FORMS: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "rows": lambda asks: (OwnRows(asks), None),
    "collate": lambda asks: (OwnRows(False), Collate(asks)),
    "sampler": lambda asks: (DataLoader(OwnRows(False), 2, sampler=LateSampler(asks)), None),
    "batches": lambda asks: (Batches(asks), None),
    "samples": lambda asks: (DrawingStream(12), Collate(asks)),
}


def opened(form: str, asks: bool) -> tuple[Source, Any]:
    data, collate = FORMS[form](asks)
    source = open_source(data, target_batch=4, seed=3, workers=0, collate=collate)
    source.part_size = 2
    source.start_epoch(0)
    return source, getattr(data, "dataset", data)


def drawn(data: Any) -> list[Any]:
    """What all generators give next; they stay where they are."""
    before, own = RandomState(), getattr(data, "own", None)
    values = [random.random(), np.random.rand(), torch.rand(()).item()]
    before.restore()
    return [*values, None if own is None else str(own.bit_generator.state)]


class SignalAtLine:
    """Asks to stop at the line of this package's that has this number; `left` is how many are missing."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.endswith("stopping.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                ask_to_stop()
        return self


def was_stopped(source: Source, number: int = 0) -> bool:
    """Whether reading windows was cut short; a signal comes at line `number`, where one is given."""
    outer, cut = sys.gettrace(), False
    with suppress(SystemExit), Stopping() as stopping:
        source.interruptible = stopping.interruptible
        sys.settrace(SignalAtLine(number) if number else outer)
        try:
            source.next_window()
        except StopAsked:
            cut = True
        finally:
            sys.settrace(outer)
    return cut


@pytest.mark.parametrize("form", FORMS)
def test_a_signal_while_data_is_read_leaves_random_states_as_they_were(form: str) -> None:
    source, data = opened(form, asks=True)
    before, place = drawn(data), repr(source.state())
    assert was_stopped(source)
    assert repr(source.state()) == place
    assert drawn(data) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_signal_at_any_line_leaves_random_states_as_they_were(form: str) -> None:
    cuts: list[bool] = []
    while len(cuts) < 2 or any(cuts[-20:]):
        source, data = opened(form, asks=False)
        before, place = drawn(data), repr(source.state())
        cuts.append(was_stopped(source, len(cuts) + 1))
        assert repr(source.state()) == place
        assert drawn(data) == before, f"cut at line {len(cuts)}"
    assert sum(cuts) > 100


def test_a_signal_within_the_drawing_for_workers_leaves_random_states_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(OwnRows(False), 4, sampler=LateSampler(False), num_workers=1, prefetch_factor=1)
    source = open_source(loader, target_batch=4, seed=3, workers=0)
    source.start_epoch(0)
    source.start_workers()
    before, put_back, calls = drawn(None), torch.set_rng_state, []

    def asking(state: Tensor) -> None:
        calls.append(state)
        if len(calls) == 2:  # Within the stream's own putting back, which is within reading.
            ask_to_stop()
        put_back(state)

    monkeypatch.setattr(torch, "set_rng_state", asking)
    assert was_stopped(source)
    source.close()
    assert drawn(None) == before
