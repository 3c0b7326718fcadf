from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from consoles import Terminal, console_on
from factories import FakeClock
from torch import nn

from autoaccum.messages import Message
from autoaccum.reporting.console import make_console
from autoaccum.reporting.fit_report import TrainingProgress
from autoaccum.training.fit_events import (
    CheckpointWritten,
    Evaluated,
    Notice,
    Started,
    Updated,
)
from autoaccum.units import GIB

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def started(**changes: Any) -> Started:
    known: dict[str, Any] = {"plan": None, "micro_batch": 64, "target_batch": 256, "device": "cpu", "updates": 30}
    return Started(model=MODEL, optimizer=OPTIMIZER, **(known | {"epochs": 1} | changes))


def updated(update: int, epoch: int = 1, **changes: Any) -> Updated:
    known: dict[str, Any] = {"loss": 1 / update, "grad_norm": None, "learning_rate": 0.1, "updated": True}
    known |= {"samples_per_second": 5120.0, "peak_bytes": 3 * GIB, "micro_batches": 4, "micro_batch": 64, "retries": 0}
    return Updated(update=update, epoch=epoch, samples=256 * update, **(known | changes))


def draw(*told: Any, terminal: bool = False, quiet: bool = False, seconds: float = 1.0, width: int = 100) -> list[str]:
    """Return what is drawn of events that come `seconds` apart."""
    file, clock = Terminal() if terminal else io.StringIO(), FakeClock()
    with TrainingProgress(console_on(file, width), quiet=quiet, clock=clock) as progress:
        for event in told:
            progress.notify(event)
            clock.seconds += seconds
    return file.getvalue().splitlines()


def test_a_log_has_a_line_in_ten_seconds_and_the_last_one() -> None:
    lines = draw(started(), *(updated(number) for number in range(1, 31)))
    assert lines[0] == "training Linear on cpu: 256 samples per update, in micro-batches of up to 64"
    assert lines[1] == "update 10 of 30  loss 0.1  0:20 left  5,120 samples/s  process peak 3.0 GiB"
    assert [line.split("  ")[0] for line in lines[1:]] == [f"update {number} of 30" for number in (10, 20, 30)]


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ([started(updates=None, epochs=None), updated(7)], "update 7  loss 0.1429  5,120 samples/s"),
        ([started(updates=None, epochs=3), updated(7, 2)], "update 7, epoch 2 of 3  loss 0.1429  5,120 samples/s"),
        ([started(), updated(1, loss=float("nan"), peak_bytes=None)], "update 1 of 30  loss nan  5,120 samples/s"),
        ([started(), updated(1, samples_per_second=0.123456)], "update 1 of 30  loss 1  0.123 samples/s"),
    ],
    ids=["nothing", "epochs", "no-loss", "slow"],
)
def test_totals_that_are_not_known(told: list[Any], line: str) -> None:
    assert draw(*told)[-1].removesuffix("  process peak 3.0 GiB") == line


EVENTS = [
    (
        Evaluated(500, {"loss": 0.25, "accuracy": 0.9375}, 1000, 2.06),
        "update 500: evaluation loss 0.25, accuracy 0.9375 (1,000 samples in 2.1 s)",
    ),
    (Notice(Message("order_changed")), f"warning: {Message('order_changed')}"),
    (Notice(Message("data_resumed"), warns=False), "note: the data resumed from its own state_dict"),
]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_person_should_know_has_a_line_of_its_own(terminal: bool) -> None:
    lines = draw(started(), *(event for event, _ in EVENTS), terminal=terminal, width=200)
    plain = [line.rpartition("\x1b[2K")[2].strip() for line in lines]
    for _, text in EVENTS:
        assert text in plain


def test_quiet_leaves_warnings_each_of_them_once() -> None:
    told = [started(), *(event for event, _ in EVENTS), *(event for event, _ in EVENTS), updated(1)]
    lines = draw(*told, quiet=True, seconds=20)
    assert lines == [text for _, text in EVENTS if text.startswith("warning: ")]
    assert draw(CheckpointWritten(1, Path("a"), 0.1)) == []


def test_a_terminal_has_one_live_line_that_goes_away() -> None:
    text = "\n".join(
        draw(started(), updated(1), updated(2), Notice(Message("order_changed")), updated(3), terminal=True)
    )
    assert "update 2 of 30  loss" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.index("warning: the sampler's order") < text.index("update 3 of 30  loss")
    assert text.splitlines()[-1].endswith(
        "update 3 of 30  loss 0.3333  0:40 left  5,120 samples/s  process peak 3.0 GiB"
    )


def test_a_terminal_is_redrawn_four_times_a_second_at_most() -> None:
    told = [started(), *(updated(number) for number in range(1, 31))]
    drawn = re.findall(r"update (\d+)", "\n".join(draw(*told, terminal=True, seconds=0.01)))
    assert list(dict.fromkeys(drawn)) == ["0", "25", "30"]


class Closed(Terminal):
    """A terminal that is closed in the middle of a training."""

    closes = False

    def write(self, text: str) -> int:
        if self.closes:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_that_is_gone_ends_the_drawing_and_not_the_training(terminal: bool) -> None:
    file, clock, stdout = Closed(), FakeClock(), sys.stdout
    with TrainingProgress(make_console(file=file, width=100, force_terminal=terminal), clock=clock) as progress:
        progress.notify(started())
        file.closes = True
        for number in range(1, 31):
            clock.seconds += 20
            progress.notify(updated(number))
            progress.warn(f"warning {number}")
    assert sys.stdout is stdout
