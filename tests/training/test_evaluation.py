"""An evaluation does not affect training, runs with what fits, and when it is due."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from factories import CLASSES, FEATURES, Classifier, labelled_rows
from small_fit import Interrupted, interrupt_after, of_kind
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.sources.objective import resolve_objective
from autoaccum.training.evaluation import Evaluation
from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train

SAMPLES = 23
CRITERION = nn.CrossEntropyLoss()
ROWS = labelled_rows(SAMPLES)


def samples() -> tuple[Tensor, Tensor]:
    return ROWS[0], ROWS[1].clone()


def dataset(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(ROWS[0][:count], ROWS[1][:count])


def net() -> nn.Module:
    torch.manual_seed(1)
    return Classifier(norm=True, dropout=0.5).double()


def evaluation(data: Any = None, *, evaluate: Any = None, micro_batch: int = 5, **options: Any) -> Evaluation:
    objective = resolve_objective(options.pop("loss", CRITERION), **options.pop("objective", {}))
    data = dataset() if data is None else data
    return Evaluation(objective=objective, evaluate=evaluate, data=data, micro_batch=micro_batch, **options)


def values(evaluator: Evaluation, model: nn.Module) -> dict[str, float]:
    outcome = evaluator.run(model, 7)
    assert outcome.update == 7
    return dict(outcome.values)


def whole(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> float:
    at_rest = copy.deepcopy(model).eval()
    with torch.no_grad():
        return float(run(at_rest))


class Numbered:
    """Map-style, without torch's Dataset classes; as `Noisy` it draws from every generator as it is read."""

    is_noisy = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = random.random() + np.random.random() + float(torch.rand(())) if self.is_noisy else 0.0
        return ROWS[0][index] + drawn, ROWS[1][index]


class Noisy(Numbered):
    is_noisy = True


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


class Batches:
    """An iterable of batches of unequal size."""

    def __iter__(self) -> Iterator[Any]:
        sizes = [9, 1, 13]
        return zip(*(torch.split(tensor, sizes) for tensor in samples()), strict=True)


class Narrow(nn.Module):
    """Requests an impossible amount of memory for more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, list[int]()
        self.inner = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            torch.empty(1 << 50)
        return torch.as_tensor(self.inner(x))


# --- training does not notice ---------------------------------------------------------------------------------------


def draw_from_everything(model: nn.Module, batch: Any) -> float:
    model.train()
    return random.random() + np.random.random() + float(torch.rand(())) + len(batch)


def trained(evaluate_every: int | None, evaluator: Evaluation, loader: DataLoader[Any] | None = None) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=100)
    for update in range(6):
        batch = samples() if loader is None else next(iter(loader))
        accumulator.step(batch)
        if evaluate_every is not None and update % evaluate_every == 0:
            evaluator.run(model, update)
    return list(model.state_dict().values())


@pytest.mark.parametrize("evaluate", [None, draw_from_everything], ids=["loss", "own"])
def test_the_number_of_evaluations_changes_no_weight(evaluate: Any) -> None:
    results = []
    for every in (None, 1, 3):
        loader = DataLoader(cast("Any", Noisy()), batch_size=SAMPLES, shuffle=True)
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        results.append(trained(every, evaluation(loader, evaluate=evaluate), loader))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Restless(nn.Module):
    """Has state that a user's `evaluate` may leave changed."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm = nn.Linear(FEATURES, CLASSES).double(), nn.BatchNorm1d(CLASSES).double()
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

    evaluator = evaluation(evaluate=with_dropout)
    with nullcontext() if ends_by is None else pytest.raises(type(ends_by)):
        evaluator.run(model, 0)
    assert {name: buffers[name] is buffer for name, buffer in model.named_buffers()} == dict.fromkeys(buffers, True)
    assert all(torch.equal(buffer, values[name]) for name, buffer in buffers.items())
    assert model.inner.weight.requires_grad
    assert not model.inner.bias.requires_grad


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dataset, Batches])
def test_out_of_memory_makes_the_rest_and_later_evaluations_smaller(make: Callable[[], Any]) -> None:
    """Also where the data has larger batches."""
    model, evaluator = Narrow(6), evaluation(make(), micro_batch=16)
    x, y = samples()
    expected = {"loss": pytest.approx(whole(model.inner, lambda m: CRITERION(m(x), y)), rel=1e-12)}
    assert values(evaluator, model) == expected
    assert 6 < model.seen[0] <= 16
    assert 3 <= evaluator.micro_batch <= 6
    model.seen.clear()
    assert values(evaluator, model) == expected
    assert max(model.seen) <= 6
    assert sum(model.seen) == SAMPLES


def test_not_even_one_sample_is_a_failure() -> None:
    with pytest.raises(DoesNotFitError, match="not even one sample at a time fits in an evaluation: out of memory"):
        evaluation().run(Narrow(0), 7)


@pytest.mark.parametrize("data", [iter([1]), (x for x in [1]), 5], ids=["iterator", "generator", "number"])
def test_data_that_cannot_be_read_again_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"the evaluation data is an? \w+, which cannot be read rep"):
        evaluation(data)


def test_data_that_is_empty_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the evaluation data has no samples: give some, or no evaluation data"):
        evaluation(dataset(0)).run(net(), 7)


# --- at chosen numbers of samples, at most once after an update ------------------------------------------------------

DATA = TensorDataset(torch.ones(20, 3), torch.ones(20, 2))


