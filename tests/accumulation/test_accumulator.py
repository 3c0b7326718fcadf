from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.accumulator import Accumulator, StepResult
from autoaccum.accumulation.digest import state_digest
from autoaccum.accumulation.loaders import windows
from autoaccum.accumulation.reservation import TemporariesRecorder
from autoaccum.accumulation.scaling import HALF_DTYPES
from autoaccum.errors import UsageError

CRITERION = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.tanh(self.first(x))))


def net(dtype: torch.dtype = torch.float64) -> Net:
    return Net().to(dtype)


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5, dtype=dtype), torch.randint(0, 3, (size,))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def assert_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw-single": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.01 * i} for i, q in enumerate(p, 1)]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_a_loop_over_full_batches_does(optimizer: str) -> None:
    model = net()
    other = copy.deepcopy(model)
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](other.parameters())
    schedule, their_schedule = StepLR(mine, 2, 0.5), StepLR(theirs, 2, 0.5)
    accumulator = Accumulator(model, mine, CRITERION, micro_batch=3, clip_norm=0.1, scheduler=schedule)
    for size in (8, 8, 5, 8, 1):
        batch = batch_of(size)
        result = accumulator.step(batch)
        loss = CRITERION(other(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        theirs.step()
        their_schedule.step()
        theirs.zero_grad()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-10)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
        assert_close(model, other, 1e-8)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert schedule.get_last_lr() == their_schedule.get_last_lr()


def test_the_result_says_what_was_done() -> None:
    model = net()
    result = Accumulator(model, sgd(model), CRITERION, micro_batch=3).step(batch_of(8))
    assert isinstance(result, StepResult)
    assert result.micro_batches == (3, 3, 2)
    assert (result.samples, result.grad_norm, result.retries, result.updated) == (8, None, 0, True)
    assert result.terms == {"loss": result.loss}


def test_an_infinite_clip_norm_only_measures() -> None:
    model = net()
    other = copy.deepcopy(model)
    batch = batch_of(8)
    result = Accumulator(model, sgd(model), CRITERION, micro_batch=3, clip_norm=math.inf).step(batch)
    Accumulator(other, sgd(other), CRITERION, micro_batch=3).step(batch)
    assert result.grad_norm is not None
    assert result.grad_norm > 0
    assert_close(model, other, 0.0)


def test_gradients_from_before_are_dropped() -> None:
    model = net()
    other = copy.deepcopy(model)
    batch = batch_of(8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Accumulator(model, sgd(model), CRITERION, micro_batch=3).step(batch)
    Accumulator(other, sgd(other), CRITERION, micro_batch=3).step(batch)
    assert_close(model, other, 0.0)


def test_frozen_and_foreign_parameters() -> None:
    model = net()
    model.first.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD([model.last.weight], lr=1.0)
    Accumulator(model, optimizer, CRITERION, micro_batch=3).step(batch_of(8))
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)) == (name != "last.weight")


def test_runs_where_gradients_are_off() -> None:
    model = net()
    before = copy.deepcopy(model)
    with torch.no_grad():
        assert Accumulator(model, sgd(model), CRITERION, micro_batch=3).step(batch_of(8)).updated
    assert not torch.equal(model.first.weight, before.first.weight)


class Forbidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("forward must not run")


def test_nothing_is_updated_without_any_weight() -> None:
    model = Forbidden()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=2, scheduler=scheduler, clip_norm=1.0)
    batch = (torch.randn(4, 5), torch.full((4,), -100))
    before = state_digest(model, optimizer)
    result = accumulator.step(batch)
    assert (result.updated, result.samples, result.micro_batches) == (False, 4, (2, 2))
    assert math.isnan(result.loss)
    assert state_digest(model, optimizer) == before
    assert scheduler.get_last_lr() == [1.0]


def test_a_term_without_weight_is_left_out_and_reported_as_such() -> None:
    model = net()

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"a": CRITERION(model(batch[0]), batch[1]), "b": model(batch[0]).sum() * math.nan}

    accumulator = Accumulator(model, sgd(model), loss, micro_batch=3, weight=lambda b: {"a": len(b[0]), "b": 0})
    result = accumulator.step(batch_of(8))
    assert result.updated
    assert result.loss == result.terms["a"]
    assert math.isfinite(result.loss)
    assert math.isnan(result.terms["b"])
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_loss_that_diverged_is_reported_as_it_is() -> None:
    model = net()
    result = Accumulator(model, sgd(model), lambda m, b: m(b[0]).sum() * math.nan, micro_batch=3).step(batch_of(8))
    assert math.isnan(result.loss)
    assert result.updated


