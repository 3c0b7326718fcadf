"""A training resumes exactly from its captured state, or names what differs and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import through_file
from state_digests import state_digest
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from autoaccum.accumulation.out_of_memory import shrink
from autoaccum.errors import UsageError
from autoaccum.sources.objective import resolve_objective
from autoaccum.training.run_folder import portable
from autoaccum.training.training_setup import TrainingComponents
from autoaccum.training.training_state import Ceiling, TrainingState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.tied = nn.Linear(8, 4)
        self.tied.weight = self.last.weight
        self.hidden: Tensor
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden += 1
        h = self.norm(self.first(x)).relu()
        both: Tensor = self.last(h) + self.tied(h)
        return both


def groups(net: nn.Module) -> list[dict[str, Any]]:
    parameters = list(net.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 0.03}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01),
    "fused": lambda net: AdamW(net.parameters(), lr=0.01, fused=True),
    "tensor_rate": lambda net: AdamW(net.parameters(), lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda net: SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "groups": lambda net: AdamW(groups(net), lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda update: 0.9**update),
    "one_cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.9)], [4]
    ),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


class Training:
    """Everything that is trained, built from one seed."""

    def __init__(self, optimizer: str = "adamw", scheduler: str | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net: Any = Net()
        self.criterion: Any = nn.CrossEntropyLoss(weight=torch.ones(4))
        self.optimizer = OPTIMIZERS[optimizer](self.net)
        self.scheduler = None if scheduler is None else SCHEDULERS[scheduler](self.optimizer)
        self.scaler = GradScaler("cpu", growth_interval=2)

    def components(self) -> TrainingComponents:
        return components(self.net, self.criterion, self.optimizer, self.scheduler, self.scaler)

    def train(self, first: int, last: int) -> None:
        for update in range(first, last):
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(update))
            loss = self.criterion(self.net(inputs), torch.arange(6) % 4)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()

    def digest(self) -> str:
        torch.manual_seed(0)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # Which changes the order of a group's settings.
        return state_digest(self.net, self.optimizer, self.scaler, criterion=self.criterion)


def components(
    model: nn.Module, criterion: Any, optimizer: Optimizer, scheduler: Any = None, scaler: Any = None
) -> TrainingComponents:
    return TrainingComponents(
        model=model,
        objective=resolve_objective(criterion=criterion),
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
    )


def transfer(whole: TrainingComponents, resumed: TrainingComponents, state: TrainingState | None = None) -> None:
    """Copy the state from one to the other, through a file that cannot run code."""
    captured = (state or TrainingState(whole, {})).capture()
    TrainingState(resumed, {}).restore(through_file(portable(captured)))


def assert_goes_on(optimizer: str, scheduler: str | None, update: int) -> None:
    whole, resumed = Training(optimizer, scheduler), Training(optimizer, scheduler, seed=1)
    state = TrainingState(whole.components(), {})
    whole.train(0, update)
    transfer(whole.components(), resumed.components(), state)
    if hasattr(whole.optimizer, "_opt_called"):
        resumed.optimizer._opt_called = True  # type: ignore[attr-defined]  # A scheduler's note for a warning.
    assert resumed.digest() == whole.digest()
    whole.train(update, update + 4)
    resumed.train(update, update + 4)
    assert resumed.digest() == whole.digest()
    assert resumed.net.tied.weight is resumed.net.last.weight


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes(optimizer: str) -> None:
    assert_goes_on(optimizer, None, 0)
    assert_goes_on(optimizer, None, 3)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_every_scheduler_resumes(scheduler: str) -> None:
    for update in (0, 1, 5):
        assert_goes_on("groups", scheduler, update)


def test_wrappers_of_a_model_do_not_matter() -> None:
    whole, resumed, parts = Training(), Training(seed=1), Training(seed=2)
    whole.train(0, 2)
    bare = whole.net
    whole.net = nn.DataParallel(bare)
    transfer(whole.components(), resumed.components())
    parts.net = torch.compile(parts.net, backend="eager")
    transfer(whole.components(), parts.components())
    whole.net, parts.net = bare, parts.net._orig_mod
    assert whole.digest() == resumed.digest() == parts.digest()


def test_modes_and_frozen_parameters_are_restored() -> None:
    whole, resumed = Training(), Training(seed=1)
    whole.train(0, 2)
    whole.net.norm.eval()
    whole.net.first.weight.requires_grad_(False)
    resumed.net.last.bias.requires_grad_(False)
    transfer(whole.components(), resumed.components())
    assert resumed.digest() == whole.digest()


class Wide(Optimizer):
    """Has state wider than its parameters, and a string."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "master": parameter.detach().double() / 3,
                    "count": torch.tensor(3),
                    "by": "thirds",
                }


