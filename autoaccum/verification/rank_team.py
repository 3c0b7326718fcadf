"""Runs of one batch over several ranks: processes on this machine that meet over gloo, each with its own parts."""

from __future__ import annotations

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

import torch
import torch.distributed as dist

from autoaccum.accumulation.random_draws import RngRecording, neutral_rng
from autoaccum.devices.child.failures import ChildDied, JobFailed, failure_error
from autoaccum.devices.child.pickling import pack_whole
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Handler, Request
from autoaccum.devices.trial_run import seed_everything
from autoaccum.verification.update_run import AccumulatedUpdate, UpdateResult

_LIMIT_SECONDS = 3600.0
_GRACE_SECONDS = 3.0
"""How long ranks have, after one has failed, to say why they failed too."""
_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others within a collective."""

_TASK, _RESULT, _MEETING = "task", "result", "meeting"
"""Files of a team: the update to make, the result of its last rank, and where the ranks of a process group meet."""


@dataclass(frozen=True, kw_only=True)
class RunOnRank(Request[None]):
    """Make the `AccumulatedUpdate` in `folder`, as `rank` of `size` ranks; a process keeps its rank."""

    folder: str
    rank: int
    size: int

    doing = "an update over ranks"


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
                init_method=f"file://{folder / _MEETING}",
                rank=request.rank,
                world_size=request.size,
                timeout=_PATIENCE,
            )
        update: AccumulatedUpdate = pickle.loads((folder / _TASK).read_bytes())
        seed_everything()
        with warnings.catch_warnings(), neutral_rng():  # Each rank draws numbers of its own.
            warnings.simplefilter("ignore")
            draws = RngRecording(update.sizes, update.fixture.generators)
            result = update.make(draws, rank=request.rank, world_size=request.size)
        if request.rank == request.size - 1:
            (folder / _RESULT).write_bytes(pickle.dumps(result))


class RankTeam:
    """The processes of `size` ranks, which make the same updates; after a failure they are started anew."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="autoaccum-ranks-")
        self._children: list[ChildProcess] = []

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._folder.cleanup()

    def run(self, update: AccumulatedUpdate) -> UpdateResult:
        """Make an update, and return the result of the last rank.

        Raises:
            WorkloadError: The user's code raised on a rank.
            NotMeasuredError: A process ended, or took too long.
        """
        folder = Path(self._folder.name)
        (folder / _TASK).write_bytes(pack_whole("the workload or its batch", update))
        if not self._children:
            (folder / _MEETING).unlink(missing_ok=True)
            self._children = [
                ChildProcess("autoaccum.verification.rank_team:RankChild", measured=False) for _ in range(self.size)
            ]
        self._ask(
            [RunOnRank(folder=self._folder.name, rank=rank, size=self.size) for rank in range(self.size)],
            update.fixture.deadline.left_seconds,
        )
        result: UpdateResult = pickle.loads((folder / _RESULT).read_bytes())
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
