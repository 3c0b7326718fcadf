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
from torch.utils.data import DataLoader, Sampler

import autoaccum
from autoaccum.accumulation.rng_state import RngState
from autoaccum.training.data_source import Source
from autoaccum.training.stop_signals import StopRequested, StopSignals

PACKAGE = str(Path(autoaccum.__file__).parent)


class LateSampler(Sampler[int]):
    """Draws each index only when it is requested."""

    def __iter__(self) -> Iterator[int]:
        return (int(random.random() * 6 + torch.rand(()).item() * 6) for _ in range(12))

    def __len__(self) -> int:
        return 12


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "rows": lambda: (DrawingRows(12), None),
    "sampler": lambda: (DataLoader(DrawingRows(12), 2, sampler=LateSampler()), None),
    "batches": lambda: (DrawingBatches([1, 1, 1, 1, 4, 4]), None),
    "samples": lambda: (DrawingStream(12), drawing_collate),
}


def start(form: str) -> Source:
    data, collate = FORMS[form]()
    source = opened(data, 4, part_size=2, collate=collate)
    source.start_epoch(0)
    return source


def drawn() -> list[Any]:
    """Return the generators' next values without advancing them."""
    before = RngState()
    values = [random.random(), np.random.rand(), torch.rand(()).item()]
    before.restore()
    return values


class SignalAtLine:
    """Sends a stop signal at a numbered line of this package; `left` counts the lines before it."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.endswith("stopping.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return self


def was_stopped(source: Source, number: int) -> bool:
    """Return whether a signal at line `number` interrupted reading."""
    outer, cut = sys.gettrace(), False
    with suppress(SystemExit), StopSignals() as stopping:
        source.interruptible = stopping.interruptible
        sys.settrace(SignalAtLine(number))
        try:
            source.next_window()
        except StopRequested:
            cut = True
        finally:
            sys.settrace(outer)
    return cut


@pytest.mark.parametrize("form", FORMS)
def test_a_signal_at_any_line_preserves_random_states(form: str) -> None:
    cuts: list[bool] = []
    while len(cuts) < 2 or any(cuts[-20:]):
        source = start(form)
        before, place = drawn(), repr(source.state_dict())
        cuts.append(was_stopped(source, len(cuts) + 1))
        assert repr(source.state_dict()) == place
        assert drawn() == before, f"cut at line {len(cuts)}"
    assert sum(cuts) > 50
