"""All ranks of a training stop at the same update, whatever happens to one of them, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_training
import torch
import torch.distributed as dist
from example_counts import count_examples
from on_ranks import Died, on_ranks
from rank_training import Failing, Rows
from torch import nn

from autoaccum.errors import CheckpointError, RankLostError
from autoaccum.training import run_folder
from autoaccum.training.fit_events import Updated

STEPS = 6


def train(folder: str | None, data: Any = None, breaks_at: int = 0, **options: Any) -> Any:
    """Train; the optimizer fails on rank 1 within the update number `breaks_at`."""
    steps = itertools.count(1)

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        if breaks_at and dist.get_rank() == 1:
            optimizer.register_step_post_hook(lambda *_: fail() if next(steps) == breaks_at else None)

    options = {"target_batch": 12, "micro_batch": 3, "steps": STEPS, "checkpoint_every": 2, **options}
    return rank_training.train(data, prepare=prepare, run_dir=folder, **options)


def ending(*args: Any, **options: Any) -> str:
    """Train, and return the error."""
    try:
        train(*args, **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def on_second(update: int, act: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a callback that acts on rank 1 after an update."""

    def listen(event: Any) -> Any:
        return act() if isinstance(event, Updated) and event.update == update and dist.get_rank() == 1 else None

    return listen


def fail() -> None:
    raise ValueError("a bug of the user's")


def fail_once(times: list[int]) -> None:
    times.append(1)
    if len(times) == 9 and dist.get_rank() == 1:
        fail()


def stop_in_all_ways(folder: str) -> Any:
    times: list[int] = []
    seen = {
        "callback": ending(f"{folder}/callback", callbacks=[on_second(3, fail)]),
        "data": ending(f"{folder}/data", Rows(lambda index: fail_once(times))),
        "stop": train(f"{folder}/stop", callbacks=[on_second(3, lambda: True)])[0].stopped,
        "signal": ending(f"{folder}/signal", callbacks=[on_second(3, lambda: os.kill(os.getpid(), signal.SIGTERM))]),
        "loss": ending(f"{folder}/loss", loss=Failing(at=9)),
        "optimizer": ending(f"{folder}/optimizer", breaks_at=4),
        "evaluation": ending(f"{folder}/evaluation", eval_data=Rows(), eval_every=5, evaluate=fail_on_second),
    }
    again: dict[str, dict[str, Any]] = {"loss": {"loss": Failing(0)}}
    resumed = {name: train(f"{folder}/{name}", **again.get(name, {})) for name in seen}
    return seen, {name: (result.resumed_from.name, weights) for name, (result, weights, _) in resumed.items()}


def fail_on_second(model: nn.Module, batch: Any) -> float:
    if dist.get_rank() == 1:
        fail()
    return 1.0


@pytest.mark.slow
def test_what_stops_one_rank_stops_all_at_the_same_update(tmp_path: Path) -> None:
    """The last checkpoint is that of the last whole update, and the run resumes from it."""
    (first, resumed), (second, _) = on_ranks(2, stop_in_all_ways, str(tmp_path))
    told, own = "RankFailedError: rank 1 failed: ValueError: a bug of the user's: ", "ValueError: a bug of the user's"
    for name in ("callback", "data", "loss", "evaluation"):
        assert first[name].startswith(told), name
        assert second[name] == own
    assert first["stop"] == second["stop"] == "callback"
    assert first["signal"] == second["signal"] == "SystemExit: 143"
    updates = {name: int(checkpoint[-5:-3]) for name, (checkpoint, _) in resumed.items()}
    assert first["optimizer"].startswith("RankFailedError: rank 1 failed: UpdateInterrupted: ValueError within the upd")
    assert second["optimizer"].startswith("UpdateInterrupted: ValueError within the update, which cannot be undone")
    assert updates == {"optimizer": 2, "callback": 3, "data": 1, "stop": 3, "signal": 3, "loss": 4, "evaluation": 5}
    _, weights, _ = train(None)
    for name, (_, state) in resumed.items():
        torch.testing.assert_close(state, weights, rtol=1e-9, atol=1e-9, msg=name)


def have_trouble(folder: str) -> Any:
    seen: dict[str, Any] = {}
    loss = Failing(5, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what a test refuses"))
    result, weights, events = train(None, loss=loss, steps=4)
    ceilings = [event.micro_batch for event in events if isinstance(event, Updated)]
    seen["memory"] = result.oom_retries, ceilings, weights

    write, calls = run_folder.write_file, itertools.count()

    def write_once(path: Path, content: Any) -> None:
        if next(calls):
            raise CheckpointError("the disk is full")
        write(path, content)

    run_folder.write_file = write_once
    result, _, _ = train(f"{folder}/full", max_checkpoints=9)
    seen["full"] = result.unsaved, result.updates
    seen["full at first"] = ending(f"{folder}/full at first")
    run_folder.write_file = write
    return seen


@pytest.mark.slow
def test_trouble_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, have_trouble, str(tmp_path))
    assert first["memory"][:2] == second["memory"][:2] == (1, [3, 3, 2, 2])
    _, weights, _ = train(None, steps=4)
    torch.testing.assert_close(first["memory"][2], weights, rtol=1e-9, atol=1e-9)
    assert first["full"] == second["full"] == ("the disk is full", STEPS)
    assert first["full at first"] == second["full at first"] == "CheckpointError: the disk is full"


LONG = 16


def train_until_killed(folder: str, victim: int, update: int, seconds: float) -> Any:
    """Train on this rank; the victim kills itself some seconds after an update, or after the start."""
    updates = [0]

    def kill_later() -> None:
        if dist.get_rank() == victim and updates[-1] == update:
            threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def note(event: Any) -> None:
        if isinstance(event, Updated):
            updates.append(event.update)
            kill_later()

    kill_later()
    try:
        result, weights, _ = train(folder, steps=LONG, checkpoint_every=5, callbacks=[note])
    except RankLostError as error:
        return "lost", max(updates), str(error)
    return "done", result.resumed_from, weights


def run_with_kills(folder: Path, kills: int, seed: int) -> int:
    """Kill a rank of three at random moments and resume, again and again; return how many runs were cut short."""
    draw, cut = random.Random(seed), 0
    _, weights, _ = train(None, steps=LONG)
    run = folder / "0"
    for number in range(kills):
        victim, update, seconds = draw.randrange(3), draw.randrange(LONG - 6), draw.uniform(0.0, 0.01)
        ends = on_ranks(3, train_until_killed, str(run), victim, update, seconds, patience=5)
        for end in ends:
            if end == Died():
                continue
            if end[0] == "lost":
                named = end[2].partition(" of 3 ended or ")[0]
                assert named == "a rank" or str(victim) in named, end
        survivor = ends[0]
        names = sorted(path.name for path in run.glob("checkpoints/checkpoint-*.pt"))
        cut += survivor == Died() or survivor[0] == "lost"
        if survivor != Died() and survivor[0] == "lost" and survivor[1]:
            newest = int(names[-1][-11:-3])
            assert survivor[1] - 5 < newest <= survivor[1], "no more is lost than since the last checkpoint"
        if all(end != Died() and end[0] == "done" for end in ends):
            torch.testing.assert_close(ends[0][2], weights, rtol=1e-9, atol=1e-9)
            run = folder / str(number + 1)
    end = on_ranks(3, train_until_killed, str(run), 3, 0, 0.0)[0]
    torch.testing.assert_close(end[2], weights, rtol=1e-9, atol=1e-9)
    return cut


@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    kills = count_examples(20)
    assert run_with_kills(tmp_path, kills, seed=2) >= kills // 2
