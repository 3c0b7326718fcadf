"""The process of one rank of a verification: it makes updates with its own parts, together with the others."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.accumulation.rng_replay import HostRngReplay
from autoaccum.accumulation.schedule import slices
from autoaccum.devices.child.failures import Failure, describe_failure
from autoaccum.devices.child.requests import Request
from autoaccum.devices.trial_run import seed_everything
from autoaccum.sources.batches import split_batch
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.update_run import Ablation, UpdateResult, UpdateRun
from autoaccum.verification.verification_result import Method

_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others within a collective."""


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
    """An update of one batch: the fixture, the way it is made, and which parts each rank has.

    Attributes:
        fixture: What is trained.
        method: By the Accumulator, or by the workload's own loop.
        ablation: The change to training.
        batch: The whole batch.
        sizes: Its parts, in samples.
        parts_by_rank: How many of them each rank runs, in their order.
    """

    fixture: Fixture
    method: Method
    ablation: Ablation
    batch: Any
    sizes: tuple[int, ...]
    parts_by_rank: tuple[int, ...]


class RankChild:
    """Handles the requests of one rank."""

    @staticmethod
    def prepare() -> None:
        """Have PyTorch import what it puts off until the first optimizer."""
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def handle(self, request: RunOnRank) -> Failure | None:
        """Make the update, or return why it failed."""
        folder = Path(request.folder)
        try:
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
                result = _make_update(task, request.rank)
            if request.rank == request.size - 1:
                (folder / f"{request.task}-result").write_bytes(pickle.dumps(result))
        except BaseException as error:
            return describe_failure(error, request.doing)
        return None


def _make_update(task: RankTask, rank: int) -> UpdateResult:
    parts = split_batch(task.batch, task.sizes)[slices(task.parts_by_rank)[rank]]
    seed_everything()
    host = HostRngReplay(task.fixture.generators)
    with neutral_rng():
        run = UpdateRun(task.fixture, task.ablation)
        if task.method == "accumulate":
            return run.user_loop(parts, host.finish, updates=False)
        return run.accumulated(None, parts, host.begin, host.go_on, host.finish, micro_batch=max(task.sizes))
