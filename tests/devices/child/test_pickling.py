"""Live objects, pickled for another process: shapes, ties and settings arrive, and values unless it simulates."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices.child.pickling import pack
from autoaccum.errors import UsageError
from autoaccum.sources.optimizers import OptimizerLike
from autoaccum.sources.workload import Workload


class Tied(nn.Module):
    table: Tensor

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.first = nn.Embedding(1000, size)
        self.last = nn.Linear(size, 1000, bias=False)
        self.last.weight = self.first.weight
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("table", torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t())
        self.first.weight.note = "mine"  # type: ignore[attr-defined]
        self.image.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.first(x)))


def batch(size: int) -> Tensor:
    return torch.arange(size)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch)


def workload(**changes: Any) -> Workload:
    return Workload(**{"model": Tied(), "batch": batch, "loss": loss, "dataset": [1, 2], **changes})


def test_forms_ties_attributes_and_small_values_arrive(tmp_path: Path) -> None:
    sent = workload()
    assert isinstance(sent.model, Tied)
    weights = sent.model.first.weight.detach().clone()
    made = pack(sent, tmp_path, simulates=True).load()
    assert made.dataset is None
    model = made.build_model()
    assert isinstance(model, Tied)
    assert model is not made.build_model()
    assert model.first.weight is model.last.weight
    assert model.first.weight.note == "mine"  # type: ignore[attr-defined]
    assert model.image.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.image.bias is not None
    assert (model.image.bias.requires_grad, model.image.weight.requires_grad) == (False, True)
    assert torch.equal(model.table, sent.model.table)
    assert (model.table.dtype, model.training) == (torch.bfloat16, True)
    assert torch.equal(made.build_batch(3), torch.arange(3))
    assert torch.equal(sent.model.first.weight, weights)


@pytest.mark.parametrize("simulates", [True, False])
def test_weights_arrive_with_their_values(simulates: bool, tmp_path: Path) -> None:
    model = Tied()
    source = pack(workload(model=model), tmp_path, simulates=simulates, with_values=True)
    made = source.load().build_model()
    assert all(torch.equal(*both) for both in zip(model.parameters(), made.parameters(), strict=True))
    assert isinstance(made, Tied)
    assert made.first.weight is made.last.weight


def test_no_weight_is_copied(tmp_path: Path) -> None:
    for model in (Tied(8_000), Tied().to("meta")):  # 32 MB of weights.
        pack(workload(model=model), tmp_path, simulates=True)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 15_000


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerLike:
    return OptimizerLike(optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad])


def test_a_live_optimizer_arrives_with_its_settings_and_without_its_state(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(
        [{"params": model.last.parameters(), "lr": 0.5}, {"params": model.image.parameters()}], betas=(0.5, 0.6)
    )
    torch.autograd.backward(loss(model, torch.arange(4)))
    optimizer.step()
    made = pack(workload(model=model, optimizer=like(optimizer, model)), tmp_path, simulates=True).load()
    other = made.build_model()
    built = made.build_optimizer(other)
    assert type(built) is torch.optim.AdamW
    assert [(group["lr"], group["betas"]) for group in built.param_groups] == [(0.5, (0.5, 0.6)), (1e-3, (0.5, 0.6))]
    assert isinstance(other, Tied)
    assert built.param_groups[0]["params"] == [other.last.weight]
    assert built.param_groups[1]["params"][0] is other.image.weight
    assert len(built.state) == 0
    assert len(optimizer.state) == 1
    torch.autograd.backward(loss(other, torch.arange(4)))
    built.step()
    assert len(built.state) == 1


def test_an_optimizer_of_more_than_the_model_is_refused() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(UsageError, match="the SGD holds parameters that are not the model's"):
        like(optimizer, model)


def lines() -> Any:
    yield from range(3)


def cases() -> dict[str, tuple[Any, str]]:
    model, waiting = Tied(), lines()
    holder: Any = Tied()
    holder.last.waiting = waiting
    return {
        "an attribute": (
            {"model": holder},
            r"model\.last\.waiting cannot be sent to another process .*: write model, batch and loss into a file",
        ),
        "an iterator": (
            {"batch": lambda size: [next(waiting) for _ in range(size)]},
            "batch cannot be sent to another process .*generator.*: write model, batch and loss into a file",
        ),
        "the model": (
            {"model": model, "loss": lambda _, batch: loss(model, batch)},
            "loss uses the model itself, and each trial has one of its own: use the model or the parameters",
        ),
        "its weights": (
            {"model": model, "loss": lambda m, batch: loss(m, batch) + model.first.weight.norm()},
            "loss uses the model itself",
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_what_cannot_be_pickled_is_named(name: str, tmp_path: Path) -> None:
    changes, text = cases()[name]
    with pytest.raises(UsageError, match=text) as caught:
        pack(workload(**changes), tmp_path, simulates=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("namesake", [False, True], ids=["alone", "beside an installed package of its name"])
def test_what_was_loaded_by_its_path_goes_by_value(
    namesake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if namesake:
        (tmp_path / "installed" / "no_folder").mkdir(parents=True)
        (tmp_path / "installed" / "no_folder" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "installed")
    source = (
        "from torch import nn\nclass Net(nn.Linear):\n    pass\n"
        "def batch(size):\n    return size\ndef loss(model, batch):\n    return Net(batch, 1)\n"
    )
    (tmp_path / "mine.py").write_text(source)
    spec = importlib.util.spec_from_file_location("no_folder.mine", tmp_path / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    sys.modules["no_folder.mine"] = mine
    packed = pack(workload(model=mine.Net(3, 2), batch=mine.batch, loss=mine.loss), tmp_path, simulates=True)
    del sys.modules["no_folder.mine"]
    assert not cloudpickle.list_registry_pickle_by_value()
    found = packed.load()
    assert callable(found.model)
    made = found.model()
    assert type(made).__name__ == "Net"
    assert made.get_parameter("weight").shape == (2, 3)
    assert found.loss is not None
    assert isinstance(found.loss(made, found.batch(5)), nn.Linear)
