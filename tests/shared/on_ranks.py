"""Run a function on several ranks: real processes that meet over gloo, copies of one that has imported PyTorch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

_FORKS = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict", "pytest"]
_PRELOADED += ["torch.utils.tensorboard", "autoaccum.accumulation.accumulator", "autoaccum.training.training_setup"]
_PRELOADED += ["autoaccum.training.trainer", "autoaccum.planning.planner", "autoaccum.reporting.progress"]
_FORKS.set_forkserver_preload(_PRELOADED)

NEVER = 3600.0
"""A patience by which a rank that waits for others in vain exceeds the time of its test."""


class RankError(AssertionError):
    """An error on a rank, with its traceback."""


class Died:
    """What a rank that was killed returns."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Died)

    __hash__ = None  # type: ignore[assignment]


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    patience: float = 20,
    backend: str = "gloo",
) -> list[Any]:
    """Return what `function(*args)` returns on each rank, or `Died()`; a group gives up after `patience` seconds.

    Raises:
        RankError: It raised on a rank.
        TimeoutError: A rank did not end.
    """
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        task = cloudpickle.dumps((function, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    with tempfile.TemporaryDirectory() as folder:
        ours, processes = [], []
        for rank in range(size):
            mine, theirs = _FORKS.Pipe(duplex=False)
            about = (theirs, task, folder, rank, size, patience, backend)
            process = _FORKS.Process(target=_run_rank, args=about, daemon=True)
            process.start()
            theirs.close()
            ours.append(mine)
            processes.append(process)
        try:
            return _results(ours, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        left = [one for rank, one in enumerate(connections) if rank not in results]
        ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[rank for rank in range(len(connections)) if rank not in results]} did not end")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                error, results[rank] = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                error, results[rank] = None, Died()
            if error is not None:
                raise RankError(f"rank {rank}:\n{error}")
    return [results[rank] for rank in range(len(connections))]


def _run_rank(
    connection: Connection, task: bytes, folder: str, rank: int, size: int, patience: float, backend: str
) -> None:
    import torch
    import torch.distributed as dist

    from autoaccum.accumulation.ranks import group

    torch.set_num_threads(1)
    group._GRACE_SECONDS = 0.5  # Whoever is not there by then is waited for only while several are missing.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    meeting = f"file://{Path(folder) / 'meeting'}"
    dist.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=patience)
    )
    try:
        function, args = cloudpickle.loads(task)
        answer: tuple[str | None, Any] = None, function(*args)
    except BaseException:
        answer = traceback.format_exc(), None
    connection.send_bytes(cloudpickle.dumps(answer))
    connection.close()
    os._exit(0)  # Without a last meeting, which ranks that have died would not come to.