def test_bf16_autocast_equals_the_full_batch_to_its_precision() -> None:
    model = net(torch.float32)
    other = copy.deepcopy(model)
    batch = batch_of(8, torch.float32)
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3, precision="bf16")
    dtypes = []
    model.last.register_forward_hook(lambda *arguments: dtypes.append(arguments[-1].dtype))
    accumulator.step(batch)
    Accumulator(other, sgd(other), CRITERION, micro_batch=8).step(batch)
    assert set(dtypes) == {torch.bfloat16}
    assert_close(model, other, 1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_update_is_reported_and_steps_no_scheduler(fused: bool) -> None:
    model = net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    accumulator = Accumulator(
        model, optimizer, CRITERION, micro_batch=3, precision="fp16", scaler=scaler, scheduler=scheduler, clip_norm=1.0
    )
    before = copy.deepcopy(model)
    skipped = 0
    while not accumulator.step(batch_of(8, torch.float32)).updated:
        skipped += 1
        assert scaler.get_scale() == 2.0 ** (40 - skipped)
        assert scheduler.last_epoch == 0
        assert_close(model, before, 0.0)
    assert skipped > 5
    assert scheduler.last_epoch == 1
    assert not torch.equal(model.first.weight, before.first.weight)


def test_fp16_makes_a_scaler_and_unscales_once() -> None:
    model = net(torch.float32)
    other = copy.deepcopy(model)
    batch = batch_of(8, torch.float32)
    result = Accumulator(model, sgd(model), CRITERION, micro_batch=3, precision="fp16", clip_norm=0.1).step(batch)
    expected = Accumulator(other, sgd(other), CRITERION, micro_batch=3, clip_norm=0.1).step(batch)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    assert_close(model, other, 1e-2)


def gradient_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.double() for p in model.parameters() if p.grad is not None)
    )
    return seen


def relative_error(mine: list[Tensor], theirs: list[Tensor]) -> float:
    flat, wanted = (torch.cat([gradient.flatten().double() for gradient in side]) for side in (mine, theirs))
    return float((flat - wanted).norm() / wanted.norm())


def test_half_precision_gradients_are_summed_in_float32() -> None:
    count = 1024
    model = nn.Linear(16, 4).bfloat16()
    exact = copy.deepcopy(model).double()
    x, y = torch.randn(count, 16).bfloat16() + 1, torch.randn(count, 4).bfloat16()
    optimizer = sgd(model, 0.0)
    mine = gradient_of(model, optimizer)
    Accumulator(model, optimizer, nn.MSELoss(), micro_batch=1).step((x, y))
    torch.autograd.backward(nn.functional.mse_loss(exact(x.double()), y.double()))
    naive = copy.deepcopy(model)
    for row in range(count):
        torch.autograd.backward(nn.functional.mse_loss(naive(x[row : row + 1]), y[row : row + 1]) / count)
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    lost = [p.grad for p in naive.parameters() if p.grad is not None]
    assert relative_error(mine, wanted) < 4e-3 < 1e-2 < relative_error(lost, wanted)


def test_a_share_is_not_rounded_to_half_precision() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(model, optimizer, lambda m, b: m(b).mean(), micro_batch=1, clip_norm=math.inf)
    result = accumulator.step(torch.ones(49, 1, dtype=torch.bfloat16))
    assert result.grad_norm == pytest.approx(1.0, abs=1e-6)


class Tied(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.Linear(5, 5)
        self.twin = nn.Linear(5, 5)
        self.twin.weight = self.layer.weight
        self.out = nn.Linear(5, 3)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twin(torch.tanh(self.layer(x))))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.block(x)
            else:
                x = torch.as_tensor(checkpoint(self.block, x, use_reentrant=self.use_reentrant))
        return torch.as_tensor(self.out(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_tied_weights_and_checkpoints(dtype: torch.dtype, use_reentrant: bool | None) -> None:
    model = Tied(use_reentrant).to(dtype)
    exact = copy.deepcopy(model).double()
    exact.use_reentrant = None
    x, y = batch_of(8, dtype)
    x.requires_grad_(use_reentrant is True)  # the reentrant kind needs an input that requires a gradient
    optimizer = sgd(model, 0.0)
    mine = gradient_of(model, optimizer)
    Accumulator(model, optimizer, CRITERION, micro_batch=2).step((x, y))
    torch.autograd.backward(CRITERION(exact(x.detach().double()), y))
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    assert len(mine) == len(wanted)
    assert relative_error(mine, wanted) < (2e-2 if dtype in HALF_DTYPES else 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_hooks_are_left(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = sgd(model, 0.0)
    batch, bad = batch_of(8, dtype), (torch.randn(8, 5, dtype=dtype), torch.full((8,), 9))
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3)
    before = state_digest(model, optimizer)
    accumulator.step(batch)
    assert state_digest(model, optimizer) == before
    with pytest.raises(IndexError):
        accumulator.step(bad)
    assert state_digest(model, optimizer) == before


def test_half_precision_buffers_are_not_needed_for_one_part() -> None:
    model = nn.Linear(64, 64).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8)
    x = torch.randn(8, 64).bfloat16()
    accumulator.step((x, x))
    with TemporariesRecorder() as recorder:
        accumulator.step((x, x))
    assert max(size for _, size in recorder.largest_set()) < 4 * 64 * 64


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.tokens(tokens).flatten(1)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients() -> None:
    model = Bag().double()
    other = copy.deepcopy(model)
    tokens, y = torch.randint(0, 10, (8, 2)), torch.randint(0, 3, (8,))
    optimizer = sgd(model)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3, clip_norm=0.1)
    result = accumulator.step((tokens, y))
    torch.autograd.backward(CRITERION(other(tokens), y))
    weight = other.tokens.weight
    assert weight.grad is not None
    weight.grad = weight.grad.to_dense()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    sgd(other).step()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
    assert_close(model, other)


def test_a_loader_in_windows() -> None:
    model = net()
    other = copy.deepcopy(model)
    dataset = torch.utils.data.TensorDataset(*batch_of(22))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=4)
    results = [accumulator.step_parts(window) for window in windows(loader, 3)]
    assert [result.micro_batches for result in results] == [(4, 4, 4), (4, 4, 2)]
    full = Accumulator(other, sgd(other), CRITERION, micro_batch=12)
    for start in (0, 12):
        full.step(dataset[start : start + 12])
    assert_close(model, other)


