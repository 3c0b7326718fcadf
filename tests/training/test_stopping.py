from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.accumulation.accumulator import Accumulator, StepResult
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.observers import StepObserver, StepPhase
from autoaccum.training.stopping import StopAsked, Stopping

ROOT = Path(__file__).parents[2]
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


def end_of(body: Callable[[Stopping], None], one_press_seconds: float = 60) -> BaseException | None:
    """What comes out when `body` runs within a Stopping."""
    try:
        with Stopping(one_press_seconds) as stopping:
            body(stopping)
    except BaseException as error:
        return error
    return None


def code_of(error: BaseException | None) -> Any:
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", error)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_first_signal_is_noted_and_raised_where_it_is_asked_for(number: signal.Signals) -> None:
    reached = []

    def run(stopping: Stopping) -> None:
        stopping.check()
        stopping.leave()
        signal.raise_signal(number)
        reached.append(stopping.asked)
        stopping.check()
        pytest.fail("goes on")

    assert code_of(end_of(run)) == 128 + number
    assert reached == [number]


def test_while_it_waits_it_is_raised_at_once_past_every_except_exception() -> None:
    reached = []

    def wait(stopping: Stopping) -> None:
        with stopping.interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            except Exception:
                pytest.fail("eaten")
            pytest.fail("not at once")

    def run(stopping: Stopping) -> None:
        with pytest.raises(StopAsked):
            wait(stopping)
        signal.raise_signal(signal.SIGTERM)
        reached.append("the last checkpoint")

    assert code_of(end_of(run)) == 143
    assert reached


def test_an_error_that_comes_with_it_is_not_what_ended_the_run() -> None:
    def run(stopping: Stopping) -> None:
        with stopping.interruptible():
            with suppress(StopAsked):
                signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    assert code_of(end_of(run)) == 143


@pytest.mark.parametrize("second", NUMBERS)
def test_a_second_one_acts_at_once(second: signal.Signals) -> None:
    reached = []

    def run(stopping: Stopping) -> None:
        signal.raise_signal(signal.SIGTERM)
        reached.append(stopping.asked)
        signal.raise_signal(second)
        pytest.fail("not at once")

    assert code_of(end_of(run, one_press_seconds=0)) == 128 + second
    assert reached == [signal.SIGTERM]


def test_what_comes_twice_within_a_moment_is_one() -> None:
    """As timeout(1) sends it: to its child, then to the group."""
    reached = []

    def run(stopping: Stopping) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        reached.append(True)

    assert code_of(end_of(run)) == 143
    assert reached


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stopping() as stopping:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
        assert stopping.asked is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


class Watching(StepObserver):
    """Leaves a step where the run is asked to stop, as the loop does."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping

    def phase(self, phase: StepPhase) -> None:
        self._stopping.check()


class Tracer:
    """Sends a signal when the step has come to its `line`-th line of Python."""

    def __init__(self, line: int, number: int) -> None:
        self.lines, self._line, self._number = 0, line, number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                os.kill(os.getpid(), self._number)
        return self


def signalled_step(line: int, number: int, guarded: bool) -> tuple[int, StepResult | None, str, bool]:
    """One step with a signal in it: its lines, its result, the digest after it, whether a next one is possible."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(6, 3), torch.randn(6, 2)
    stopping = Stopping(one_press_seconds=60)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=3, clip_norm=1.0, observer=Watching(stopping))
    if not guarded:
        accumulator.step(batch)
    tracer, result = Tracer(line, number), None
    try:
        with stopping:
            sys.settrace(tracer)
            try:
                result = accumulator.step(batch)
            except StopAsked:
                result = None
            finally:
                sys.settrace(None)
            assert stopping.asked in (None, number)
    except (KeyboardInterrupt, SystemExit):
        pass
    digest = state_digest(model, optimizer)
    stopping.asked = None
    return tracer.lines, result, digest, accumulator.step(batch).updated


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_at_any_moment_of_a_step_the_update_is_wholly_made_or_wholly_undone(guarded: bool) -> None:
    lines, _, made, _ = signalled_step(0, signal.SIGINT, guarded)
    seen, undone = set[bool](), set[str]()
    for turn, line in enumerate(range(1, lines, max(1, lines // 60))):
        _, result, digest, goes_on = signalled_step(line, NUMBERS[turn % 3], guarded)
        seen.add(result is not None)
        assert goes_on
        if result is None:
            undone.add(digest)
        else:
            assert digest == made
    assert seen == {True, False}
    assert len(undone) == 1
    assert made not in undone


def wait_for_ever(ready: Any) -> None:
    ready.set()
    while True:
        time.sleep(1)


def test_a_forked_child_is_ended_by_sigterm_and_leaves_the_others_to_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with Stopping() as stopping:
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
        assert stopping.asked is None


SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from autoaccum.training.data.workers import Reader
from autoaccum.training.stopping import StopAsked, Stopping

class Slow(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.05)
        return index

if __name__ == "__main__":
    seen = 0
    with Stopping() as stopping:
        try:
            batches = Reader(DataLoader(Slow(), batch_size=2, num_workers=2, collate_fn=list))
            while True:
                with stopping.interruptible():
                    batches.read()
                seen += 1
                if seen == 3:
                    print("ready", flush=True)
                if sys.argv[1] == "busy" and seen > 3:
                    deadline = time.monotonic() + 60
                    while stopping.asked is None and time.monotonic() < deadline:
                        time.sleep(0.01)
                    time.sleep(0.3)  # The end of an update, while workers end.
        except StopAsked as stop:
            print("checkpoint", stop.number, flush=True)
        finally:
            batches.close()
"""


@pytest.mark.parametrize(("number", "doing"), [(signal.SIGINT, "waiting"), (signal.SIGTERM, "busy")])
def test_a_signal_to_the_whole_group_leaves_one_checkpoint_and_no_worker(
    tmp_path: Path, number: signal.Signals, doing: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, str(script), doing],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.killpg(process.pid, number)
        stdout, stderr = process.communicate(timeout=60)
    assert stdout == f"checkpoint {int(number)}\n"
    if number == signal.SIGINT:
        assert process.returncode == -signal.SIGINT
        assert stderr.count("Traceback") == 1
        assert stderr.endswith("\nKeyboardInterrupt\n")
    else:
        assert (process.returncode, stderr) == (128 + number, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_handler_of_the_user_s_own_is_called_after_the_last_checkpoint() -> None:
    called: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with pytest.raises(SystemExit) as leaving, Stopping():
            os.kill(os.getpid(), signal.SIGTERM)
        assert leaving.value.code == 143
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