def run(due: Callable[[int], bool], **options: Any) -> list[Any]:
    """Return the samples after each update, and `evaluated` after each evaluation."""
    events: list[Any] = []
    settings: dict[str, Any] = {"eval_data": DATA, "loss": nn.MSELoss(), "steps": 6, "target_batch": 8}
    settings |= {"data": DATA, "micro_batch": 8} | options
    train(FitRequest(model_or_workload=nn.Linear(3, 2), eval_due=due, **settings), on_event=events.append)
    return [
        event.samples if isinstance(event, Updated) else "evaluated" for event in of_kind((Updated, Evaluated), events)
    ]


def test_it_is_called_after_every_update_and_replaces_evaluations_after_epochs() -> None:
    calls: list[int] = []

    def due(samples: int) -> bool:
        calls.append(samples)
        return samples in (16, 28)

    assert run(due) == [8, 16, "evaluated", 20, 28, "evaluated", 36, 40, "evaluated"]
    assert sorted(set(calls)) == [8, 16, 20, 28, 36, 40]


def test_a_resumed_run_runs_the_evaluation_it_missed(tmp_path: Path) -> None:
    def due(samples: int) -> bool:
        return samples == 16

    with pytest.raises(Interrupted):
        run(due, callbacks=[interrupt_after(2)], run_dir=tmp_path)
    assert run(due, run_dir=tmp_path, steps=3) == ["evaluated", 20, "evaluated"]
    assert run(due, run_dir=tmp_path, steps=3) == []


def test_it_contradicts_a_number_of_updates_and_needs_data() -> None:
    with pytest.raises(UsageError, match="eval_every is 2, and eval_due is given too: give one of them"):
        run(lambda samples: True, eval_every=2)
    with pytest.raises(UsageError, match="eval_due is given, but no evaluation data"):
        run(lambda samples: True, eval_data=None)


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [dataset, Numbered, Stream, Batches, lambda: list(Batches()), lambda: DataLoader(dataset(), batch_size=7)],
    ids=["tensors", "map-style", "iterable", "batches", "list", "loader"],
)
def test_the_loss_is_that_of_all_samples_at_once(make: Callable[[], Any]) -> None:
    model, evaluator = net(), evaluation(make())
    x, y = samples()
    expected = whole(model, lambda m: CRITERION(m(x), y))
    for _ in range(2):  # from the start each time
        outcome = evaluator.run(model, 0)
        assert isinstance(outcome, Evaluated)
        assert outcome.samples == SAMPLES
        assert outcome.values == {"loss": pytest.approx(expected, rel=1e-12)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_are_weighted_by_their_divisors_and_sums_are_added(reduction: str) -> None:
    x, y = samples()
    y[::3] = -100
    y[:5] = -100  # a part in which nothing counts: its own mean is 0/0
    model, criterion = net(), nn.CrossEntropyLoss(reduction=reduction)
    expected = pytest.approx(whole(model, lambda m: criterion(m(x), y)), rel=1e-12)
    assert values(evaluation(TensorDataset(x, y), loss=criterion), model) == {"loss": expected}


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x, y = batch
    out = model(x)
    return {"class": functional.cross_entropy(out, y, ignore_index=0), "size": out.square().mean()}


def term_of(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda model: two_terms(model, samples())[name]


def test_each_term_has_its_own_divisor() -> None:
    def weight(batch: Any) -> dict[str, float]:
        return {"class": float((batch[1] != 0).sum()), "size": float(batch[0].shape[0])}

    model = net()
    at_once = {name: whole(model, term_of(name)) for name in ("class", "size")}
    given = values(evaluation(loss=two_terms, objective={"weight": weight}), model)
    assert given == {name: pytest.approx(value, rel=1e-12) for name, value in at_once.items()} | {
        "loss": pytest.approx(sum(at_once.values()), rel=1e-12)
    }


def test_a_term_without_weight_is_nan() -> None:
    x, y = samples()
    assert math.isnan(values(evaluation(TensorDataset(x, torch.full_like(y, -100))), net())["loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_runs_in_the_precision_of_training(precision: str) -> None:
    seen: list[torch.dtype] = []

    def evaluate(model: nn.Module, batch: Any) -> float:
        seen.append(model(batch[0]).dtype)
        return 0.0

    data = TensorDataset(samples()[0].float(), samples()[1])
    evaluator = evaluation(data, evaluate=evaluate, precision=precision, micro_batch=50)
    assert isinstance(evaluator.run(net().float(), 0), Evaluated)
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float32]


# --- the workload's own evaluate ------------------------------------------------------------------------------------


def test_a_number_is_averaged_over_samples() -> None:
    def accuracy(model: nn.Module, batch: Any) -> Tensor:
        return torch.eq(model(batch[0]).argmax(1), batch[1]).double().mean()

    model = net()
    expected = pytest.approx(whole(model, lambda m: accuracy(m, samples())))
    assert values(evaluation(evaluate=accuracy), model) == {"accuracy": expected}


def test_named_numbers_are_averaged_and_a_result_without_numbers_is_refused() -> None:
    def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
        size = len(batch[0])
        return {"a": size, "b": np.float32(size), "c": torch.tensor(size), "d": True, "out": model(batch[0])}

    mean = pytest.approx((4 * 5 * 5 + 3 * 3) / SAMPLES)
    assert values(evaluation(evaluate=evaluate), net()) == {"a": mean, "b": mean, "c": mean, "d": 1.0}
    with pytest.raises(WorkloadError, match="returned a Tensor, which is not a number: return a number, or a dict"):
        evaluation(evaluate=lambda model, batch: model(batch[0])).run(net(), 7)