def test_each_graph_is_freed_by_its_own_backward() -> None:
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())])
    optimizer = sgd(model)
    x = torch.randn(256, 16)

    def peak(micro_batch: int) -> int:
        accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=micro_batch)
        accumulator.step((x, x))
        with TemporariesRecorder() as recorder:
            accumulator.step((x, x))
        return sum(size for _, size in recorder.largest_set())

    assert peak(16) < 0.25 * peak(256)


def test_the_guard_s_copies_are_freed_with_the_first_update() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=2)
    x = torch.randn(4, 256)
    with TemporariesRecorder() as recorder:
        accumulator.step((x, x))
        kept = sum(recorder._blocks[index][1] for index in {i for i, _ in recorder._events} if alive(recorder, index))
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values())
    assert kept <= state


def alive(recorder: TemporariesRecorder, index: int) -> bool:
    return (index, False) not in recorder._events


def counting_model() -> Iterator[nn.Module]:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.as_tensor(self.layer(x))

    yield Counting().double()


def test_state_kept_in_python_is_named_once() -> None:
    model = next(counting_model())
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3)
    with pytest.warns(UserWarning, match=r"Python attributes \(calls\)") as caught:
        accumulator.step(batch_of(8))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(batch_of(8))


def test_batchnorm_is_named_once_and_only_where_it_matters() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=4)
    accumulator.step(batch_of(4))
    with pytest.warns(UserWarning, match="BatchNorm normalises by the micro-batch.* in 1: ") as caught:
        accumulator.step(batch_of(8))
    assert caught[0].filename == __file__
    accumulator.step(batch_of(8))
    model.eval()
    Accumulator(model, sgd(model), CRITERION, micro_batch=4).step(batch_of(8))


def test_the_guard_returns_when_a_parameter_joins() -> None:
    model = net()
    model.first.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=4)
    accumulator.step(batch_of(8))
    model.first.weight.requires_grad_(True)

    def fail(*_: Any) -> None:
        raise ValueError("not now")

    before = state_digest(model, optimizer)
    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="not now"):
        accumulator.step(batch_of(8))
    handle.remove()
    torch.manual_seed(0)
    assert len(optimizer.state) == 3
    assert accumulator.step(batch_of(8)).updated
    assert before != state_digest(model, optimizer)


def test_the_ceiling_can_be_set_and_is_checked() -> None:
    from autoaccum.errors import UsageError

    model = net()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3)
    accumulator.micro_batch = 4
    assert accumulator.step(batch_of(8)).micro_batches == (4, 4)
    with pytest.raises(UsageError, match="micro_batch is 0"):
        accumulator.micro_batch = 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_users_autocast_around_the_whole_loop_does_not_train_on_stale_weights(precision: Any) -> None:
    torch.manual_seed(0)
    model = net(torch.float32)
    twin = copy.deepcopy(model)
    batch = batch_of(6, torch.float32)
    mine = Accumulator(model, sgd(model), CRITERION, micro_batch=2, precision=precision)
    theirs = Accumulator(twin, sgd(twin), CRITERION, micro_batch=2, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [mine.step(batch).loss for _ in range(3)]
        inside = CRITERION(model(batch[0]), batch[1])
    assert losses == [theirs.step(batch).loss for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(inside, CRITERION(twin(batch[0]), batch[1]))


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    model = net()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=2)
    with torch.inference_mode(), pytest.raises(UsageError, match=r"within torch\.inference_mode\(\)"):
        accumulator.step(batch_of(4))
    with torch.no_grad():
        assert accumulator.step(batch_of(4)).updated


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32])
def test_frozen_parameters_that_cannot_be_added_up_are_no_trouble(dtype: torch.dtype) -> None:
    model = net()
    model.table = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert Accumulator(model, optimizer, CRITERION, micro_batch=2).step(batch_of(4)).updated
