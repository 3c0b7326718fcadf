"""The modes of BatchNorm: their running statistics and gradients, the modules they reach, and no other effects."""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import suppress
from typing import Any, get_args

import pytest
import torch
from factories import CRITERION, labelled_rows, sgd
from state_digests import state_digest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.batchnorm import STATISTICS, batchnorm_names
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.errors import UsageError
from autoaccum.spec import BatchNormMode

TOLERANCE = 1e-10
FORGIVING = pytest.mark.filterwarnings("ignore::autoaccum.accumulation.step_result.AccumulationWarning")


def small(**settings: Any) -> nn.Sequential:
    """A model with a BatchNorm of the samples themselves, whose statistics do not depend on weights."""
    return nn.Sequential(nn.BatchNorm1d(6, **settings), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()


def trained(model: nn.Module, batch: tuple[Tensor, Tensor], mode: str, micro_batch: int = 3, **options: Any) -> None:
    """Make one update by SGD with a learning rate of 1, so that the parameters show the gradient."""
    options = {"loss": CRITERION, "micro_batch": micro_batch, "batchnorm": mode, **options}
    assert Accumulator(model, sgd(model), **options).step(batch).updated


def assert_same_statistics(one: Any, other: Any) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=TOLERANCE, atol=TOLERANCE)


