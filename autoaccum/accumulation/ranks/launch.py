"""Join the ranks that a launcher such as torchrun has started, start such ranks, and divide a model among them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoaccum.accumulation.activation_checkpointing import find_blocks
from autoaccum.accumulation.gradients import HALF_DTYPES
from autoaccum.accumulation.ranks.group import Ranks, interruptibly, join_ranks, world_size
from autoaccum.checks import describe_type, is_one_of_ranks, join_words
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.options import Parallel
from autoaccum.sharded_tensors import is_sharded, is_sharded_model, move_own

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_groups = itertools.count()
_MESH_NAMES = ("replicate", "shard")
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


def choose_parallel(parallel: Parallel | None, parallelize: Callable[..., Any] | None) -> Parallel:
    """Return how ranks train one model: as requested, or as a workload with or without `parallelize` means it."""
    return parallel or ("ddp" if parallelize is None else "fsdp2")


def shard_model(
    model: nn.Module,
    device: torch.device,
    shape: Sequence[int],
    parallelize: Callable[[nn.Module, Any], Any] | None = None,
) -> nn.Module:
    """Return `model`, sharded over a mesh of all ranks, and with all that is not sharded moved to `device`.

    FSDP2 itself moves a module to the device as it shards it, so that a model larger than the device is never there as
    a whole. A model that was built on `meta` is materialised by `parallelize`.

    Args:
        model: The model, on the CPU or on `meta`; alike on all ranks.
        device: The device of this rank.
        shape: The ranks of the mesh; with two dimensions, shards are replicated along the first (HSDP).
        parallelize: The workload's function; None: shard the repeated blocks and the rest.

    Raises:
        WorkloadError: `parallelize` returned something else than a model, sharded nothing, or left parameters without
            memory; or FSDP2 cannot shard this model block by block.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, tuple(shape), mesh_dim_names=_MESH_NAMES[-len(shape) :])
    made = (parallelize or _shard_blocks)(model, mesh)
    if not isinstance(made, nn.Module | None):
        raise WorkloadError(f"parallelize(model, mesh) returned {describe_type(made)}", hint="return the model")
    model = model if made is None else made
    if parallelize is not None and not is_sharded_model(model):
        raise WorkloadError(
            "parallelize(model, mesh) shards no parameter", hint="call fully_shard in it, or replicate (--parallel ddp)"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise WorkloadError(
                f"{name} is still on meta after parallelize(model, mesh)",
                hint="call model.to_empty(device=...) and initialise the weights in it",
            )
    for module in model.modules():  # Shards stay, which may be offloaded: `_apply` takes new memory for a DTensor.
        move_own(module, device, is_sharded)
    return model


def _shard_blocks(model: nn.Module, mesh: Any) -> None:
    """Shard the repeated blocks and the rest; gradients of half precision are summed over ranks in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
    try:
        for module in (*_find_blocks(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    except ValueError as error:
        raise WorkloadError(
            f"FSDP2 cannot shard this model: {first_line(str(error)).rstrip('.')}",
            hint="change that, or shard it in parallelize(model, mesh)",
        ) from None


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, as they are recomputed, but those that share parameters with others.

    FSDP2 gathers a parameter with one group only.
    """
    uses = _parameter_uses(model)
    blocks = dict.fromkeys(model.get_submodule(name) for name in find_blocks(model))
    return [block for block in blocks if all(uses[key] == count for key, count in _parameter_uses(block).items())]


def _parameter_uses(root: nn.Module) -> Counter[int]:
    return Counter(
        id(tensor) for module in root.modules() for tensor in module._parameters.values() if tensor is not None
    )
