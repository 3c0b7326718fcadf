from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import autoaccum
from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.evaluation.evaluation import Evaluation
from autoaccum.training.evaluation.evaluation_data import EvaluationData
from autoaccum.training.events import Evaluated, EvaluationFailed
from autoaccum.workload.weights import resolve_objective

SAMPLES, CLASSES = 23, 3
CRITERION = nn.CrossEntropyLoss()


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def dataset(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(*samples(count))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


class Narrow(nn.Module):
    """Asks the real allocator for what no machine has when it is given more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, list[int]()
        self.inner = nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            torch.empty(1 << 50)
        return torch.as_tensor(self.inner(x))


def evaluation(data: Any = None, *, evaluate: Any = None, micro_batch: int = 5, **options: Any) -> Evaluation:
    objective = resolve_objective(options.pop("loss", CRITERION), **options.pop("objective", {}))
    opened = EvaluationData(dataset() if data is None else data, collate=options.pop("collate", None))
    return Evaluation(objective, evaluate, "fp32", opened, micro_batch=micro_batch, **options)


def values(made: Evaluation, model: nn.Module) -> dict[str, float]:
    outcome = made.run(model, 7)
    assert isinstance(outcome, Evaluated), outcome
    assert outcome.update == 7
    return dict(outcome.values)


def reason(made: Evaluation, model: nn.Module) -> str:
    outcome = made.run(model, 7)
    assert isinstance(outcome, EvaluationFailed), outcome
    return outcome.reason


def whole(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> float:
    at_rest = copy.deepcopy(model).eval()
    with torch.no_grad():
        return float(run(at_rest))


# --- what it gives --------------------------------------------------------------------------------------------------


class Numbers(Dataset[Any]):
    """Map-style, without a class of torch's own collation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples()
        return x[index], y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


class Batches:
    """An iterable of batches of unequal size."""

    def __iter__(self) -> Iterator[Any]:
        sizes = [9, 1, 13]
        return zip(*(torch.split(tensor, sizes) for tensor in samples()), strict=True)


@pytest.mark.parametrize(
    "make",
    [dataset, Numbers, Stream, Batches, lambda: list(Batches()), lambda: DataLoader(dataset(), batch_size=7)],
    ids=["tensors", "map-style", "iterable", "batches", "list", "loader"],
)
def test_the_loss_is_that_of_all_samples_at_once(make: Callable[[], Any]) -> None:
    model, made = net(), evaluation(make())
    x, y = samples()
    expected = whole(model, lambda m: CRITERION(m(x), y))
    for _ in range(2):  # from the start each time
        outcome = made.run(model, 0)
        assert isinstance(outcome, Evaluated)
        assert outcome.samples == SAMPLES
        assert outcome.values == {"loss": pytest.approx(expected, rel=1e-12)}


def test_means_count_by_what_they_divide_by() -> None:
    x, y = samples()
    y[::3] = -100
    y[:5] = -100  # a part in which nothing counts: its own mean is 0/0
    model = net()
    assert values(evaluation(TensorDataset(x, y)), model) == {
        "loss": pytest.approx(whole(model, lambda m: CRITERION(m(x), y)), rel=1e-12)
    }


def test_sums_are_added() -> None:
    model, criterion = net(), nn.CrossEntropyLoss(reduction="sum")
    x, y = samples()
    assert values(evaluation(loss=criterion), model) == {
        "loss": pytest.approx(whole(model, lambda m: criterion(m(x), y)), rel=1e-12)
    }


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x, y = batch
    out = model(x)
    return {"class": functional.cross_entropy(out, y, ignore_index=0), "size": out.square().mean()}


def term_of(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda model: two_terms(model, samples())[name]


def test_terms_have_divisors_of_their_own() -> None:
    def weight(batch: Any) -> dict[str, float]:
        return {"class": float((batch[1] != 0).sum()), "size": float(batch[0].shape[0])}

    model = net()
    at_once = {name: whole(model, term_of(name)) for name in ("class", "size")}
    given = values(evaluation(loss=two_terms, objective={"weight": weight}), model)
    assert given == {name: pytest.approx(value, rel=1e-12) for name, value in at_once.items()} | {
        "loss": pytest.approx(sum(at_once.values()), rel=1e-12)
    }


def test_what_nothing_has_weight_in_is_not_a_number() -> None:
    x, y = samples()
    assert math.isnan(values(evaluation(TensorDataset(x, torch.full_like(y, -100))), net())["loss"])


def test_what_is_not_finite_is_told_as_it_is() -> None:
    x, y = samples()
    x[3] = math.inf
    assert math.isnan(values(evaluation(TensorDataset(x, y)), net())["loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_runs_in_the_precision_of_training(precision: str) -> None:
    seen: list[torch.dtype] = []

    def evaluate(model: nn.Module, batch: Any) -> float:
        seen.append(model(batch[0]).dtype)
        return 0.0

    data = EvaluationData(TensorDataset(samples()[0].float(), samples()[1]))
    made = Evaluation(resolve_objective(CRITERION), evaluate, precision, data, micro_batch=50)
    assert isinstance(made.run(net().float(), 0), Evaluated)
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float32]


# --- the workload's own evaluate ------------------------------------------------------------------------------------


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return torch.eq(model(x).argmax(1), y).double().mean()


def test_a_number_is_averaged_over_samples() -> None:
    model = net()
    x, y = samples()
    assert values(evaluation(evaluate=accuracy), model) == {
        "accuracy": pytest.approx(whole(model, lambda m: accuracy(m, (x, y))))
    }


def test_numbers_by_name_are_averaged_and_the_rest_is_noted_once() -> None:
    notes: list[str] = []

    def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
        size = len(batch[0])
        return {"a": size, "b": np.float32(size), "c": torch.tensor(size), "d": True, "out": model(batch[0])}

    made = evaluation(evaluate=evaluate, note=notes.append)
    mean = (4 * 5 * 5 + 3 * 3) / SAMPLES
    for _ in range(2):
        approx = pytest.approx(mean)
        assert values(made, net()) == {"a": approx, "b": approx, "c": approx, "d": 1.0}
    assert notes == ["evaluate(model, batch) returned 'out' (a Tensor), which is no number, and it is not averaged"]


def test_an_evaluate_that_returns_nothing_is_noted() -> None:
    notes: list[str] = []
    assert values(evaluation(evaluate=lambda model, batch: None, note=notes.append), net()) == {}
    assert len(notes) == 1
    assert "returned None, which is no number" in notes[0]


def test_what_a_listener_raises_is_no_failure_of_the_evaluation() -> None:
    def refuse(text: str) -> None:
        raise LookupError(text)

    model = net()
    with pytest.raises(LookupError, match="returned None"):
        evaluation(evaluate=lambda model, batch: None, note=refuse).run(model, 0)
    assert model.training


# --- training does not notice ---------------------------------------------------------------------------------------


def draw_from_everything(model: nn.Module, batch: Any) -> float:
    model.train()
    return random.random() + np.random.random() + float(torch.rand(())) + len(batch)


class Noisy(Dataset[Any]):
    """Draws from every generator as it is read."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = random.random() + np.random.random() + float(torch.rand(())) + float(torch.rand((), generator=self.own))
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
def test_how_often_one_evaluates_changes_no_weight(evaluate: Any) -> None:
    noisy = Noisy()
    loader = DataLoader(noisy, batch_size=SAMPLES, shuffle=True, generator=torch.Generator().manual_seed(2))
    starts = [noisy.own.get_state(), loader.generator.get_state()]
    results = []
    for every in (None, 1, 3):
        noisy.own.set_state(starts[0])
        loader.generator.set_state(starts[1])
        random.seed(0), np.random.seed(0)
        results.append(trained(every, evaluation(loader, evaluate=evaluate), loader))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_it_gives_the_same_whatever_was_drawn_before() -> None:
    made, model = evaluation(Noisy(), evaluate=draw_from_everything), net()
    first = values(made, model)
    torch.rand(3), random.random()
    assert values(made, model) == first


def test_modes_and_gradient_recording_are_as_before() -> None:
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
    """Has what an `evaluate` of one's own may leave changed."""

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
def test_buffers_and_what_requires_grad_are_as_before(ends_by: BaseException | None) -> None:
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
    """A criterion that follows the mean of what it is given."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return functional.cross_entropy(outputs - self.centre, targets)


def test_what_a_criterion_keeps_is_as_before() -> None:
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
    assert reason(evaluation(), Narrow(0)) == "not even one sample at a time fits: out of memory"


# --- failures -------------------------------------------------------------------------------------------------------


def test_an_error_of_the_users_is_a_reason_with_its_line() -> None:
    def evaluate(model: nn.Module, batch: Any) -> float:
        raise ZeroDivisionError("first\nsecond")

    said = reason(evaluation(evaluate=evaluate), net())
    assert said.startswith("ZeroDivisionError: first, at test_evaluation.py:")
    assert said.endswith('(`raise ZeroDivisionError("first\\nsecond")`)')


def test_a_sys_exit_of_the_users_ends_the_evaluation_alone() -> None:
    def leave(model: nn.Module, batch: Any) -> float:
        raise SystemExit(3)

    assert "it called sys.exit(3)" in reason(evaluation(evaluate=leave), net())


def test_data_that_fails_or_is_empty_is_a_reason() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            raise OSError("no such picture")

    assert reason(evaluation(Broken()), net()).startswith("OSError: no such picture, at test_evaluation.py")
    assert reason(evaluation(dataset(0)), net()) == "there are no samples to evaluate on: give more data, or none"


class Ending(Numbers):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index > 10:
            raise StopIteration
        return super().__getitem__(index)


def ending_collate(items: Any) -> Any:
    raise StopIteration


class BySteps(IterableDataset[Any]):
    """Iterated by an object without a generator, whose end is its own frame."""

    def __iter__(self) -> Any:
        self.left = 9
        return BySteps.Steps(self)

    class Steps:
        def __init__(self, owner: Any) -> None:
            self.owner = owner

        def __next__(self) -> Any:
            if self.owner.left == 0:
                raise StopIteration("done")
            self.owner.left -= 1
            return tuple(part[self.owner.left] for part in samples())


@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (Ending(), None),
        (dataset(), ending_collate),
        (Stream(), ending_collate),
        (DataLoader(Ending(), batch_size=4), None),
        (DataLoader(Ending(), batch_size=4, num_workers=1), None),
        (DataLoader(Ending(), batch_size=None), None),
    ],
    ids=["map-style", "collate", "iterable's collate", "loader", "workers", "unbatched"],
)
def test_a_stop_iteration_within_the_data_is_not_its_end(data: Any, collate: Any) -> None:
    said = reason(evaluation(data, collate=collate, evaluate=lambda model, batch: 0.0), net())
    assert said.startswith("StopIteration was raised within the evaluation data")
    assert "at test_evaluation.py" in said or getattr(data, "num_workers", 0) == 1


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_iterator_of_ones_own_ends_as_any(batch_size: int | None) -> None:
    outcome = evaluation(DataLoader(BySteps(), batch_size=batch_size, drop_last=False), evaluate=lambda m, b: 1.0)
    done = outcome.run(net(), 1)
    assert isinstance(done, Evaluated)
    assert done.samples == 9 if batch_size else done.samples > 0


def test_a_stop_iteration_of_evaluate_is_a_failure() -> None:
    assert "StopIteration" in reason(evaluation(evaluate=lambda model, batch: next(iter(()))), net())


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


def test_what_can_be_left_is_only_the_passes() -> None:
    entered = []

    @contextmanager
    def interruptible() -> Iterator[None]:
        entered.append(True)
        yield
        raise SystemExit(143)

    model = net()
    with pytest.raises(SystemExit):
        evaluation(interruptible=interruptible).run(model, 0)
    assert entered == [True]
    assert model.training


@pytest.mark.parametrize("data", [iter([1]), (x for x in [1]), 5], ids=["iterator", "generator", "number"])
def test_what_cannot_be_read_from_the_start_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"the evaluation data is an? \w+.*: give a dataset, a DataLoader or"):
        EvaluationData(data)


@pytest.mark.parametrize("evaluate", [3, lambda model: 0.0], ids=["number", "one argument"])
def test_what_is_no_function_of_model_and_batch_is_refused_at_once(evaluate: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^evaluate.*: write def evaluate\(model, batch\)"):
        evaluation(evaluate=evaluate)


# --- beside training ------------------------------------------------------------------------------------------------


class Shuffled:
    """A batch sampler with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(20, generator=self.generator).view(-1, 4).tolist())


class Jittered(Dataset[Any]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples()
        return x[index] + self.generator.normal(), y[index]


def test_generators_that_lie_deep_in_the_data_are_put_back() -> None:
    sampler, jittered = Shuffled(), Jittered()
    data = DataLoader(Subset(jittered, range(20)), batch_sampler=sampler)
    states = sampler.generator.get_state(), copy.deepcopy(jittered.generator.bit_generator.state)
    seen: list[Any] = []

    def see(model: nn.Module, batch: Any) -> float:
        seen.append(batch[0])
        return 0.0

    made, model = evaluation(data, evaluate=see), net()
    values(made, model)
    assert torch.equal(sampler.generator.get_state(), states[0])
    assert jittered.generator.bit_generator.state == states[1]
    first, seen[:] = torch.cat(seen), []
    list(data)  # An epoch of training.
    values(made, model)
    assert torch.equal(torch.cat(seen), first)


class Placed(IterableDataset[Any]):
    """Goes on where it was, and can tell where that is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            self.place += 1
            yield tuple(part[self.place - 1] for part in samples())

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class OwnIterator(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    "share",
    [
        lambda one: (one, one),
        lambda one: (DataLoader(one), one),
        lambda one: (one, DataLoader(one)),
        lambda one: (DataLoader(one), DataLoader(one)),
    ],
    ids=["itself", "in a loader trained on", "in a loader evaluated", "in loaders"],
)
def test_what_keeps_one_place_for_both_is_refused(share: Any) -> None:
    for one in (Placed(), OwnIterator()):
        trained_on, data = share(one)
        with pytest.raises(UsageError, match=r"keeps its place in itself: give a second|read only once"):
            EvaluationData(data, trained_on=trained_on)
        EvaluationData(DataLoader(Placed()), trained_on=trained_on)


def test_a_training_says_what_it_trains_on() -> None:
    data = Placed()
    options: dict[str, Any] = {"target_batch": 4, "micro_batch": 4, "steps": 1, "progress": False}
    with pytest.raises(UsageError, match="evaluation and training read the same Placed"):
        autoaccum.fit(net(), DataLoader(data, batch_size=4), loss=CRITERION, eval_data=data, **options)


def test_a_loader_that_keeps_its_workers_is_read_apart_from_training() -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
    training = iter(loader)
    seen = [next(training)]
    data = EvaluationData(loader, trained_on=loader)
    assert sum(len(batch[0]) for batch in data.batches(4, 0)) == SAMPLES
    seen.extend(training)
    assert sum(len(batch[0]) for batch in seen) == SAMPLES


@pytest.mark.parametrize("make", [dataset, Stream, Batches, lambda: DataLoader(Stream(), batch_size=4)])
def test_what_starts_anew_each_time_is_shared_with_training(make: Any) -> None:
    shared = make()
    data = EvaluationData(shared, trained_on=shared)
    assert sum(len(batch[0]) for batch in data.batches(4, 0)) == SAMPLES
