"""What the modes of BatchNorm reach: compiled models, criteria, InstanceNorm, and what the user's code does between."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import CRITERION, batch_of, sgd
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.batchnorm import STATISTICS
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.observers import AccumulationWarning
from autoaccum.errors import UsageError

FORGIVING = pytest.mark.filterwarnings("ignore::autoaccum.accumulation.observers.AccumulationWarning")
Batch = tuple[Tensor, Tensor]


def small(**settings: Any) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(5, **settings), nn.Linear(5, 3)).double()


def step(model: nn.Module, batch: Batch, mode: str, loss: Any = CRITERION, micro_batch: int = 3) -> None:
    """One update; micro-batches of 3."""
    assert accumulator_of(model, mode, loss, micro_batch).step(batch).updated


def accumulator_of(model: nn.Module, mode: str, loss: Any = CRITERION, micro_batch: int = 3) -> Accumulator:
    return Accumulator(model, sgd(model), loss, micro_batch=micro_batch, batchnorm=mode)  # type: ignore[arg-type]


def assert_same_statistics(one: nn.Module, other: nn.Module) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-10)


@FORGIVING
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_was_compiled_before_is_watched_all_the_same(fullgraph: bool) -> None:
    model, batch = small(), batch_of(8)
    whole = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        compiled(batch[0])
        whole(batch[0])
        step(compiled, batch, "running")
        whole(batch[0])
        assert_same_statistics(model[0], whole[0])


class Selecting(nn.Module):
    """Normalises the rows of one sign only, of which a part may have none."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5, momentum=momentum), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] > 0
        x = x.masked_scatter(rows[:, None], self.norm(x[rows]))
        return torch.as_tensor(self.head(x + self.norm(x)))


@FORGIVING
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("selected", [range(3, 9), range(6), range(9, 12), range(0)], ids=str)
def test_a_call_without_rows_keeps_its_place_and_adds_nothing(selected: range, momentum: float | None) -> None:
    model, (x, targets) = Selecting(momentum).double(), batch_of(12)
    x[:, 0] = torch.tensor([1.0 if row in selected else -1.0 for row in range(12)])
    whole = copy.deepcopy(model)
    whole(x)
    parts_see = copy.deepcopy(model)
    step(model, (x, targets), "running")
    assert int(model.norm.get_buffer("num_batches_tracked")) == 2
    # The second call sees what the first has normalised by the part: its input is told by the parts.
    seen: list[Tensor] = []
    parts_see.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    for rows in torch.split(x, 3):
        parts_see(rows)
    reference = nn.BatchNorm1d(5, momentum=momentum).double()
    for first in (0, 1):
        reference(torch.cat(seen[first::2]))
    assert_same_statistics(model.norm, reference)
    if len(selected) == 0:
        assert_same_statistics(model.norm, whole.norm)


def with_momentum(model: Any, batch: Batch) -> Tensor:
    model[0].momentum = 0.0
    model(batch[0] + 5)
    model[0].momentum = 0.3
    return torch.as_tensor(CRITERION(model(batch[0]), batch[1]))


def with_untracked_call(model: Any, batch: Batch) -> Tensor:
    model[0].track_running_stats = False
    outputs = model(batch[0] + 5)
    model[0].track_running_stats = True
    return torch.as_tensor(CRITERION(model(batch[0]) + outputs, batch[1]))


def with_call_in_eval_mode(model: Any, batch: Batch) -> Tensor:
    model.eval()
    outputs = model(batch[0])
    model.train()
    return torch.as_tensor(CRITERION(model(batch[0]) + outputs, batch[1]))


LOSSES = [with_momentum, with_untracked_call, with_call_in_eval_mode]


@FORGIVING
@pytest.mark.parametrize("loss", LOSSES)
def test_settings_are_those_at_the_call(loss: Callable[[Any, Batch], Tensor]) -> None:
    model, batch = small(), batch_of(8)
    model(batch_of(9)[0])
    whole = copy.deepcopy(model)
    loss(whole, batch)
    step(model, batch, "running", loss)
    assert_same_statistics(model[0], whole[0])
    assert model[0].momentum == whole[0].momentum


@pytest.mark.parametrize("loss", LOSSES)
def test_frozen_stays_so_whatever_the_loss_sets(loss: Callable[[Any, Batch], Tensor]) -> None:
    model, batch = small(), batch_of(8)
    model(batch_of(9)[0])
    before = copy.deepcopy(model)
    step(model, batch, "frozen", loss)
    assert_same_statistics(model[0], before[0])
    assert model[0].training
    assert not model[0]._forward_pre_hooks


