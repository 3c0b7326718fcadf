"""`python peer_child.py ANSWER TASK`: does what one contender of `peers.py` is asked, and writes what came of it.

Nothing here imports PyTorch: to autoaccum's own search, which is planned in processes of its own, that would be unfair.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

import autoaccum
from autoaccum.errors import AutoaccumError


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a child process: search a size, or train with one.

    Attributes:
        contender: `autoaccum`, `Lightning` or `accelerate`.
        workload: Path of the workload file.
        budget_bytes: What it may hold above what is there before it begins.
        target: Samples an update ought to have.
        updates: How many of them a training run makes.
        size: The micro-batch to train with, in samples; None in a search.
        started: `time.monotonic()` before the child was started; the clock is the same in every process.
    """

    contender: str
    workload: str
    budget_bytes: int
    target: int
    updates: int
    size: int | None = None
    started: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a task.

    Attributes:
        attempts: The sizes a search tried, in order.
        size: The micro-batch to train with; None where none was found.
        micro_batches: Of each update that was made, as the model saw them.
        start_seconds: Start of the interpreter, imports, warm-up.
        seconds: From then until the size was known, or the updates were made.
        failure: What it failed with.
        version: Of the package.
    """

    attempts: tuple[int, ...] = ()
    size: int | None = None
    micro_batches: tuple[tuple[int, ...], ...] = ()
    start_seconds: float = 0.0
    seconds: float = 0.0
    failure: str | None = None
    version: str = ""


def plan(task: Task) -> Done:
    """Search as autoaccum does. It sets the limit itself, on its trials, whose processes are part of the time."""
    began = time.monotonic()
    done = Done(start_seconds=began - task.started, version=autoaccum.__version__)
    try:
        made = autoaccum.plan(task.workload, target_batch=task.target, device="cpu", memory=f"{task.budget_bytes}B")
    except AutoaccumError as error:
        return replace(done, failure=str(error), seconds=time.monotonic() - began)
    return replace(
        done,
        attempts=tuple(max(trial.parts) for trial in made.trials),
        size=made.micro_batch,
        seconds=time.monotonic() - began,
    )


def main(answer: str, asked: str) -> None:
    """Do it."""
    task = msgspec.json.decode(asked, type=Task)
    if task.contender == "autoaccum" and task.size is None:
        done = plan(task)
    else:
        from contenders import compete

        done = compete(task)
    Path(answer).write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
