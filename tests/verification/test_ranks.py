"""`verify` over ranks: real processes over gloo, the Accumulator and loops of a user's with DDP and `fully_shard`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import small_verified as small
import torch
import torch.distributed as dist
from command_line import Command
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoaccum import Workload, verify
from autoaccum.errors import NotMeasuredError, WorkloadError
from autoaccum.messages import Message
from autoaccum.verification.verification_result import Verification

pytestmark = pytest.mark.usefixtures("warm_children")


def tokens(**more: Any) -> Workload:
    return small.sentences(weight=small.token_weight, **more)


def found(workload: Workload, ranks: int = 2, **more: Any) -> Verification:
    return verify(workload, target_batch=8, micro_batch=2, world_size=ranks, **more)


def run_parts(model: Any, parts: Any, total: Any) -> None:
    """Backpropagate token losses by the share of each part; the last backward sums over ranks, where DDP does."""
    for number, part in enumerate(parts):
        silent = isinstance(model, DistributedDataParallel) and number + 1 < len(parts)
        with model.no_sync() if silent else nullcontext():
            torch.autograd.backward(small.token_loss(model, part) * small.token_weight(part) / total)


def of_all_ranks(parts: Any) -> torch.Tensor:
    total = torch.tensor(float(sum(small.token_weight(part) for part in parts)))
    dist.all_reduce(total)
    return total


def right(model: nn.Module, parts: Any) -> None:
    run_parts(DistributedDataParallel(model), parts, of_all_ranks(parts) / dist.get_world_size())


def sharded(model: nn.Module, parts: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    run_parts(model, parts, of_all_ranks(parts) / dist.get_world_size())


def averaged(model: nn.Module, parts: Any) -> None:
    """The classic fault: each rank divides by its own tokens, and DDP averages."""
    run_parts(DistributedDataParallel(model), parts, sum(small.token_weight(part) for part in parts))


def averaged_twice(model: nn.Module, parts: Any) -> None:
    run_parts(DistributedDataParallel(model), parts, of_all_ranks(parts))


def added(model: nn.Module, parts: Any) -> None:
    run_parts(model, parts, sum(small.token_weight(part) for part in parts))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def summed_on_the_first(model: nn.Module, parts: Any) -> None:
    run_parts(model, parts, of_all_ranks(parts))
    for parameter in model.parameters():
        dist.reduce(parameter.grad, 0)  # type: ignore[arg-type]


def undivided(model: nn.Module, parts: Any) -> None:
    wrapped = DistributedDataParallel(model)
    for part in parts:
        torch.autograd.backward(small.token_loss(wrapped, part))


def test_the_update_of_ranks_is_the_full_batchs() -> None:
    seen = found(tokens())
    assert seen.equivalent
    assert seen.world_size == 2
    assert [comparison.micro_batches for comparison in seen.comparisons] == [(2, 2, 2, 2), (2, 1)]
    assert all(one.error < 1e-12 for one in seen.comparisons[0].differences)
    assert seen.notes[0].facts["reason"] == Message("draws_of_ranks"), "dropout is neutral, and that is said"


def test_a_loop_of_ranks_that_is_right() -> None:
    seen = found(tokens(accumulate=sharded))
    assert seen.equivalent, seen.causes
    assert [comparison.method for comparison in seen.comparisons] == ["accumulator", "accumulate"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "accumulate", [averaged, averaged_twice, added, undivided], ids=lambda loop: str(loop.__name__)
)
def test_what_a_loop_of_ranks_does_wrong_is_named(accumulate: Any) -> None:
    seen = found(tokens(accumulate=accumulate))
    assert not seen.equivalent
    assert all(comparison.equal == (comparison.method == "accumulator") for comparison in seen.comparisons)
    (cause,) = seen.causes
    assert (cause.kind, cause.proved) == ("accumulate", True)
    assert cause.change.facts["over_ranks"]


def test_a_sum_that_only_the_first_rank_gets_is_told() -> None:
    assert not found(tokens(accumulate=summed_on_the_first)).equivalent


def test_more_ranks_than_even_shares_and_a_model_that_couples() -> None:
    assert found(small.classes(), ranks=3).equivalent
    normed = nn.Sequential(nn.Linear(small.FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, small.CLASSES))
    (cause,) = found(small.classes(normed)).causes
    assert (cause.kind, cause.mode, cause.proved) == ("batchnorm", {"batchnorm": "exact"}, True)


def breaks_on_the_second(model: nn.Module, parts: Any) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such token")
    right(model, parts)


def dies_on_the_second(model: nn.Module, parts: Any) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    right(model, parts)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(WorkloadError, match="no such token"):
        found(tokens(accumulate=breaks_on_the_second))
    with pytest.raises(NotMeasuredError, match="its process left with exit status 7"):
        found(tokens(accumulate=dies_on_the_second))


def test_the_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn, randn\n"
        "model, criterion = nn.Linear(4, 2), nn.MSELoss()\n"
        "def batch(size):\n    return randn(size, 4), randn(size, 2)\n"
    )
    done = command(tmp_path, "verify", "model.py", "--world-size", "2")
    assert done.returncode == 0, done.stderr
    assert "(2 tensors, 16 samples as 4 + 4 + 4 + 4 over 2 ranks, float64)" in done.stdout
