"""The accumulated update is the full batch's, on whatever device the model is; batches stay on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import factories
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from whole_batches import Recorded, check_equal

from autoaccum import Accumulator, Workload
from autoaccum.api import verify

SAMPLES = 23
CHANNELS, SIDE, IMAGES = 32, 64, 32
TOKENS = {"loss": factories.token_loss, "weight": lambda batch: (batch[1] != factories.IGNORED).sum()}
WEIGHTED = nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64))
COUPLED = {
    "outputs": lambda model, batch: (*model.towers(batch), model.scale),
    "coupled_loss": lambda out, _: factories.contrastive_loss(out[2].exp() * out[0] @ out[1].T),
}


EXACT = {"loss": factories.class_loss, "batchnorm": "exact"}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mean over samples": (factories.Classifier, factories.labelled_rows, {"loss": nn.CrossEntropyLoss()}),
    "class weights": (factories.Classifier, factories.labelled_rows, {"loss": WEIGHTED}),
    "ignored tokens": (factories.LanguageModel, factories.tokens, TOKENS),
    "exact BatchNorm": (factories.ImageClassifier, factories.labelled_images, EXACT),
    "pairs of all samples": (factories.TwoTowers, factories.pairs, COUPLED),
}


def full_loss(options: dict[str, Any], model: nn.Module, batch: Any) -> Tensor:
    if "coupled_loss" in options:
        return torch.as_tensor(options["coupled_loss"](options["outputs"](model, batch), batch))
    loss = options["loss"]
    return torch.as_tensor(loss(model(batch[0]), batch[1]) if isinstance(loss, nn.Module) else loss(model, batch))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [1, 7, SAMPLES])
def test_the_gradient_is_the_full_batchs(case: str, micro_batch: int, place: torch.device) -> None:
    torch.manual_seed(3)
    make_model, make_batch, options = CASES[case]
    model, batch = make_model().double().to(place), make_batch(SAMPLES)
    recorded = Recorded(model, micro_batch=micro_batch, **options)
    result = recorded.step(batch)
    assert result.updated
    assert max(result.micro_batches) <= micro_batch
    assert all(gradient.device == place for gradient in recorded.gradients.values())
    WEIGHTED.to(place)
    there = tree_map(lambda tensor: tensor.to(place), batch)
    check_equal(recorded, model, partial(full_loss, options), there, 1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: Any, place: torch.device) -> None:
    torch.manual_seed(3)
    model, batch = factories.Classifier(32).to(place), factories.labelled_rows(SAMPLES, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    accumulator = Accumulator(model, optimizer, factories.class_loss, micro_batch=8, precision=precision, clip_norm=1.0)
    updated = [result for result in (accumulator.step(batch) for _ in range(25)) if result.updated]
    assert len(updated) >= 8  # The scaler of fp16 skips its first updates until its scale suits.
    assert updated[-1].loss < updated[0].loss
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.gpu
def test_the_card_holds_one_part_and_the_input_of_one_batchnorm() -> None:
    layers: list[nn.Module] = []
    for channels in (3, *[CHANNELS] * 6):
        layers += [nn.Conv2d(channels, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)).cuda()
    batch = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(10, (IMAGES,))
    peaks = {}
    for micro_batch in (IMAGES, 8, 2):
        recorded = Recorded(model, nn.CrossEntropyLoss(), micro_batch=micro_batch, batchnorm="exact")
        recorded.step(batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        recorded.step(batch)
        peaks[micro_batch] = torch.cuda.max_memory_allocated() - before
    waiting = IMAGES * CHANNELS * SIDE**2 * 4
    assert peaks[8] < peaks[IMAGES] / 3
    assert peaks[2] < peaks[IMAGES] / 8 + 2 * waiting


class Dropping(nn.Module):
    """Dropout within cuDNN's LSTM and a fused attention, whose kernel keeps its mask to itself, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.rnn(inputs)[0].unflatten(-1, (4, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)
        return torch.as_tensor(self.block(mixed.transpose(1, 2).flatten(2)).mean(1))


def sequences(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, 16, generator=generator), torch.randn(size, 16, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_dropout_in_any_kernel_is_verified(place: torch.device, precision: Any) -> None:
    workload = Workload(model=Dropping, batch=sequences, criterion=nn.MSELoss())
    found = verify(workload, device=str(place), precision=precision)
    assert found.equivalent, found.to_json()
    assert found.device == str(place)


def test_batchnorm_is_found(place: torch.device) -> None:
    batch = partial(factories.labelled_images, dtype=torch.float32)
    workload = Workload(model=factories.ImageClassifier, batch=batch, loss=factories.class_loss)
    assert [cause.kind for cause in verify(workload, device=str(place)).causes] == ["batchnorm"]
    assert verify(workload, device=str(place), batchnorm="frozen").equivalent
