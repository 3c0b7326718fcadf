"""Several ranks are refused: two real gloo processes, wrapped models of one rank, commands under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from autoaccum import Accumulator, fit, plan, verify
from autoaccum.accumulation.argument_checks import check_unsharded
from autoaccum.checks import check_launch
from autoaccum.cli import main
from autoaccum.errors import UsageError

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn
model, criterion = nn.Linear(4, 2), nn.MSELoss()
dataset = [(torch.randn(4), torch.randn(2)) for _ in range(8)]

def batch(size):
    return torch.randn(size, 4), torch.randn(size, 2)
"""
RANK = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from autoaccum import Accumulator, fit, plan, verify
from autoaccum.errors import UsageError

model, loss = nn.Linear(4, 2), nn.MSELoss()
pair = torch.randn(4, 4), torch.randn(4, 2)
early = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch=2)
early.step(pair)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = {
    "step": lambda: early.step(pair),
    "made": lambda: Accumulator(model, optimizer, loss, micro_batch=2),
    "fit": lambda: fit(model, [pair], target_batch=4, loss=loss, steps=1, micro_batch=2),
    "plan": lambda: plan(model=model, batch=pair, loss=loss, target_batch=4),
    "verify": lambda: verify(model=model, batch=pair, loss=loss, target_batch=4),
}
for name, call in calls.items():
    try:
        call()
    except UsageError as error:
        print(name, error)
dist.destroy_process_group()
"""


@pytest.fixture
def one_rank(tmp_path: Path) -> object:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_of_one_group_are_refused(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")],
            env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, failed = rank.communicate(timeout=120)
        assert rank.returncode == 0, failed
        message = "this process is one of 2 ranks, and several ranks are not built yet: run it in one process"
        assert [line.split()[0] for line in output.splitlines()] == ["step", "made", "fit", "plan", "verify"]
        assert all(message in line for line in output.splitlines())


def sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "seen"),
    [
        (nn.parallel.DistributedDataParallel, "the model is a DistributedDataParallel"),
        (lambda net: nn.Sequential(sharded(net)), "0 in the model is sharded by fully_shard"),
    ],
    ids=["ddp", "fsdp2 inside"],
)
def test_a_model_of_ranks_is_refused_by_all(wrap: object, seen: str, tmp_path: Path) -> None:
    assert callable(wrap)
    model = wrap(nn.Linear(4, 2))
    pair, loss = (torch.randn(4, 4), torch.randn(4, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (
        lambda: Accumulator(model, optimizer, loss, micro_batch=2),
        lambda: fit(model, [pair], target_batch=4, loss=loss, steps=1),
        lambda: plan(model=model, batch=pair, loss=loss, target_batch=4),
        lambda: verify(model=model, batch=pair, loss=loss, target_batch=4),
    ):
        with pytest.raises(UsageError, match=f"^{seen}, and several ranks are not built yet: give the bare module"):
            call()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_trains_as_without_a_group() -> None:
    check_launch()
    check_unsharded(nn.Linear(2, 2))
    model = nn.Linear(4, 2)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), micro_batch=2)
    assert accumulator.step((torch.randn(4, 4), torch.randn(4, 2))).updated


@pytest.mark.parametrize("words", ["plan model.py --target-batch 8 --world-size 2", "verify model.py"])
def test_commands_under_torchrun_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    message = (
        "this process is one of 2 (WORLD_SIZE), and several ranks are not built yet: start it once, without torchrun"
    )
    assert message in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py"]
