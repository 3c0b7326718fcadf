"""Checkpointed blocks are found, give the same gradient from less memory, and are undone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from small_blocks import ResidualBlock
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.accumulation.activation_checkpointing import checkpointed, find_blocks


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.call = call or (lambda block, x: block(x, scale=0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Tied(nn.Module):
    """One block under two names, and a weight that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer0 = self.layer1 = ResidualBlock()
        self.layer2 = ResidualBlock()
        self.layer2.up.weight = self.layer0.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layer2(self.layer1(self.layer0(x))))


class Dense(nn.Module):
    """Passes each layer a list of all earlier outputs, and another list that the layer appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(6 * (1 + number)) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features, noted = [x], list[Tensor]()
        for layer in self.layers:
            features.append(layer(features, {"noted": noted}))
        return torch.cat([*features, *noted], 1)


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 6)

    def forward(self, features: list[Tensor], notes: dict[str, list[Tensor]]) -> Tensor:
        made = torch.tanh(self.layer(torch.cat(features, 1)))
        notes["noted"].append(made.square())
        return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "keywords": lambda: Stack([ResidualBlock() for _ in range(3)]),
    "dropout": lambda: Stack([ResidualBlock(dropout=0.5) for _ in range(3)]),
    "lists that grow": Dense,
    "tied weights": Tied,
    "sequential": lambda: nn.Sequential(nn.Linear(6, 6), ResidualBlock(), ResidualBlock(), nn.Tanh()),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    ),
    "batch norm": lambda: Stack([ResidualBlock(norm=nn.BatchNorm1d(6)) for _ in range(2)]),
}


def gradients(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(inputs).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("form", MODELS)
def test_the_gradient_is_the_same(form: str) -> None:
    torch.manual_seed(0)
    model = MODELS[form]().double()
    inputs = torch.randn(5, 4, 6, dtype=torch.float64) if form == "transformer" else torch.randn(5, 6).double()
    plain = gradients(model, inputs)
    with checkpointed(model, find_blocks(model)):
        saved = gradients(model, inputs)
    assert plain.keys() == saved.keys()
    scale = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        assert float((gradient - saved[name]).abs().max()) <= 1e-10 * scale, name
    assert all("forward" not in vars(module) for module in model.modules())


class Stage(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks, self.shrink = nn.Sequential(*(ResidualBlock() for _ in range(count))), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.shrink(self.blocks(x)))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.up1, self.up2 = ResidualBlock(), ResidualBlock(), Stage(1), Stage(1)
        self.encoder, self.decoder = (
            Stack([ResidualBlock(), ResidualBlock()]),
            Stack([ResidualBlock(), ResidualBlock()]),
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: Stack([ResidualBlock(), ResidualBlock()]), ("blocks.0", "blocks.1")),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ()),
        (lambda: nn.Sequential(ResidualBlock(), nn.Linear(2, 2)), ()),
        (lambda: nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]), ("0", "1")),
        (
            lambda: nn.Sequential(Stage(1), Stage(2)),
            ("0.blocks.0", "1.blocks.0", "1.blocks.1"),
        ),
        (lambda: nn.Sequential(Stage(2), Stage(2)), ("0", "1")),
        (
            lambda: nn.Sequential(*(nn.Sequential(ResidualBlock(), ResidualBlock()) for _ in range(2))),
            ("0.0", "0.1", "1.0", "1.1"),
        ),
        (
            Attributes,
            (
                *("down1", "down2", "up1", "up2"),
                *("encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1"),
            ),
        ),
        (lambda: nn.Linear(2, 2), ()),
    ],
    ids=["list", "layers", "alone", "lists of layers", "stages", "equal stages", "nested lists", "attributes", "layer"],
)
def test_repeated_modules_are_blocks(model: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    assert find_blocks(model()) == names
