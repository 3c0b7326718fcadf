"""Join the process group that a launcher such as torchrun has started this process for; start such processes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from autoaccum.accumulation.ranks.group import Ranks, interruptibly, join_ranks, world_size
from autoaccum.checks import is_one_of_ranks, join_words
from autoaccum.errors import NotMeasuredError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_groups = itertools.count()
_OWN_CODES = range(1, 4)
"""Exit codes of a rank that has said what went wrong."""


@contextmanager
def launched_ranks(*, on_cards: bool = True) -> Iterator[Ranks]:
    """Join the ranks that WORLD_SIZE and RANK tell of, unless the user did, and leave them at the end.

    Each rank takes the card of its LOCAL_RANK where there are cards, unless they only talk: a context takes half a GiB
    of the card. Without a launcher this process is alone.

    Raises:
        UsageError: WORLD_SIZE is set, and what else a launcher sets is missing; or there are more ranks than cards.
    """
    if world_size() > 1 or not is_one_of_ranks():
        yield join_ranks()
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if missing := [name for name in _NEEDED if name not in os.environ]:
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, without {join_words(missing)}",
            hint="start the ranks by torchrun, or unset WORLD_SIZE",
        )
    on_cards = on_cards and torch.cuda.is_available()
    if on_cards:
        card, cards = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
        if card >= cards:
            raise UsageError(
                f"rank {os.environ['RANK']} is to use card {card}, and {cards} {'are' if cards > 1 else 'is'} visible",
                hint="start as many ranks as there are cards, or take --device cpu",
            )
        torch.cuda.set_device(card)

    def meet() -> Ranks:
        # Under a name of its own: a second group of this process would meet at the addresses that the first one left.
        store = PrefixStore(f"autoaccum/{next(_groups)}", _meeting_place())
        backend = "cpu:gloo,cuda:nccl" if on_cards else "gloo"
        dist.init_process_group(
            backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        return join_ranks()

    ranks = interruptibly(meet)
    try:
        yield ranks
    finally:
        ranks.leave()
        dist.destroy_process_group()


@cache
def _meeting_place() -> Store:
    """Return the store of the launcher, where the ranks find each other."""
    from torch.distributed.rendezvous import rendezvous

    store: Store = next(rendezvous("env://"))[0]
    return store


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Start `python *arguments` as `count` ranks on this machine, wait for them, and return their exit code.

    It is that of the first rank that failed; what it printed says why.

    Raises:
        NotMeasuredError: A rank was killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable(logging.CRITICAL)  # A rank says itself what went wrong.
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in _OWN_CODES:
            return failure.exitcode
        if failure.exitcode > 0:
            how = f"left with exit status {failure.exitcode}"
        else:
            how = f"was ended by {signal.Signals(-failure.exitcode).name}"
        raise NotMeasuredError(f"rank {rank} of {count} {how}", hint="look at its output") from None
    except SignalException as ended:
        return 128 + int(ended.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0
