"""The models that predictions are proved on: what they are called after they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.workload.loading import load_workload
from autoaccum.workload.spec import Workload

FOLDER = Path(__file__).parents[1] / "shared" / "workloads"
PARAMETERS = {"resnet50": 25_557_032, "gpt2": 124_439_808, "llama_8b": 8_030_261_248}


def load(name: str) -> Workload:
    return load_workload(str(FOLDER / f"{name}.py"))


def on_meta(workload: Workload) -> Any:
    with torch.device("meta"):
        return workload.build_model()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_without_materialising_them(name: str) -> None:
    workload = load(name)
    model = on_meta(workload)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_gives_every_parameter_a_gradient(name: str) -> None:
    workload = load(name)
    model = on_meta(workload)
    batch = tuple(part.to("meta") for part in workload.build_batch(2))
    inputs, targets = batch
    loss = workload.loss(model, batch) if workload.loss else workload.criterion(model(inputs), targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    loss.backward()
    for name_, parameter in model.named_parameters():
        assert parameter.grad is not None, name_
        assert parameter.grad.dtype == parameter.dtype, name_
    optimizer = workload.build_optimizer(model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_resnet_50() -> None:
    workload = load("resnet50")
    model = on_meta(workload)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) + 1 == 50 + 4  # Four of them on shortcuts.
    features = nn.Sequential(*list(model.children())[:-3])(torch.empty(2, 3, 224, 224, device="meta"))
    assert features.shape == (2, 2048, 7, 7)
    images, classes = workload.build_batch(3)
    assert (images.shape, classes.shape) == ((3, 3, 224, 224), (3,))
    optimizer = workload.build_optimizer(model)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.9


def test_gpt_2_ties_its_head() -> None:
    workload = load("gpt2")
    model = on_meta(workload)
    assert model.head.weight is model.tokens.weight
    assert workload.precision == "bf16"
    ids, following = workload.build_batch(2)
    assert ids.shape == following.shape == (2, 1024)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    assert model(ids.to("meta")).shape == (2, 1024, 50257)


def test_llama_is_in_bf16_and_its_queries_share_keys() -> None:
    workload = load("llama_8b")
    model = on_meta(workload)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert len(model.layers) == 32
    layer = model.layers[0]
    assert (layer.query.out_features, layer.key.out_features, layer.gate.out_features) == (4096, 1024, 14336)
    assert model(torch.zeros(1, 8, dtype=torch.long, device="meta")).shape == (1, 8, 128256)


def test_rotary_positions_turn_by_their_distance_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of a turned query and a turned key depends on how far apart they are."""
    build = load("llama_8b").model
    module = sys.modules[build.__module__]
    for name, value in {"LAYERS": 0, "VOCABULARY": 2, "WIDTH": 64, "DTYPE": torch.float32}.items():
        monkeypatch.setattr(module, name, value)
    model = module.Llama()
    query, key = torch.randn(128), torch.randn(128)

    def product(at: int, other: int) -> Any:
        turned = [module.rotate(x, model.cos[i], model.sin[i]) for x, i in ((query, at), (key, other))]
        return turned[0] @ turned[1]

    torch.testing.assert_close(product(7, 3), product(104, 100), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(product(7, 3), product(7, 4))
