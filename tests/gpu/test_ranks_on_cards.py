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
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import AccumulationWarning

SAMPLES, MOST = 21, 2
SHARES = (slice(0, 13), slice(13, SAMPLES))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(cards=2))])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Net(nn.Module):
    """Predicts tokens; may want more memory than there is for more than `MOST` samples."""

    def __init__(self, *, greedy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.greedy = greedy
        self.embedding, self.layer, self.head = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 11)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.greedy and len(tokens) > MOST:
            torch.empty(2**50, dtype=torch.uint8, device=tokens.device)
        out: Tensor = self.head(self.layer(self.embedding(tokens)).tanh()).transpose(1, 2)
        return out


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randint(0, 11, (SAMPLES, 7))
    targets = rows.clone()
    for row in range(SAMPLES):
        targets[row, row % 7 :] = -100
    return rows, targets


def train(model: nn.Module, mine: Any, **options: Any) -> tuple[dict[str, Tensor], list[float], int]:
    """Make two updates by token means, clipped; return the weights, the losses, and how often memory ran out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    accumulator = Accumulator(model, optimizer, criterion, micro_batch=4, clip_norm=0.5, **options)
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
    model = Net(greedy=way == "greedy" and rank == 1).to(kind)
    options: dict[str, Any] = {}
    if way in ("each", "last"):
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        options["reduce"] = way
    return train(model, tuple(tensor[SHARES[rank]] for tensor in batch()), **options)


def run(kind: str, way: str) -> Any:
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    return on_ranks(2, train_on_rank, kind, way, backend=backend, timeout=120)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["replicated", "each", "last", "greedy"])
def test_two_ranks_make_the_updates_of_one_process(kind: str, way: str) -> None:
    """`each` and `last` are FSDP2; `greedy` runs out of memory on the second rank, and both repeat smaller."""
    weights, losses, _ = train(Net(), batch())
    for own, seen, retries in run(kind, way):
        assert seen == pytest.approx(losses, rel=1e-12)
        assert (retries > 0) == (way == "greedy")
        for name, one in weights.items():
            torch.testing.assert_close(own[name], one, rtol=0, atol=1e-9)


MODEL = """
from torch import nn, randn
model, criterion = nn.Linear(64, 8), nn.MSELoss()
def batch(size):
    return randn(size, 64), randn(size, 8)
"""


@pytest.mark.gpu(cards=2)
def test_a_plan_is_tried_on_both_cards(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = ["plan", "model.py", "--target-batch", "64", "--world-size", "2", "--device", "cuda", "--json", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "autoaccum", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    plan = json.loads(done.stdout)
    assert [device["name"] for device in plan["devices"]] == ["cuda:0", "cuda:1"]
    assert plan["ranks"] == [[32], [32]]
