"""A training goes on from its captured state as if nothing had been between, or says what differs and leaves it be."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules

from autoaccum.accumulation.digest import state_digest
from autoaccum.errors import UsageError
from autoaccum.training.checkpoints.contents import portable
from autoaccum.training.checkpoints.state import capture_training, restore_training


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
        self.register_buffer("wide", torch.ones(1).expand(3))

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
    "foreach": lambda net: Adam(net.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda net: AdamW(net.parameters(), lr=0.01, fused=True),
    "tensor_rate": lambda net: AdamW(net.parameters(), lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda net: SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "plain": lambda net: SGD(net.parameters(), lr=0.01),
    "groups": lambda net: AdamW(groups(net), lr=0.01),
    "rmsprop": lambda net: RMSprop(net.parameters(), lr=0.01, centered=True),
    "adagrad": lambda net: Adagrad(net.parameters(), lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda update: 0.9**update),
    "one_cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=10),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "multi_step": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 5]),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.9)], [4]
    ),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
}


class Training:
    """All that is trained, built anew from one seed."""

    def __init__(self, optimizer: str = "adamw", scheduler: str | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net: Any = Net()
        self.criterion: Any = nn.CrossEntropyLoss(weight=torch.ones(4))
        self.optimizer = OPTIMIZERS[optimizer](self.net)
        self.scheduler = None if scheduler is None else SCHEDULERS[scheduler](self.optimizer)
        self.scaler = GradScaler("cpu", growth_interval=2)

    def parts(self) -> tuple[Any, ...]:
        companions = {} if self.criterion is None else {"criterion": self.criterion}
        return self.net, companions, self.optimizer, self.scheduler, self.scaler

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
        return state_digest(self.net, self.optimizer, self.scaler, criterion=self.criterion)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(portable(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def moved(whole: Training, resumed: Training) -> None:
    restore_training(through_a_file(capture_training(*whole.parts())), *resumed.parts())
    if hasattr(whole.optimizer, "_opt_called"):
        resumed.optimizer._opt_called = True  # type: ignore[attr-defined]  # A scheduler's note for a warning.


def assert_goes_on(optimizer: str, scheduler: str | None, update: int) -> None:
    whole, resumed = Training(optimizer, scheduler), Training(optimizer, scheduler, seed=1)
    whole.train(0, update)
    moved(whole, resumed)
    assert resumed.digest() == whole.digest()
    whole.train(update, update + 4)
    resumed.train(update, update + 4)
    assert resumed.digest() == whole.digest()
    assert resumed.net.tied.weight is resumed.net.last.weight


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(optimizer: str) -> None:
    assert_goes_on(optimizer, None, 0)
    assert_goes_on(optimizer, None, 3)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_every_scheduler_goes_on(scheduler: str) -> None:
    for update in (0, 1, 5):
        assert_goes_on("groups", scheduler, update)


def test_what_wraps_a_model_does_not_matter() -> None:
    whole, resumed, parts = Training(), Training(seed=1), Training(seed=2)
    whole.train(0, 2)
    bare = whole.net
    whole.net = nn.DataParallel(bare)
    state = through_a_file(capture_training(*whole.parts()))
    restore_training(state, *resumed.parts())
    parts.net = torch.compile(parts.net, backend="eager")
    restore_training(state, *parts.parts())
    whole.net, parts.net = bare, parts.net._orig_mod
    assert whole.digest() == resumed.digest() == parts.digest()


def test_a_module_that_is_compiled_alone_keeps_its_names() -> None:
    whole, resumed = Training(), Training(seed=1)
    resumed.net.first = torch.compile(resumed.net.first, backend="eager")
    moved(whole, resumed)
    assert torch.equal(resumed.net.first.weight, whole.net.first.weight)
    assert capture_training(*resumed.parts())["model"]["state"].keys() == whole.net.state_dict().keys()


def test_modes_and_what_is_frozen_are_put_back() -> None:
    whole, resumed = Training(), Training(seed=1)
    whole.net.norm.eval()
    whole.net.first.weight.requires_grad_(False)
    moved(whole, resumed)
    assert resumed.digest() == whole.digest()


class Caching(nn.Module):
    """Makes buffers as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.cache: Tensor
        self.late: Tensor | None
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("late", None)

    def run(self) -> None:
        self.cache = torch.arange(5.0)
        self.late = torch.ones(2)
        self.layer.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def get_extra_state(self) -> Any:
        return {"cache": len(self.cache)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_buffers_that_are_made_while_running_come_back() -> None:
    models = Caching(), Caching()
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    models[0].run()
    state = through_a_file(capture_training(models[0], {}, optimizers[0], None, None))
    restore_training(state, models[1], {}, optimizers[1], None, None)
    for name, buffer in models[0].named_buffers():
        assert torch.equal(models[1].get_buffer(name), buffer)
    assert models[1].state_dict().keys() == models[0].state_dict().keys()
    assert models[1].extra == {"cache": 5}


class Wide(Optimizer):
    """Keeps state that is wider than its parameters, in nests, and a word."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                master = {"master": parameter.detach().double() / 3, "by": "thirds"}
                self.state[parameter] = {"copies": [master], "count": torch.tensor(3), "name": "wide"}


def test_state_keeps_its_dtype_and_form() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer, other = Wide(model.parameters()), Wide(model.parameters())
    optimizer.step()
    state = through_a_file(capture_training(model, {}, optimizer, None, None))
    restore_training(state, model, {}, other, None, None)
    assert state_digest(model, other) == state_digest(model, optimizer)


def another_shape(training: Training) -> None:
    training.net.first.weight = nn.Parameter(torch.zeros(3, 4))


def another_dtype(training: Training) -> None:
    training.net.double()


def untied(training: Training) -> None:
    training.net.tied.weight = nn.Parameter(training.net.last.weight.detach().clone())


def another_module(training: Training) -> None:
    training.net.extra = nn.Linear(1, 1)


def without_module(training: Training) -> None:
    training.net.norm = nn.Identity()


def another_optimizer(training: Training) -> None:
    training.optimizer = SGD(training.net.parameters(), lr=0.1)


def more_groups(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def fewer_parameters(training: Training) -> None:
    training.optimizer = AdamW(list(training.net.parameters())[1:])


def another_order(training: Training) -> None:
    training.optimizer = AdamW(reversed(list(training.net.parameters())))


def another_scheduler(training: Training) -> None:
    training.scheduler = SCHEDULERS["sequential"](training.optimizer)


def no_criterion(training: Training) -> None:
    training.criterion = None


def no_scaler(training: Training) -> None:
    training.scaler = GradScaler("cpu", enabled=False)


MISMATCHES: dict[Callable[[Training], None], str] = {
    another_shape: "first.weight is float32 (8, 4) there, float32 (3, 4) here",
    another_dtype: "first.weight is float32 (8, 4) there, float64 (8, 4) here; first.bias is float32",
    untied: "tied.weight is tied to last.weight there, a tensor of its own here",
    another_module: "the model has extra.weight, extra.bias as well",
    without_module: "the model has no norm.weight, norm.bias, norm.running_mean and 2 more",
    another_optimizer: "the optimizer is AdamW there, SGD here",
    more_groups: "the optimizer has 1 parameter groups there, 2 here",
    fewer_parameters: "parameter group 0 has 7 parameters there, 6 here",
    another_order: "parameter group 0 has first.weight there where it has tied.bias here",
    another_scheduler: "the scheduler is none there, SequentialLR(LinearLR, ExponentialLR) here",
    no_criterion: "the criterion is in use there, none here",
    no_scaler: "the scaler is in use there, none here",
}


@pytest.mark.parametrize("change", MISMATCHES, ids=lambda change: change.__name__)
def test_a_state_of_another_training_changes_nothing(change: Callable[[Training], None]) -> None:
    whole, other = Training(), Training(seed=1)
    whole.train(0, 1)
    change(other)
    before = state_digest(other.net, other.optimizer, other.scaler, criterion=other.criterion)
    state = through_a_file(capture_training(*whole.parts()))
    with pytest.raises(UsageError, match="the checkpoint is of another training: ") as caught:
        restore_training(state, *other.parts())
    assert MISMATCHES[change] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert state_digest(other.net, other.optimizer, other.scaler, criterion=other.criterion) == before


class WithWeight:
    """A model, and a learnt weight of its loss that only the optimizer knows."""

    def __init__(self, shape: int = 2) -> None:
        self.model = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(shape))
        groups: list[dict[str, Any]] = [{"params": self.model.parameters()}, {"params": [self.weight]}]
        self.optimizer = SGD(groups, lr=0.1)

    def parts(self) -> tuple[Any, ...]:
        return self.model, {}, self.optimizer, None, None


def test_a_parameter_that_only_the_optimizer_knows_comes_back() -> None:
    whole, resumed = WithWeight(), WithWeight()
    weight = resumed.weight
    restore_training(through_a_file(capture_training(*whole.parts())), *resumed.parts())
    assert resumed.weight is weight
    assert torch.equal(weight, whole.weight)
    another = WithWeight(3)
    with pytest.raises(
        UsageError, match=r"parameter 1\.0 of the optimizer is float32 \(2,\) there, float32 \(3,\) here"
    ):
        restore_training(through_a_file(capture_training(*whole.parts())), *another.parts())


def test_what_only_one_of_them_leads_to_is_told() -> None:
    one, other, model = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    state = through_a_file(capture_training(model, {"teacher": one}, optimizer, None, None))
    assert restore_training(state, model, {"average": other}, optimizer, None, None) == [
        "nothing leads to teacher, which is in the checkpoint",
        "average begins as it is here: it is not in the checkpoint",
    ]


class Stubborn(schedules.ConstantLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("factor")


def test_a_scheduler_that_takes_nothing_back_is_named() -> None:
    training = Training()
    training.scheduler = Stubborn(training.optimizer)
    state = capture_training(*training.parts())
    with pytest.raises(UsageError, match=r"the scheduler cannot take its state back \('factor'\)"):
        restore_training(state, *training.parts())
