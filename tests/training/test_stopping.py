from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from autoaccum.training.stopping import StopRequested, StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves the handlers as they were."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def end_of(body: Callable[[StopSignals], None], one_press_seconds: float = 60) -> Any:
    """Return the exit code with which `body` ends within StopSignals."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught, StopSignals(one_press_seconds) as stopping:
        body(stopping)
    return 130 if isinstance(caught.value, KeyboardInterrupt) else caught.value.code  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_first_signal_is_recorded_and_raised_by_a_check(number: signal.Signals) -> None:
    reached = []

    def run(stopping: StopSignals) -> None:
        stopping.check()
        signal.raise_signal(number)
        reached.append(stopping.requested)
        stopping.check()
        pytest.fail("goes on")

    assert end_of(run) == 128 + number
    assert reached == [number]


def test_a_signal_while_waiting_is_raised_at_once_past_every_except_exception() -> None:
    reached = []

    def run(stopping: StopSignals) -> None:
        try:
            with stopping.interruptible(), suppress(Exception):
                signal.raise_signal(signal.SIGTERM)
            pytest.fail("not at once")
        except StopRequested:
            reached.append("at once")
        signal.raise_signal(signal.SIGTERM)  # Within a moment: as timeout(1) sends it to its child, then to the group.
        reached.append("the last checkpoint")

    assert end_of(run) == 143
    assert reached == ["at once", "the last checkpoint"]


def test_a_signal_replaces_an_error_that_comes_with_it() -> None:
    def run(stopping: StopSignals) -> None:
        with stopping.interruptible():
            with suppress(StopRequested):
                signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    assert end_of(run) == 143


@pytest.mark.parametrize("second", NUMBERS)
def test_a_second_signal_takes_effect_at_once(second: signal.Signals) -> None:
    def run(stopping: StopSignals) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert stopping.requested == signal.SIGTERM
        signal.raise_signal(second)
        pytest.fail("not at once")

    assert end_of(run, one_press_seconds=0) == 128 + second


def test_ignored_signals_stay_ignored_and_a_handler_of_the_users_is_called_at_the_end() -> None:
    called: list[Any] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))

    def run(stopping: StopSignals) -> None:
        signal.raise_signal(signal.SIGHUP)
        assert stopping.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert not called

    assert end_of(run) == 143
    assert called == [signal.SIGTERM]
    signal.signal(signal.SIGHUP, before)
    signal.signal(signal.SIGTERM, others)


def wait_for_ever(ready: Any) -> None:
    ready.set()
    while True:
        time.sleep(1)


def test_a_forked_child_is_ended_by_sigterm_and_leaves_the_others_to_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with StopSignals() as stopping:
        child = context.Process(target=wait_for_ever, args=(ready,))
        child.start()
        assert ready.wait(30)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        child.join(0.5)
        assert child.is_alive()
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
        assert stopping.requested is None