def test_optimizer_state_has_the_same_dtype_and_shape() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer, other = Wide(model.parameters()), Wide(model.parameters())
    optimizer.step()
    transfer(components(model, nn.MSELoss(), optimizer), components(model, nn.MSELoss(), other))
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            own = other.state[parameter][key]
            assert own == value if isinstance(value, str) else (torch.equal(own, value) and own.dtype == value.dtype)


MISMATCHES: dict[str, tuple[Callable[[Training], Any], str]] = {
    "shape": (
        lambda it: setattr(it.net.first, "weight", nn.Parameter(torch.zeros(3, 4))),
        "model.first.weight was float32 (8, 4), is float32 (3, 4)",
    ),
    "dtype": (
        lambda it: it.net.double(),
        "model.first.weight was float32 (8, 4), is float64 (8, 4); model.first.bias was float32",
    ),
    "a module more": (
        lambda it: it.net.add_module("extra", nn.Linear(1, 1)),
        "model.extra.weight was missing, is float32 (1, 1)",
    ),
    "a module less": (
        lambda it: setattr(it.net, "norm", nn.Identity()),
        "model.norm.weight was float32 (8,), is missing; model.norm.bias was",
    ),
    "groups": (
        lambda it: it.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        "optimizer_only0 was missing",
    ),
    "order": (
        lambda it: setattr(it, "optimizer", AdamW(reversed(list(it.net.parameters())))),
        "the optimizer's parameter groups differ",
    ),
    "rate": (lambda it: it.optimizer.param_groups[0].update(lr=0.5), "lr was 0.01, is 0.5"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_the_state_of_another_training_changes_nothing(case: str) -> None:
    change, said = MISMATCHES[case]
    whole, other = Training(), Training(seed=1)
    whole.train(0, 1)
    change(other)
    before = other.digest()
    with pytest.raises(UsageError, match="the checkpoint belongs to another training: .*: use the same") as caught:
        transfer(whole.components(), other.components())
    assert said in str(caught.value)
    assert other.digest() == before


def test_a_parameter_that_only_the_optimizer_holds_is_restored() -> None:
    weights, trainings = [torch.randn(2).requires_grad_() for _ in range(2)], list[TrainingComponents]()
    for weight in weights:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [weight]}]
        optimizer = AdamW(groups, lr=0.1)
        (model(torch.ones(1, 2)).sum() * weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        trainings.append(components(model, nn.MSELoss(), optimizer))
    transfer(trainings[0], trainings[1])
    assert torch.equal(*weights)
    torch.testing.assert_close(trainings[0].optimizer.state_dict(), trainings[1].optimizer.state_dict(), rtol=0, atol=0)


def retries_of(ceiling: Ceiling, limits: list[int]) -> list[int]:
    """Return the retries of updates in which at most a number of samples fits at once."""
    seen = []
    for limit in limits:
        size, batch, retries = ceiling.largest, 4 * ceiling.planned, 0
        while (largest := math.ceil(batch / math.ceil(batch / size))) > limit:  # of equal parts
            size, retries = shrink(largest, retries), retries + 1
        seen.append(retries)
        assert 1 <= ceiling.record(retries, size) <= ceiling.planned
    return seen


@given(st.integers(1, 2000), st.data())
def test_a_smaller_limit_that_stays_costs_few_retries(planned: int, data: st.DataObject) -> None:
    retries = retries_of(Ceiling(planned), [data.draw(st.integers(1, planned))] * 4000)
    assert sum(map(bool, retries)) <= 10
    assert max(retries) <= 4 + math.log2(planned)
