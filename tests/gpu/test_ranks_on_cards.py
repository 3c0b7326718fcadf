"""Updates of two ranks with a card each, over NCCL; on the CPU over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from factories import IGNORED, LanguageModel, token_loss, tokens
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import AccumulationWarning

SAMPLES, MOST = 21, 2
SHARES = (slice(0, 13), slice(13, SAMPLES))
WORKLOAD = Path(__file__).parents[1] / "shared" / "workloads" / "recorded_net.py"


class Greedy(LanguageModel):
    """May want more memory than there is for more than `MOST` samples."""

    def __init__(self, greedy: bool = False) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.greedy = greedy
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        if self.greedy and len(ids) > MOST:
            torch.empty(2**50, dtype=torch.uint8, device=ids.device)
        return super().forward(ids)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return tokens(SAMPLES)


def train(model: nn.Module, mine: Any, **options: Any) -> tuple[dict[str, Tensor], list[float], int]:
    """Make two updates by token means, clipped; return the weights, the losses, and how often memory ran out."""
    options |= {"weight": lambda batch: (batch[1] != IGNORED).sum(), "micro_batch": 4, "clip_norm": 0.5}
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters(), lr=0.05), token_loss, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        results = [accumulator.step(mine) for _ in range(2)]
    whole = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    retries = sum(result.retries for result in results)
    return {name: one.cpu() for name, one in whole.items()}, [result.loss for result in results], retries


def train_on_rank(kind: str, way: str) -> Any:
    rank = dist.get_rank()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    model = Greedy(way == "greedy" and rank == 1).to(kind)
    options: dict[str, Any] = {}
    if way in ("each", "last"):
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        fully_shard(model.qkv, mesh=mesh)
        fully_shard(model, mesh=mesh)
        options["grad_sync"] = way
    return train(model, tuple(tensor[SHARES[rank]] for tensor in batch()), **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["replicated", "each", "last", "greedy"])
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cpu", "gloo"), pytest.param("cuda", "cpu:gloo,cuda:nccl", marks=pytest.mark.gpu(cards=2))],
)
def test_two_ranks_make_the_updates_of_one_process(kind: str, backend: str, way: str) -> None:
    """`each` and `last` are FSDP2; `greedy` runs out of memory on the second rank, and both repeat smaller."""
    weights, losses, _ = train(Greedy(), batch())
    for own, seen, retries in on_ranks(2, train_on_rank, kind, way, backend=backend, timeout=120):
        assert seen == pytest.approx(losses, rel=1e-12)
        assert (retries > 0) == (way == "greedy")
        for name, one in weights.items():
            torch.testing.assert_close(own[name], one, rtol=0, atol=1e-9)


@pytest.mark.gpu(cards=2)
def test_a_plan_is_tried_on_both_cards() -> None:
    words = ["plan", str(WORKLOAD), "--target-batch", "64", "--world-size", "2", "--device", "cuda", "--json", "-q"]
    done = subprocess.run([sys.executable, "-m", "autoaccum", *words], capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert [device["name"] for device in plan["devices"]] == ["cuda:0", "cuda:1"]
    assert plan["ranks"] == [[32], [32]]
