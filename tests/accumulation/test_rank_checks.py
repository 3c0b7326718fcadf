"""What several ranks cannot do is refused: two gloo processes, a sharded model, commands under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from autoaccum import Accumulator, fit, plan, verify
from autoaccum.accumulation.argument_checks import check_unsharded
from autoaccum.cli import main
from autoaccum.errors import UsageError

MODEL = """
import torch
from torch import nn
model, criterion = nn.Linear(4, 2), nn.MSELoss()
dataset = [(torch.randn(4), torch.randn(2)) for _ in range(8)]

def batch(size):
    return torch.randn(size, 4), torch.randn(size, 2)
"""


@pytest.fixture
def one_rank(tmp_path: Path) -> object:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_sharded_model_is_refused_by_commands() -> None:
    model, seen = nn.Sequential(sharded(nn.Linear(4, 2))), "0 in the model is sharded by fully_shard"
    pair, loss = (torch.randn(4, 4), torch.randn(4, 2)), nn.MSELoss()
    for call in (
        lambda: fit(model, [pair], target_batch=4, loss=loss, steps=1),
        lambda: plan(model=model, batch=pair, loss=loss, target_batch=4),
        lambda: verify(model=model, batch=pair, loss=loss, target_batch=4),
    ):
        with pytest.raises(UsageError, match=f"^{seen}: give the bare module"):
            call()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [nn.Sequential, sharded], ids=["plain", "sharded"])
def test_one_rank_trains_as_without_a_group(wrap: Callable[[nn.Module], nn.Module]) -> None:
    check_unsharded(nn.Linear(2, 2))
    model = wrap(nn.Linear(4, 2))
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), micro_batch=2)
    assert accumulator.step((torch.randn(4, 4), torch.randn(4, 2))).updated


class FullyShardedDataParallel(nn.Module):
    """Has the name of FSDP1's."""


def test_other_ways_to_share_a_model_are_refused() -> None:
    model = FullyShardedDataParallel()
    model.inner = nn.Linear(4, 2)
    with pytest.raises(UsageError, match="^the model is a FullyShardedDataParallel: give the bare module"):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), micro_batch=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan model.py --target-batch 8", "WORLD_SIZE is 2, without RANK, MASTER_ADDR and MASTER_PORT"),
        ("verify model.py", "verify keeps to one rank, and this process is one of several: start it once"),
        ("tune model.py --target-batch 8", "tune keeps to one rank, and this process is one of several: start it once"),
        ("guard model.py --gpu rtx3090", "guard keeps to one rank, and this process is one of several: start it once"),
    ],
)
def test_commands_that_cannot_run_among_ranks(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py"]
