"""Training by `autoaccum.fit`: its updates are those of a plain loop over full batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import IGNORED, Classifier, LanguageModel, assert_close, labelled_rows, token_loss
from factories import tokens as token_rows
from small_fit import after_update, fit, of_kind
from state_digests import state_digest
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import autoaccum
from autoaccum.accumulation.step_result import WeightingWarning
from autoaccum.errors import WorkloadError
from autoaccum.training.fit_events import EpochEnded, Evaluated, Started, Updated

Words = tuple[Tensor, Tensor]
SAMPLES, TARGET, EPOCHS = 155, 16, 3
UPDATES = EPOCHS * 10  # nine windows of 16 and one of 11


class RecordedTexts(TensorDataset):
    """Texts of uneven length; records which were fetched."""

    def __init__(self) -> None:
        super().__init__(*token_rows(SAMPLES))
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]

    def batch_of(self, indices: list[int]) -> Words:
        return trim([(self.tensors[0][index], self.tensors[1][index]) for index in indices])


def trim(texts: list[Words]) -> Words:
    """Collate without what is padding in all of them."""
    ids, labels = default_collate(texts)
    width = int((labels != IGNORED).sum(1).max())
    return ids[:, :width], labels[:, :width]


def count_tokens(batch: Words) -> Tensor:
    return (batch[1] != IGNORED).sum()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)


TEXTS: dict[str, Any] = {"target_batch": TARGET, "loss": token_loss, "weight": count_tokens}
TEXTS |= {"scheduler": halving, "epochs": EPOCHS}


def windows(order: list[int]) -> Iterator[list[int]]:
    for epoch in range(EPOCHS):
        of_epoch = order[epoch * SAMPLES : (epoch + 1) * SAMPLES]
        yield from (of_epoch[start : start + TARGET] for start in range(0, SAMPLES, TARGET))


def train_plainly(
    model: nn.Module,
    batches: list[Words],
    *,
    optimizer: Callable[..., Any] = adamw,
    clip_norm: float | None = None,
) -> None:
    """The reference: each effective batch in one piece."""
    stepper = optimizer(list(model.parameters()))
    scheduler = halving(stepper)
    for batch in batches:
        stepper.zero_grad()
        torch.autograd.backward(token_loss(model, batch))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepper.step()
        scheduler.step()


@pytest.fixture
def model() -> LanguageModel:
    """With tied weights."""
    torch.manual_seed(0)
    net = LanguageModel().double()
    net.head.weight = net.embed.weight
    return net


@pytest.mark.parametrize(
    ("optimizer", "micro_batch", "clip_norm"),
    [(adamw, 1, None), (adamw, 5, 0.5), (sgd, 5, None), (sgd, 16, 0.5), (sgd, 40, None)],
)
def test_thirty_updates_are_those_of_full_batches(
    model: LanguageModel, optimizer: Any, micro_batch: int, clip_norm: float | None
) -> None:
    data, other = RecordedTexts(), copy.deepcopy(model)
    options = {"optimizer": optimizer, "micro_batch": micro_batch, "clip_norm": clip_norm, "collate": trim}
    result, _ = fit(model, data, **TEXTS, **options)
    assert (result.updates, result.epochs, result.samples) == (UPDATES, EPOCHS, EPOCHS * SAMPLES)
    assert result.model is model
    order = [sorted(data.fetched[epoch * SAMPLES : (epoch + 1) * SAMPLES]) for epoch in range(EPOCHS)]
    assert order == [list(range(SAMPLES))] * EPOCHS
    assert data.fetched[:SAMPLES] != data.fetched[SAMPLES : 2 * SAMPLES], "each epoch has an order of its own"
    batches = [data.batch_of(window) for window in windows(data.fetched)]
    train_plainly(other, batches, optimizer=optimizer, clip_norm=clip_norm)
    assert_close(model, other, 1e-9)


def test_batches_of_any_size_are_regrouped_to_the_target_batch(model: LanguageModel) -> None:
    data, other = RecordedTexts(), copy.deepcopy(model)
    batches = [data.batch_of(list(range(SAMPLES))[start : start + 20]) for start in range(0, SAMPLES, 20)]
    _, events = fit(model, batches, **TEXTS, optimizer=adamw, micro_batch=6)
    trained = [0, *(event.samples for event in of_kind(Updated, events))]
    assert [after - before for before, after in pairwise(trained)] == ([TARGET] * 9 + [11]) * EPOCHS
    train_plainly(other, [data.batch_of(window) for window in windows(list(range(SAMPLES)) * EPOCHS)])
    assert_close(model, other, 1e-9)


def small() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)), TensorDataset(x, x.sum(1).gt(0).long())


def fit_small(
    model: nn.Module | None = None, data: Any = None, **options: Any
) -> tuple[autoaccum.FitResult, list[Any]]:
    net, rows = small()
    settings: dict[str, Any] = {"target_batch": 16, "loss": nn.CrossEntropyLoss(), "micro_batch": 8, "epochs": 2}
    return fit(model or net, data or rows, **settings | options)


def digest(result: autoaccum.FitResult) -> str:
    return state_digest(result.model, result.optimizer)


def test_the_same_seed_trains_the_same_and_another_one_does_not() -> None:
    digests = [digest(fit_small(seed=seed)[0]) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_events_come_in_order_and_say_what_happened() -> None:
    _, data = small()
    result, events = fit_small(eval_data=data)
    assert [type(event).__name__ for event in events] == [
        "Started",
        *["Updated"] * 3,
        "EpochEnded",
        "Evaluated",
        *["Updated"] * 3,
        "EpochEnded",
        "Evaluated",
    ]
    started = events[0]
    assert isinstance(started, Started)
    assert (started.updates, started.epochs, started.micro_batch, started.target_batch) == (6, 2, 8, 16)
    last = of_kind(Updated, events)[-1]
    assert (last.update, last.epoch, last.samples, last.micro_batches, last.micro_batch) == (6, 2, 96, 2, 8)
    assert last.loss == result.loss
    assert last.grad_norm is not None
    assert last.peak_bytes is not None
    assert last.peak_bytes > 2**20
    assert [event.samples for event in of_kind(EpochEnded, events)] == [48, 48]
    assert result.evaluation == dict(of_kind(Evaluated, events)[-1].values)


def test_updates_end_in_the_middle_of_an_epoch_too() -> None:
    result, _ = fit_small(epochs=None, steps=5)
    assert (result.updates, result.epochs, result.samples) == (5, 1, 80)
    result, _ = fit_small(epochs=1, steps=5)
    assert (result.updates, result.epochs) == (3, 1)


def test_a_callback_that_says_true_ends_the_training() -> None:
    result, _ = fit_small(callbacks=[after_update(2, lambda: True)])
    assert (result.updates, result.stopped) == (2, "callback")


def test_the_caller_s_random_states_are_restored() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    model, data = small()
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    expected = draw()
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    fit(model, data, loss=nn.CrossEntropyLoss(), eval_data=data, steps=2)
    assert draw() == expected


def test_submodules_in_eval_mode_stay_so_and_a_model_in_eval_mode_is_trained() -> None:
    model: Any = small()[0]
    model[1].eval()
    fit_small(model, steps=1)
    assert (model.training, model[1].training) == (True, False)
    fit_small(model.eval(), steps=1)
    assert all(module.training for module in model.modules())


def test_a_live_optimizer_continues_with_its_state() -> None:
    model = small()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        result, _ = fit_small(model, optimizer=optimizer, epochs=None, steps=2)
    assert result.optimizer is optimizer
    assert float(next(iter(optimizer.state.values()))["step"]) == 4


@pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch", "ignore:BatchNorm")
@pytest.mark.parametrize(("mode", "updates"), [("micro", 2), ("running", 1), ("frozen", 0), ("exact", 1)])
def test_a_mode_of_batchnorm_is_trained_under(mode: str, updates: int) -> None:
    model: Any = Classifier(norm=True)
    data = TensorDataset(*labelled_rows(16, torch.float32))
    fit_small(model, data, epochs=1, batchnorm=mode)
    assert int(model.norm.num_batches_tracked) == updates


class SumForCTC(nn.Module):
    """A model that computes a sum as its loss, by its class and configuration."""

    config = SimpleNamespace(ctc_loss_reduction="sum")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": (self.layer(x)[:, 0] - labels).square().sum()}


def test_the_sum_that_a_workloads_model_computes_is_not_averaged() -> None:
    rows = [{"x": torch.randn(3), "labels": torch.tensor(float(index))} for index in range(8)]
    runs = [fit(autoaccum.Workload(model=SumForCTC, dataset=rows), steps=1, micro_batch=size)[0] for size in (8, 3)]
    whole, parts = (run.loss for run in runs)
    assert parts == pytest.approx(whole)


def test_a_wrong_weight_is_warned_of_and_changes_no_update_or_ends_the_training() -> None:
    torch.manual_seed(0)
    data, start, found = TensorDataset(*token_rows(32)), LanguageModel(dropout=0.1), set()
    for check, message in (("warn", r"return \(batch\[1\] != -100\)\.sum\(\)$"), ("off", "has ignored entries")):
        model = copy.deepcopy(start)
        with pytest.warns(WeightingWarning, match=message) as told:
            result, _ = fit_small(model, data, loss=token_loss, check=check)
        assert len(told) == 1
        found.add(digest(result))
    assert len(found) == 1
    with pytest.raises(WorkloadError, match="the weighting does not match the loss"):
        fit_small(model, data, loss=token_loss, check="strict")
