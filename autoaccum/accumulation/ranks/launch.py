"""Join the process group that a launcher such as torchrun has started this process for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoaccum.accumulation.ranks.group import Ranks, join_ranks, world_size


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Join the ranks that WORLD_SIZE and RANK tell of, unless the user did, and leave them at the end.

    Each rank takes the card of its LOCAL_RANK where there are cards. Without a launcher this process is alone.
    """
    if world_size() > 1 or int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        yield join_ranks()
        return
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield join_ranks()
    finally:
        dist.destroy_process_group()