def train_whole(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Make the same update in plain PyTorch from the whole batch."""
    optimizer = sgd(model)
    optimizer.zero_grad()
    torch.autograd.backward(CRITERION(model(batch[0]), batch[1]))
    optimizer.step()
    optimizer.zero_grad()


def updates_of(module: nn.Module) -> int:
    """Return the number of updates that a BatchNorm has counted."""
    return int(module.get_buffer("num_batches_tracked"))


def differing(one: nn.Module, other: nn.Module, tolerance: float = TOLERANCE) -> list[str]:
    """Return the names of differing entries in the states of two models."""
    theirs = other.state_dict()
    return [
        name
        for name, value in one.state_dict().items()
        if not torch.allclose(value.double(), theirs[name].double(), rtol=tolerance, atol=tolerance)
    ]


@FORGIVING
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.3}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("micro_batch", [2, 4, 5, 11])
def test_running_statistics_are_the_full_batch_s(settings: dict[str, Any], micro_batch: int) -> None:
    model = small(**settings)
    whole = copy.deepcopy(model)
    for _ in range(3):
        batch = labelled_rows(11 if micro_batch != 2 else 8)
        trained(model, batch, "running", micro_batch)
        train_whole(whole, batch)
        assert_same_statistics(model[0], whole[0])
    assert model[0].momentum == settings.get("momentum", 0.1)
    assert updates_of(model[2]) == 3


@FORGIVING
def test_the_gradient_of_running_is_that_of_micro() -> None:
    model, batch = small(), labelled_rows(11)
    micro = copy.deepcopy(model)
    trained(model, batch, "running")
    trained(micro, batch, "micro")
    assert set(differing(model, micro)) == {f"{index}.{name}" for index in (0, 2) for name in STATISTICS}


class Images(nn.Module):
    """A convolutional BatchNorm that is called twice in each forward, and one within a checkpointed block."""

    def __init__(self, *, checkpointed: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        self.shared = nn.BatchNorm2d(2)
        self.block = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Linear(3, 3)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x) + self.shared(input=2 * x + 1)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant) if self.checkpointed else self.block(x)
        return torch.as_tensor(self.head(x.mean((2, 3))))


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 5, 5).double() * 3 + 1, torch.randint(0, 3, (size,))


@FORGIVING
@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_of_a_shared_batchnorm_are_matched_in_order_and_a_checkpoint_counts_once(reentrant: bool) -> None:
    model, batch = Images(reentrant=reentrant).double(), images(7)
    whole = copy.deepcopy(model)
    whole.checkpointed = False
    trained(model, batch, "running")
    train_whole(whole, batch)
    assert_same_statistics(model.shared, whole.shared)
    block: Any = model.block
    assert updates_of(block[1]) == 1
    assert updates_of(model.shared) == 2


@FORGIVING
def test_running_statistics_under_autocast_stay_in_float32() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    batch = labelled_rows(11, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = model[0](batch[0]).double()
    trained(model, batch, "running", precision="bf16")
    mean, variance = (model[1].get_buffer(name) for name in ("running_mean", "running_var"))
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean.double(), 0.1 * seen.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double(), 0.9 + 0.1 * seen.var(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_gives_exactly_the_frozen_full_batch_s_gradient(checkpointed: bool) -> None:
    model, batch = Images(checkpointed=checkpointed).double(), images(7)
    for _ in range(2):
        model(images(9)[0])
    whole = copy.deepcopy(model)
    for module in whole.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    trained(model, batch, "frozen")
    train_whole(whole, batch)
    assert not differing(model, whole)
    assert all(module.training for module in model.modules())


def test_frozen_takes_a_part_of_one_sample_and_trains_weight_and_bias() -> None:
    model = small()
    model(labelled_rows(9)[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, labelled_rows(4), "frozen", micro_batch=1)
    after = model.state_dict()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert same == {name for name, _ in model.named_buffers()}


def test_modules_in_eval_mode_stay_in_it_in_every_mode() -> None:
    for mode in get_args(BatchNormMode):
        model = small().eval()
        model[1].train()
        model(labelled_rows(3)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if mode == "frozen" else "error", AccumulationWarning)
            trained(model, labelled_rows(8), mode)
        assert [module.training for module in model] == [False, True, False, False]
        assert updates_of(model[0]) == 0


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("micro", r'BatchNorm normalises by the micro-batch.* in 0 and 2: .*"exact" corrects that.*"running"'),
        ("running", r"in 0 and 2: only running statistics are exact, the gradient is not .*exact"),
        ("frozen", r"never estimated \(mean 0, variance 1\)"),
    ],
)
def test_each_mode_has_its_warning(mode: str, message: str) -> None:
    with pytest.warns(AccumulationWarning, match=message) as caught:
        trained(small(), labelled_rows(8), mode)
    assert [warning.filename for warning in caught] == [__file__]
    trained(nn.Linear(6, 4).double(), labelled_rows(8), mode)


def test_impossible_modes_are_refused() -> None:
    model = small(track_running_stats=False)
    with pytest.raises(UsageError, match=r'"frozen", and 0 have no running statistics') as refused:
        Accumulator(model, sgd(model), CRITERION, micro_batch=3, batchnorm="frozen")
    assert "GroupNorm" in (refused.value.hint or "")


def attributes_of(model: nn.Module) -> list[Any]:
    """Return attributes that a mode changes for a while, and that are in no digest."""
    return [
        (module.momentum, len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]


@FORGIVING
@pytest.mark.parametrize("mode", ["running", "frozen"])
def test_out_of_memory_at_any_allocation_leaves_no_trace(mode: str, out_of_memory_at: Any) -> None:
    torch.manual_seed(3)
    pristine, batch = Images(checkpointed=False).double(), images(5)
    whole = copy.deepcopy(pristine)
    trained(whole, batch, mode, micro_batch=1 if mode == "frozen" else 3)
    for number in itertools.count(0, 7):
        model = copy.deepcopy(pristine)
        optimizer = sgd(model)
        options: Any = {"micro_batch": 3, "recover": False, "batchnorm": mode}
        accumulator = Accumulator(model, optimizer, CRITERION, **options)
        before, attributes = state_digest(model, optimizer), attributes_of(model)
        with out_of_memory_at(number) as injected, suppress(torch.OutOfMemoryError):
            accumulator.step(batch)
        assert attributes_of(model) == attributes
        if not injected.fired:
            break
        assert state_digest(model, optimizer) == before
        accumulator.step(batch)
        assert not differing(model, whole)
    assert number > 60


@FORGIVING
def test_parts_without_weight_do_not_count() -> None:
    model, (x, targets) = small(), labelled_rows(6)
    targets[:3] = CRITERION.ignore_index
    whole = copy.deepcopy(model)
    trained(model, (x, targets), "running")
    train_whole(whole, (x[3:], targets[3:]))
    assert not differing(model, whole)


@FORGIVING
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # Of torch 2.12.
@pytest.mark.parametrize("fullgraph", [False, True])
def test_statistics_of_a_model_compiled_before_are_recorded(fullgraph: bool) -> None:
    model, batch = small(), labelled_rows(8)
    whole = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        compiled(batch[0])
        whole(batch[0])
        trained(compiled, batch, "running")
        whole(batch[0])
        assert_same_statistics(model[0], whole[0])


@pytest.mark.parametrize("mode", ["running", "frozen"])
def test_torchscript_is_refused_and_named_in_micro(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated.
        scripted = torch.jit.script(small())
    with pytest.raises(UsageError, match=f'"{mode}", and 0 and 2 are TorchScript\'s'):
        trained(scripted, labelled_rows(8), mode)
    with pytest.warns(AccumulationWarning, match="by the micro-batch.* in 0 and 2: "):
        trained(scripted, labelled_rows(8), "micro")


class NormalisedLoss(nn.Module):
    """A criterion with a BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.as_tensor((self.norm(outputs).square().mean(1) * targets).mean())


@pytest.mark.parametrize(
    ("mode", "updates", "message"),
    [
        ("micro", 3, r"by the micro-batch.* in criterion\.norm: "),
        ("running", 1, r"by the micro-batch in criterion\.norm: "),
        ("frozen", 0, "never estimated"),
    ],
)
def test_batchnorms_of_the_criterion_count_and_are_named(mode: str, updates: int, message: str) -> None:
    model, criterion, batch = nn.Linear(6, 6).double(), NormalisedLoss().double(), labelled_rows(8)
    whole = copy.deepcopy(criterion)
    whole(model(batch[0]), batch[1])
    with pytest.warns(AccumulationWarning, match=message):
        trained(model, batch, mode, loss=criterion)
    assert int(criterion.norm.get_buffer("num_batches_tracked")) == updates
    if mode == "running":
        assert_same_statistics(criterion.norm, whole.norm)
    assert criterion.norm.training


def test_batchnorms_that_normalise_by_the_batch_are_named() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(2),
            "b": nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)),
            "frozen": nn.BatchNorm2d(2).eval(),
            "never frozen": nn.BatchNorm2d(2, track_running_stats=False).eval(),
            "not coupled": nn.InstanceNorm2d(2, track_running_stats=True),
            "group": nn.GroupNorm(1, 2),
        }
    )
    assert batchnorm_names(model) == ["a", "b.0", "b.1", "b.2", "never frozen"]
    assert batchnorm_names(nn.BatchNorm1d(2)) == ["BatchNorm1d"]
    assert batchnorm_names(model.eval()) == ["never frozen"]