class Around(nn.Module):
    """Calls its BatchNorm so that no hook is told of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.head, self.way = nn.BatchNorm1d(5), nn.Linear(5, 3), way

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if self.way == "forward":
            return torch.as_tensor(self.head(norm.train().forward(x)))
        x = nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True)
        return torch.as_tensor(self.head(x))


@FORGIVING
@pytest.mark.parametrize("way", ["forward", "function"])
@pytest.mark.parametrize("mode", ["running", "frozen"])
def test_statistics_that_change_unseen_are_refused_before_the_update(mode: str, way: str) -> None:
    model, batch = Around(way).double(), batch_of(8)
    optimizer = sgd(model)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3, batchnorm=mode)  # type: ignore[arg-type]
    before = state_digest(model, optimizer)
    with pytest.raises(UsageError, match=f'batchnorm is "{mode}", and .*norm.* changed') as refused:
        accumulator.step(batch)
    assert 'batchnorm="micro"' in (refused.value.hint or "")
    assert state_digest(model, optimizer) == before


@pytest.mark.parametrize("mode", ["running", "frozen"])
def test_torchscript_is_refused_and_named_in_micro(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated.
        scripted = torch.jit.script(small())
    with pytest.raises(UsageError, match=f'"{mode}", and 0 are TorchScript\'s'):
        accumulator_of(scripted, mode)
    with pytest.warns(AccumulationWarning, match="by the micro-batch.* in 0: "):
        step(scripted, batch_of(8), "micro")


class NormalisedLoss(nn.Module):
    """A criterion with a BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.as_tensor((self.norm(outputs).square().mean(1) * targets).mean())


@pytest.mark.parametrize(
    ("mode", "updates", "said"),
    [
        ("micro", 3, r"by the micro-batch.* in criterion\.norm: "),
        ("running", 1, r"by the micro-batch in criterion\.norm: "),
        ("frozen", 0, "never estimated"),
    ],
)
def test_the_criterion_s_norms_are_reached_and_named(mode: str, updates: int, said: str) -> None:
    model, criterion, batch = nn.Linear(5, 5).double(), NormalisedLoss().double(), batch_of(8)
    whole = copy.deepcopy(criterion)
    whole(model(batch[0]), batch[1])
    with pytest.warns(AccumulationWarning, match=said):
        step(model, batch, mode, criterion)
    assert int(criterion.norm.get_buffer("num_batches_tracked")) == updates
    if mode == "running":
        assert_same_statistics(criterion.norm, whole.norm)
    assert criterion.norm.training


def test_frozen_needs_statistics_in_the_criterion_too() -> None:
    criterion = NormalisedLoss()
    criterion.norm = nn.BatchNorm1d(5, track_running_stats=False)
    with pytest.raises(UsageError, match=r"criterion\.norm keep no running statistics"):
        accumulator_of(nn.Linear(5, 5), "frozen", criterion)


def test_a_module_that_is_shared_with_the_criterion_counts_once() -> None:
    model, batch = small(), batch_of(8)
    whole, criterion = copy.deepcopy(model), NormalisedLoss()
    criterion.register_module("norm", model[0])
    whole(batch[0])

    vars(criterion)["forward"] = lambda outputs, targets: CRITERION(outputs, targets)
    with pytest.warns(AccumulationWarning, match="by the micro-batch in 0: "):
        step(model, batch, "running", criterion)
    assert_same_statistics(model[0], whole[0])


def test_instancenorm_s_statistics_are_told_of_in_every_mode() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(14, 3)).double()
    batch = torch.randn(8, 2, 7).double(), torch.arange(8) % 3
    for mode in ("micro", "running", "frozen"):
        with pytest.warns(AccumulationWarning, match=r"InstanceNorm updates .* in 0: use it without"):
            step(model, batch, mode)
    model.eval()
    step(model, batch, "micro")


def test_weights_that_came_without_a_count_are_no_untrained_ones() -> None:
    model = small()
    model[0].get_buffer("running_mean").fill_(0.5)
    step(model, batch_of(8), "frozen")
    model[0].get_buffer("running_mean").zero_()
    with pytest.warns(AccumulationWarning, match="never estimated"):
        step(model, batch_of(8), "frozen")
