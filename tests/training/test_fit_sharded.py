"""Training a model that FSDP2 shards is training the whole model, and a run goes on over other numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_plan
from on_ranks import on_ranks
from rank_training import Failing, Rows
from small_fit import fit, of_kind
from torch import nn

import autoaccum
from autoaccum.accumulation.ranks import sharded
from autoaccum.accumulation.ranks.sharded import ShardedParts
from autoaccum.errors import UpdateInterrupted, UsageError
from autoaccum.training.fit_events import Evaluated

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9).eval(), nn.Tanh(), nn.Linear(9, 4)).double()


def parallelize(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(folder: str, steps: int, fails_at: int = 0) -> Any:
    torch.set_num_threads(1)
    workload = autoaccum.Workload(
        model=make_model,
        criterion=Failing(
            fails_at, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what a test refuses")
        ),
        dataset=Rows(),
        evaluation_dataset=Rows(),
        parallelize=parallelize,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
    )
    saved: dict[str, Any] = {"run_dir": folder, "checkpoint_every": 2}
    result, events = fit(workload, target_batch=10, steps=steps, eval_every=5, clip_norm=0.5, **saved)
    evaluations = [event.values["loss"] for event in of_kind(Evaluated, events)]
    return result.updates, result.loss, evaluations, type(result.model).__name__, result.warnings


def assert_equal(folder: Path, other: Path) -> None:
    weights, others = (torch.load(path / "model.pt", weights_only=True) for path in (folder, other))
    torch.testing.assert_close(dict(others), dict(weights), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_sharded_model_trains_as_a_whole_one_and_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    alone, parts = tmp_path / "alone", str(tmp_path / "parts")
    whole = train(str(alone), 9)
    assert whole[3] == "Sequential"
    for size, steps in ((3, 3), (2, 6), (1, 9)):
        ends = on_ranks(size, train, parts, steps) if size > 1 else [train(parts, steps)]
        assert {end[0] for end in ends} == {steps}
        assert {end[3] for end in ends} == {"Sequential" if size == 1 else "FSDPSequential"}
        for end in ends:
            assert end[2] == ends[0][2]
    assert ends[0][2][-1] == pytest.approx(whole[2][-1], rel=1e-9)
    assert_equal(alone, tmp_path / "parts")


def run_out(folder: str) -> str:
    try:
        train(folder, 6, fails_at=5)
    except UpdateInterrupted as error:
        return str(error)
    return "none"


@pytest.mark.slow
def test_memory_that_runs_out_ends_all_and_the_next_start_takes_smaller_parts(tmp_path: Path) -> None:
    on_ranks(2, train, str(tmp_path), 2)
    for text in on_ranks(2, run_out, str(tmp_path), patience=5):
        assert text.startswith("memory ran out on rank 1 (forward) with micro-batches of ")
        assert "the same command resumes from" in text
        assert text.endswith(", in micro-batches of at most 2 samples")
    assert json.loads((tmp_path / "ceiling.json").read_text()) == {"micro_batch": 2}
    ends = on_ranks(2, train, str(tmp_path), 6)
    assert [end[0] for end in ends] == [6, 6]
    train(str(tmp_path / "alone"), 6)
    assert_equal(tmp_path / "alone", tmp_path)


def ways_of_training(planned: Any, own: bool, asked: Any) -> str:
    """Return whether a rank trains a shard, how its gradients are summed, and the mesh; or the error."""
    torch.set_num_threads(1)
    ways: list[str] = []

    class Spied(ShardedParts):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            ways.extend([self._grad_sync, str(tuple(self._groups[0].mesh_info.mesh.shape))])

    sharded.ShardedParts = Spied  # type: ignore[misc]
    workload = autoaccum.Workload(
        model=make_model, criterion=nn.CrossEntropyLoss(), dataset=Rows(), parallelize=parallelize if own else None
    )
    asked |= (
        {"micro_batch": 2}
        if planned is None
        else {"plan": make_plan(10, 2, world_size=2, workload={"name": "net"}, **planned)}
    )
    try:
        result = autoaccum.fit(workload, target_batch=10, steps=1, progress=False, **asked)
    except UsageError as error:
        return str(error)
    finally:
        sharded.ShardedParts = ShardedParts  # type: ignore[misc]
    return " ".join([type(result.model).__name__, *ways])


@pytest.mark.parametrize(
    ("planned", "own", "asked", "way"),
    [
        ({"parallel": "fsdp2", "grad_sync": "last"}, False, {}, "FSDPSequential last (2,)"),
        ({"parallel": "fsdp2", "grad_sync": "each", "mesh": (1, 2)}, True, {}, "FSDPSequential each (1, 2)"),
        (
            {"parallel": "ddp"},
            True,
            {"parallel": "fsdp2"},
            "the plan is for parallel='ddp'; here is parallel='fsdp2'",
        ),
        (None, True, {"parallel": "ddp"}, "Sequential"),
        (None, True, {"mesh": (2, 2)}, "the mesh 2x2 has 4 ranks, and there are 2: give a mesh of 2"),
    ],
)
def test_ranks_train_as_planned_or_as_asked(planned: Any, own: bool, asked: Any, way: str) -> None:
    for said in on_ranks(2, ways_of_training, planned, own, asked):
        assert said.startswith(way)


def refusal(file: str, parallel: Any) -> str:
    with pytest.raises(UsageError) as refused:
        autoaccum.fit(file, target_batch=10, steps=1, progress=False, parallel=parallel)
    return str(refused.value)


@pytest.mark.parametrize(("own", "parallel"), [("def parallelize(model, mesh): ...", None), ("", "fsdp2")])
def test_without_a_plan_a_sharded_model_needs_a_number(tmp_path: Path, own: str, parallel: Any) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Linear(5, 4)\ncriterion = nn.CrossEntropyLoss()\n"
        f"dataset = [(torch.randn(5), 1)] * 20\n{own}\n"
    )
    for said in on_ranks(2, refusal, str(file), parallel):
        assert "give the plan of a simulated card (autoaccum plan --gpu NAME --world-size 2); or give a number" in said
