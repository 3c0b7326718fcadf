"""An evaluation does not affect training, runs with what fits, and its failure does not end the run."""

import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_evaluations import (
    CLASSES,
    CRITERION,
    SAMPLES,
    Batches,
    Numbers,
    dataset,
    evaluation,
    net,
    reason,
    samples,
    values,
    whole,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import autoaccum
from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import UsageError
from autoaccum.training.evaluation import Evaluation, EvaluationData
from autoaccum.training.fit_events import Evaluated, EvaluationFailed


class Narrow(nn.Module):
    """Requests an impossible amount of memory for more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, list[int]()
        self.inner = nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            torch.empty(1 << 50)
        return torch.as_tensor(self.inner(x))


# --- training does not notice ---------------------------------------------------------------------------------------


def draw_from_everything(model: nn.Module, batch: Any) -> float:
    model.train()
    return random.random() + np.random.random() + float(torch.rand(())) + len(batch)


class Noisy(Dataset[Any]):
    """Draws from every generator as it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        x, y = samples()
        return x[index] + drawn, y[index]


def trained(evaluate_every: int | None, made: Evaluation, loader: DataLoader[Any] | None = None) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=100)
    for update in range(6):
        batch = samples() if loader is None else next(iter(loader))
        accumulator.step(batch)
        if evaluate_every is not None and update % evaluate_every == 0:
            made.run(model, update)
    return list(model.state_dict().values())


@pytest.mark.parametrize("evaluate", [None, draw_from_everything], ids=["loss", "own"])
def test_the_number_of_evaluations_changes_no_weight(evaluate: Any) -> None:
    results = []
    for every in (None, 1, 3):
        loader = DataLoader(Noisy(), batch_size=SAMPLES, shuffle=True)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        results.append(trained(every, evaluation(loader, evaluate=evaluate), loader))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_modes_and_gradient_recording_are_restored() -> None:
    model = net()
    model.train()
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).eval()
    modes = [module.training for module in model.modules()]

    def fails(model: nn.Module, batch: Any) -> float:
        assert not model.training
        assert not torch.is_grad_enabled()
        model.train()
        raise ValueError("mine")

    def interrupted(model: nn.Module, batch: Any) -> float:
        raise KeyboardInterrupt

    assert "mine" in reason(evaluation(evaluate=fails), model)
    values(evaluation(), model)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        evaluation(evaluate=interrupted).run(model, 0)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


class Restless(nn.Module):
    """Has state that a user's `evaluate` may leave changed."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm = nn.Linear(4, CLASSES).double(), nn.BatchNorm1d(CLASSES).double()
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.ones(len(self.table) + 1)
        return torch.as_tensor(self.norm(self.inner(x)))


@pytest.mark.parametrize("ends_by", [None, ValueError("mine"), KeyboardInterrupt()], ids=["done", "failed", "stopped"])
def test_buffers_and_requires_grad_are_restored(ends_by: BaseException | None) -> None:
    model = Restless()
    model.inner.bias.requires_grad_(False)
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}

    def with_dropout(model: Any, batch: Any) -> float:
        model.train().requires_grad_(True)
        model(batch[0])
        model.inner.weight.requires_grad_(False)
        if ends_by is not None:
            raise ends_by
        return 0.0

    made = evaluation(evaluate=with_dropout)
    if isinstance(ends_by, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            made.run(model, 0)
    else:
        assert isinstance(made.run(model, 0), EvaluationFailed if ends_by else Evaluated)
    assert {name: buffers[name] is buffer for name, buffer in model.named_buffers()} == dict.fromkeys(buffers, True)
    assert all(torch.equal(buffer, values[name]) for name, buffer in buffers.items())
    assert model.inner.weight.requires_grad
    assert not model.inner.bias.requires_grad


class Centred(nn.Module):
    """A criterion that tracks the mean of its inputs."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return functional.cross_entropy(outputs - self.centre, targets)


def test_the_state_of_a_criterion_is_restored() -> None:
    settings: dict[str, Any] = {"target_batch": 8, "micro_batch": 8, "steps": 4, "progress": False}
    evaluated: dict[str, Any] = {"eval_data": dataset(), "eval_every": 1}
    centres = []
    for more in ({}, evaluated):
        criterion = Centred()
        autoaccum.fit(net(), dataset(), criterion=criterion, **settings, **more)
        centres.append(criterion.centre)
    assert centres[0].any()
    assert torch.equal(centres[0], centres[1])


# --- memory ---------------------------------------------------------------------------------------------------------


def test_out_of_memory_makes_the_rest_and_later_evaluations_smaller() -> None:
    model, made = Narrow(6), evaluation(micro_batch=16)
    x, y = samples()
    expected = {"loss": pytest.approx(whole(model.inner, lambda m: CRITERION(m(x), y)), rel=1e-12)}
    assert values(made, model) == expected
    assert model.seen[0] == 16
    assert 3 <= made.micro_batch <= 6
    model.seen.clear()
    assert values(made, model) == expected
    assert max(model.seen) <= 6
    assert sum(model.seen) == SAMPLES


def test_a_larger_batch_of_the_data_is_cut() -> None:
    model, made = Narrow(4), evaluation(Batches(), micro_batch=4)
    values(made, model)
    assert sum(model.seen) == SAMPLES
    assert max(model.seen) <= 4


def test_not_even_one_sample_is_a_failure() -> None:
    failed = evaluation().run(Narrow(0), 7)
    assert failed == EvaluationFailed(7, "not even one sample at a time fits: out of memory", out_of_memory=True)


@pytest.mark.parametrize("data", [iter([1]), (x for x in [1]), 5], ids=["iterator", "generator", "number"])
def test_data_that_cannot_be_read_again_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"the evaluation data is an? \w+, which cannot be read rep"):
        EvaluationData(data)


class Placed(IterableDataset[Any]):
    """Stores its position."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_stream_that_stores_its_position_is_not_read_by_both() -> None:
    one = Placed()
    for trained_on, data in ((one, one), (DataLoader(one), one), (one, DataLoader(one))):
        with pytest.raises(UsageError, match="the same Placed, which stores its position"):
            EvaluationData(data).check_not_shared(trained_on)
        EvaluationData(DataLoader(Placed())).check_not_shared(trained_on)
    EvaluationData(samples := TensorDataset(torch.ones(2))).check_not_shared(samples)


# --- failures -------------------------------------------------------------------------------------------------------


def test_an_error_of_the_users_is_a_reason_with_its_line() -> None:
    def evaluate(model: nn.Module, batch: Any) -> float:
        raise ZeroDivisionError("first\nsecond")

    failed = evaluation(evaluate=evaluate).run(net(), 7)
    assert isinstance(failed, EvaluationFailed)
    assert not failed.out_of_memory
    reason_given = failed.reason
    assert reason_given.startswith("ZeroDivisionError: first, at test_evaluation.py:")
    assert reason_given.endswith('(`raise ZeroDivisionError("first\\nsecond")`)')


def test_data_that_fails_or_is_empty_is_a_reason() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise OSError("no such picture")

    assert reason(evaluation(Broken()), net()).startswith("OSError: no such picture, at test_evaluation.py")
    assert (
        reason(evaluation(dataset(0)), net()) == "the evaluation data has no samples: give some, or no evaluation data"
    )


def test_a_failure_keeps_nothing_alive() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, CLASSES, dtype=torch.float64))
            self.made: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight
            self.made.append(weakref.ref(out))
            raise ValueError("after the output")

    model = Watched()
    reason(evaluation(), model)
    assert [made() for made in model.made] == [None]
