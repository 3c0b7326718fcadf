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
from small_data import DrawingBatches, DrawingRows, DrawingStream, drawing_collate, opened
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import autoaccum
from autoaccum.accumulation.randomness import RandomState
from autoaccum.training.data.windows import Source
from autoaccum.training.stopping import StopAsked, Stopping

PACKAGE = str(Path(autoaccum.__file__).parent)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class OwnRows(DrawingRows):
    """Its third item asks to stop where it `asks`."""

    def __init__(self, asks: bool) -> None:
        super().__init__(12)
        self.asks = asks

    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index)
        if self.asks and len(self.read) == 3:
            ask_to_stop()
        return row


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


def begun(form: str, asks: bool) -> Source:
    data, collate = FORMS[form](asks)
    source = opened(data, 4, part_size=2, collate=collate)
    source.start_epoch(0)
    return source


def drawn() -> list[Any]:
    """What the generators give next; they stay where they are."""
    before = RandomState()
    values = [random.random(), np.random.rand(), torch.rand(()).item()]
    before.restore()
    return values


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
    source = begun(form, asks=True)
    before, place = drawn(), repr(source.state_dict())
    assert was_stopped(source)
    assert repr(source.state_dict()) == place
    assert drawn() == before


@pytest.mark.parametrize("form", ["rows", "sampler", "samples"])
def test_a_signal_at_any_line_leaves_random_states_as_they_were(form: str) -> None:
    cuts: list[bool] = []
    while len(cuts) < 2 or any(cuts[-20:]):
        source = begun(form, asks=False)
        before, place = drawn(), repr(source.state_dict())
        cuts.append(was_stopped(source, len(cuts) + 1))
        assert repr(source.state_dict()) == place
        assert drawn() == before, f"cut at line {len(cuts)}"
    assert sum(cuts) > 50
