"""The accumulated update is the full batch's, on whatever device the model is; batches stay on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator

SIZE = 23
Batch = tuple[Tensor, Tensor]


def image_model() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5))


def image_batch() -> Batch:
    return torch.randn(SIZE, 3, 9, 9, dtype=torch.float64), torch.randint(0, 5, (SIZE,))


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 17)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens))).transpose(1, 2)


def token_batch() -> Batch:
    tokens = torch.randint(0, 17, (SIZE, 6))
    targets = torch.where(torch.rand(SIZE, 6) < 0.4, -100, tokens)
    return tokens, targets


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[[], nn.Module]]] = {
    "mean over samples": (image_model, image_batch, nn.CrossEntropyLoss),
    "class weights": (image_model, image_batch, lambda: nn.CrossEntropyLoss(torch.rand(5, dtype=torch.float64))),
    "sum": (image_model, image_batch, lambda: nn.CrossEntropyLoss(reduction="sum")),
    "ignored tokens": (TokenModel, token_batch, nn.CrossEntropyLoss),
}


def full_gradients(model: nn.Module, criterion: nn.Module, batch: Batch, place: torch.device) -> list[Tensor]:
    inputs, targets = (tensor.to(place) for tensor in batch)
    criterion(model(inputs), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [1, 7, SIZE])
def test_the_gradient_is_the_full_batchs(case: str, micro_batch: int, place: torch.device) -> None:
    torch.manual_seed(3)
    make_model, make_batch, make_criterion = CASES[case]
    model, criterion, batch = make_model().double().to(place), make_criterion(), make_batch()
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=1.0), criterion, micro_batch=micro_batch, clip_norm=None
    )
    expected = full_gradients(model, criterion, batch, place)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = accumulator.step(batch)
    assert result.updated
    assert max(result.micro_batches) <= micro_batch
    taken = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    largest = max(gradient.abs().max().item() for gradient in expected)
    for seen, full in zip(taken, expected, strict=True):
        assert seen.device == place
        assert (seen - full).abs().max().item() <= 1e-10 * largest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: Any, place: torch.device) -> None:
    torch.manual_seed(3)
    model = image_model().to(place)
    inputs, targets = image_batch()
    accumulator = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        nn.CrossEntropyLoss(),
        micro_batch=8,
        precision=precision,
        clip_norm=1.0,
    )
    results = [accumulator.step((inputs.float(), targets)) for _ in range(25)]
    updated = [result for result in results if result.updated]
    assert len(updated) >= 8  # The scaler of fp16 skips its first updates until its scale suits.
    assert updated[-1].loss < updated[0].loss
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
