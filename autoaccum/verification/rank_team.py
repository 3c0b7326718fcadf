"""Runs of one batch over several ranks: processes on this machine that meet over gloo, each with its own parts."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoaccum.accumulation.random_draws import RngRecording, neutral_rng
from autoaccum.accumulation.schedule import even_parts, slices
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.failures import ChildDied, JobFailed, failure_error
from autoaccum.devices.child.pickling import pack_whole
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Handler, Request
from autoaccum.devices.trial_run import seed_everything
from autoaccum.sources.batches import split_batch
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.update_run import Ablation, UpdateResult, UpdateRun
from autoaccum.verification.verification_result import Method

_LIMIT_SECONDS = 3600.0
_GRACE_SECONDS = 3.0
"""How long ranks have, after one has failed, to say why they failed too."""
_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others within a collective."""

_LEFT_BEHIND: dict[str, Any] = dict.fromkeys(("dataset", "evaluation_dataset", "collate", "scheduler", "path"))
"""Fields of a workload that an update does not need."""


@dataclass(frozen=True, kw_only=True)
class RunOnRank(Request[None]):
    """Make the update of a `RankTask`, as one of `size` ranks.

    Attributes:
        folder: Where the tasks are; the result of the last rank is written beside its task.
        task: The name of the task's file.
        rank: The rank of this process, from its first request on.
        size: The number of ranks.
    """

    folder: str
    task: str
    rank: int
    size: int

    doing = "an update over ranks"


@dataclass(frozen=True)
class RankTask:
    """An update of one batch, of whose parts each rank runs some, in their order and as evenly as possible.

    Attributes:
        fixture: What is trained.
        method: By the Accumulator, or by the workload's own loop.
        ablation: The change to training.
        batch: The whole batch.
        sizes: Its parts, in samples.
    """

    fixture: Fixture
    method: Method
    ablation: Ablation
    batch: Any
    sizes: tuple[int, ...]


class RankChild(Handler):
    """The process of one rank: it makes updates with its own parts, together with the others."""

    @staticmethod
    def prepare() -> None:
        """Have PyTorch import what it puts off until the first optimizer."""
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def handle(self, request: RunOnRank) -> None:
        """Make the update."""
        folder = Path(request.folder)
        if not dist.is_initialized():
            # Ranks share the processors; threads that spin for one another take a hundred times as long.
            torch.set_num_threads(max(1, torch.get_num_threads() // request.size))
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'meeting'}",
                rank=request.rank,
                world_size=request.size,
                timeout=_PATIENCE,
            )
        task: RankTask = pickle.loads((folder / request.task).read_bytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _make_update(task, request.rank, request.size)
        if request.rank == request.size - 1:
            (folder / f"{request.task}-result").write_bytes(pickle.dumps(result))


def _make_update(task: RankTask, rank: int, world_size: int) -> UpdateResult:
    """Make the update of one rank, with neutral random numbers, since each draws its own."""
    parts = split_batch(task.batch, task.sizes)[slices(even_parts(len(task.sizes), world_size))[rank]]
    seed_everything()
    with neutral_rng():
        run = UpdateRun(task.fixture, task.ablation)
        if task.method == "accumulate":
            return run.user_loop(parts)
        draws = RngRecording(task.sizes, task.fixture.generators)
        return run.accumulated(parts, draws, micro_batch=max(task.sizes))


class RankTeam:
    """The processes of `size` ranks, which make the same updates; after a failure they are started anew."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="autoaccum-ranks-")
        self._children: list[ChildProcess] = []
        self._tasks = 0

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._folder.cleanup()

    def run(self, task: RankTask) -> UpdateResult:
        """Make an update, and return the result of the last rank.

        Raises:
            WorkloadError: The user's code raised on a rank.
            NotMeasuredError: A process ended, or took too long.
        """
        self._tasks += 1
        folder, name = Path(self._folder.name), f"task-{self._tasks}"
        fixture = copy.copy(task.fixture)
        fixture.workload = dataclasses.replace(fixture.workload, **_LEFT_BEHIND)
        left, fixture.deadline = fixture.deadline.left_seconds, Deadline(None)
        task = dataclasses.replace(task, fixture=fixture)
        (folder / name).write_bytes(pack_whole("the workload or its batch", task))
        if not self._children:
            (folder / "meeting").unlink(missing_ok=True)
            self._children = [
                ChildProcess("autoaccum.verification.rank_team:RankChild", measured=False) for _ in range(self.size)
            ]
        self._ask([RunOnRank(folder=str(folder), task=name, rank=n, size=self.size) for n in range(self.size)], left)
        result: UpdateResult = pickle.loads((folder / f"{name}-result").read_bytes())
        for file in folder.glob(f"{name}*"):
            file.unlink()
        return result

    def _ask(self, requests: Sequence[RunOnRank], left_seconds: float | None) -> None:
        """Send each rank its request, and wait for all; if one fails, end them and raise the likeliest reason."""
        limit = min(_LIMIT_SECONDS, left_seconds or _LIMIT_SECONDS)
        with ThreadPoolExecutor(self.size) as threads:
            pairs = zip(self._children, requests, strict=True)
            answers = [threads.submit(child.call, request, limit) for child, request in pairs]
            if not any(answer.exception() for answer in wait(answers, return_when=FIRST_EXCEPTION).done):
                return
            ended = wait(answers, timeout=_GRACE_SECONDS).done  # The others may wait for it in a collective.
            for child in self._children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        self._end()
        error = min((error for answer in ended if (error := answer.exception())), key=_rank_of_reason)
        raise failure_error(error.failure, "this machine") if isinstance(error, JobFailed) else error

    def _end(self) -> None:
        for child in self._children:
            child.end()
        self._children = []


def _rank_of_reason(error: BaseException) -> int:
    """Rank the errors of several processes: a death first, then what the user's code raised."""
    if isinstance(error, ChildDied):
        return 0
    return 1 if isinstance(error, JobFailed) and error.failure.fault == "user" else 2
