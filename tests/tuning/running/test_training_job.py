from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tuned_workloads import FEATURES, Asker, Counted, Greedy, Streamed, line_data, line_workload, order_of, sgd

from autoaccum import Workload
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.running.training_job import train_setting
from autoaccum.tuning.settings import Budget


def on(percent: int, loss: float) -> bool:
    return True


def results(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.state, outcome.loss, outcome.samples, outcome.updates


def test_a_training_goes_through_its_budget() -> None:
    asker = Asker()
    outcome = train_setting(line_workload(), order_of(), asker)
    assert (outcome.state, outcome.samples, outcome.updates) == ("complete", 64, 4)
    assert asker.percents == [25, 50]
    assert outcome.loss is not None
    assert outcome.loss < asker.told[1][1] < asker.told[0][1]
    assert outcome.seconds is not None
    assert outcome.seconds > 0
    assert (outcome.reason, outcome.shortages, outcome.warnings) == (None, 0, ())


def test_the_budget_may_be_several_epochs() -> None:
    outcome = train_setting(line_workload(dataset=line_data(20)), order_of(target=4), on)
    assert (outcome.samples, outcome.updates) == (66, 18)  # three epochs of 18 in 5 updates each, and 12 more


def test_a_training_is_ended_where_that_is_asked_for() -> None:
    outcome = train_setting(line_workload(), order_of(), lambda percent, loss: percent < 50)
    whole = train_setting(line_workload(), order_of(budget=Budget(32, "samples")), on)
    assert results(outcome) == ("pruned", *results(whole)[1:])


def test_seconds_end_a_training_too() -> None:
    asker = Asker()
    outcome = train_setting(line_workload(), order_of(budget=Budget(0.05, "seconds")), asker)
    assert outcome.state == "complete"
    assert outcome.seconds is not None
    assert outcome.seconds >= 0.05
    assert asker.percents == [25, 50][: len(asker.percents)]  # One update may pass them all.


def test_weights_and_order_are_those_of_the_seed() -> None:
    began, seen = list[Tensor](), list[Any]()

    def model() -> nn.Module:
        made = nn.Linear(FEATURES, 1)
        began.append(made.weight.detach().clone())
        return made

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            seen.append(batch[0].clone())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    workload = line_workload(model=model, criterion=None, loss=loss)
    runs = list[Any]()
    for seed in (3, 3, 4):
        torch.manual_seed(len(runs))  # what is left of a training before
        runs.append(results(train_setting(workload, order_of(seed=seed), on)))
    assert torch.equal(began[0], began[1])
    assert not torch.equal(began[0], began[2])
    first, again, other = torch.cat(seen).chunk(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert runs[0] == runs[1] != runs[2]


def test_micro_batches_do_not_change_what_is_trained() -> None:
    losses = [train_setting(line_workload(), order_of(micro=micro), on).loss for micro in (16, 5, 1)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_what_a_workload_keeps_in_its_module_would_change_the_next_training_in_this_process() -> None:
    """The reason for processes: see test_child_runner."""
    count = itertools.count()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * (1 + next(count))

    workload = line_workload(criterion=None, loss=loss)
    assert (
        train_setting(workload, order_of(rate=1e-3), on).loss != train_setting(workload, order_of(rate=1e-3), on).loss
    )


def test_divergence_is_told() -> None:
    outcome = train_setting(line_workload(), order_of(rate=1e30, budget=Budget(800, "samples")), on)
    assert (outcome.state, outcome.loss, outcome.updates) == ("diverged", None, 1)
    assert outcome.reason is not None
    assert outcome.reason.startswith("update 2: ")


def test_divergence_on_held_out_data_is_told() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.mse_loss(model(batch[0]), batch[1])
        return found if model.training else found * float("nan")

    outcome = train_setting(line_workload(criterion=None, loss=loss), order_of(), on)
    assert (outcome.state, outcome.updates) == ("diverged", 1)
    assert outcome.reason == "the loss on held-out data is nan after update 1"


def test_shortages_are_survived_and_counted() -> None:
    outcome = train_setting(line_workload(model=lambda: Greedy(3)), order_of(), on)
    assert outcome.state == "complete"
    assert outcome.shortages > 0
    calm = train_setting(line_workload(model=lambda: Greedy(99)), order_of(), on)
    assert outcome.loss == pytest.approx(calm.loss, rel=1e-5)


def test_a_true_lack_of_memory_is_no_failure() -> None:
    outcome = train_setting(line_workload(model=Greedy), order_of(), on)
    assert (outcome.state, outcome.loss) == ("out_of_memory", None)
    assert outcome.reason is not None
    assert "not even one sample at a time fits" in outcome.reason


def test_the_users_exception_comes_with_their_frames() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("the target is missing")

    outcome = train_setting(line_workload(criterion=None, loss=loss), order_of(), on)
    assert outcome.state == "failed"
    assert outcome.reason == "training raised ValueError: the target is missing"
    assert outcome.user_traceback is not None
    assert "in loss" in outcome.user_traceback
    assert "fitting.py" not in outcome.user_traceback


def test_the_users_exit_is_a_failure_of_theirs() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise SystemExit(3)

    outcome = train_setting(line_workload(criterion=None, loss=loss), order_of(), on)
    assert (outcome.state, outcome.reason) == ("failed", "training called sys.exit(3)")


def test_an_evaluation_that_fails_is_a_failure() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            raise ValueError("labels are missing")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    outcome = train_setting(line_workload(criterion=None, loss=loss), order_of(), on)
    assert (outcome.state, outcome.updates) == ("failed", 1)
    assert outcome.reason is not None
    assert outcome.reason.startswith("the evaluation after update 1 failed: ValueError: labels are missing, at ")


def test_a_lack_of_memory_in_an_evaluation_is_no_failure() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            torch.empty(2**48)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    outcome = train_setting(line_workload(criterion=None, loss=loss), order_of(), on)
    assert (outcome.state, outcome.updates) == ("out_of_memory", 1)


def test_data_that_can_be_read_only_once_is_a_failure() -> None:
    data = iter(line_data(16))
    workload = line_workload(dataset=data, evaluation_dataset=line_data(8))
    outcome = train_setting(workload, order_of(), on)
    assert outcome.state == "failed"
    assert outcome.reason is not None


def test_what_the_asker_raises_is_no_failure_of_the_training() -> None:
    def lost(percent: int, loss: float) -> bool:
        raise RuntimeError("the storage is gone")

    with pytest.raises(RuntimeError, match="the storage is gone"):
        train_setting(line_workload(), order_of(), lost)


def test_the_workloads_own_evaluation_is_not_used() -> None:
    def evaluate(model: nn.Module, batch: Any) -> float:
        raise AssertionError

    plain = train_setting(line_workload(), order_of(), on)
    assert results(train_setting(line_workload(evaluate=evaluate), order_of(), on)) == results(plain)


def test_the_schedule_begins_at_the_rate_that_is_tried() -> None:
    rates = list[float]()

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    workload = line_workload(
        optimizer=lambda params: Noted(params, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    train_setting(workload, order_of(rate=0.2), on)
    assert rates == pytest.approx([0.2, 0.1, 0.05, 0.025])


class Tied(nn.Module):
    """A frozen first layer, and two that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.second(self.first(self.frozen(inputs)))))


def several(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    found = model(batch["x"]) - batch["y"]
    return {"squared": found.square().mean(), "absolute": 0.1 * found.abs().mean()}


def streamed() -> Workload:
    return line_workload(dataset=Streamed(), evaluation_dataset=Streamed(8))


def listed() -> Workload:
    return line_workload(dataset=[line_data()[index] for index in range(40)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: line_workload(model=Tied),
        lambda: line_workload(criterion=None, loss=several, dataset=Counted(40)),
        lambda: line_workload(precision="bf16"),
        lambda: line_workload(model=lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))),
        lambda: line_workload(optimizer=lambda params: torch.optim.Adam(params, lr=torch.tensor(0.05), foreach=False)),
        streamed,
        listed,
    ],
    ids=["tied-and-frozen", "dict-and-losses", "bf16", "batchnorm", "tensor-rate", "stream", "list"],
)
def test_all_kinds_of_workloads_are_trained(make: Any) -> None:
    torch.manual_seed(1)
    first, again = (train_setting(make(), order_of(), on) for _ in range(2))
    assert first.state == "complete", first.reason
    assert results(first) == results(again)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    rates = list[tuple[float, ...]]()

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = sgd([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}])
        made.register_step_pre_hook(lambda one, *_: rates.append(tuple(group["lr"] for group in one.param_groups)))
        return made

    train_setting(line_workload(optimizer=optimizer), order_of(rate=0.2), on)
    assert set(rates) == {(0.2, 0.4)}
