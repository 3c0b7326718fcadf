"""Out of memory at any allocation: the state is as before, and the repeated update is the full batch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import UpdateInterrupted

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(size) % 2


BATCH = batch_of(8)


def full_batch_update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def assert_same_parameters(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    scale = max(float(parameter.detach().abs().max()) for parameter in other.parameters())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) <= tolerance * scale


def build(stateful: Any, optimizer: str, *, recover: bool, updates_before: int) -> tuple[Any, Any, Accumulator]:
    torch.manual_seed(3)
    model = stateful().double()
    made = OPTIMIZERS[optimizer](model.parameters())
    accumulator = Accumulator(
        model, made, criterion=nn.CrossEntropyLoss(), micro_batch=3, clip_norm=0.1, recover=recover
    )
    for _ in range(updates_before):
        accumulator.step(batch_of(7))
    return model, made, accumulator


@pytest.mark.parametrize(("optimizer", "stride"), [("adamw-foreach", 2), ("adamw-fused", 5)])
def test_out_of_memory_at_any_allocation_of_a_protected_step_is_undone(
    stateful: Any, out_of_memory_at: Any, optimizer: str, stride: int
) -> None:
    reference, made, _ = build(stateful, optimizer, recover=False, updates_before=0)
    full_batch_update(reference, made, BATCH)
    phases = set()
    for number in itertools.count(step=stride):
        model, made, accumulator = build(stateful, optimizer, recover=False, updates_before=0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before, buffer = state_digest(model, made), model.mean
        with out_of_memory_at(number) as injected:
            try:
                result = accumulator.step(BATCH)
            except torch.OutOfMemoryError:
                assert injected.fired
                phases.add(accumulator.phase)
        if not injected.fired:
            assert result.updated
            assert_same_parameters(model, reference)
            break
        assert state_digest(model, made) == before
        assert model.mean is buffer
    assert number > 60
    assert phases == {"batch", "forward", "backward", "clip", "update"}


@pytest.mark.parametrize(
    ("optimizer", "updates_before", "stride"), [("adamw-foreach", 0, 2), ("sgd-momentum", 1, 3), ("adamw-fused", 1, 5)]
)
@pytest.mark.filterwarnings("ignore:out of memory")
def test_the_repeated_update_is_the_full_batch_s(
    stateful: Any, out_of_memory_at: Any, optimizer: str, updates_before: int, stride: int
) -> None:
    reference, made, accumulator = build(stateful, optimizer, recover=False, updates_before=updates_before)
    full_batch_update(reference, made, BATCH)
    interrupted = 0
    for number in itertools.count(step=stride):
        model, made, accumulator = build(stateful, optimizer, recover=True, updates_before=updates_before)
        with out_of_memory_at(number) as injected:
            try:
                result = accumulator.step(BATCH)
            except UpdateInterrupted:
                interrupted += 1
                continue
        assert_same_parameters(model, reference)
        assert all(parameter.grad is None for parameter in model.parameters())
        if not injected.fired:
            assert (result.retries, result.micro_batches) == (0, (3, 3, 2))
            break
        assert (result.retries, result.micro_batches) == (1, (2, 2, 2, 2))
        assert accumulator.micro_batch == 2
        assert int(model.seen) == 8 + 7 * updates_before
    assert updates_before or not interrupted


def test_out_of_memory_in_an_unprotected_update_ends_training(stateful: Any, out_of_memory_at: Any) -> None:
    outcomes = []
    for number in itertools.count():
        model, made, accumulator = build(stateful, "adamw-foreach", recover=False, updates_before=1)
        before = state_digest(model, made)
        with out_of_memory_at(number, lambda it=accumulator: it.phase == "update") as injected:
            try:
                accumulator.step(BATCH)
            except torch.OutOfMemoryError:
                outcomes.append("undone")
                assert state_digest(model, made) == before
                assert accumulator.step(BATCH).updated
            except UpdateInterrupted:
                outcomes.append("interrupted")
                for _ in range(2):
                    with pytest.raises(UpdateInterrupted, match="load a checkpoint"):
                        accumulator.step(BATCH)
        if not injected.fired:
            break
    reserved = outcomes.index("interrupted")
    assert reserved > 0
    assert set(outcomes[:reserved]) == {"undone"}
    assert set(outcomes[reserved:]) == {"interrupted"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["with a scaler", "half precision"])
def test_out_of_memory_at_any_allocation_in_lower_precision_is_undone(
    stateful: Any, out_of_memory_at: Any, dtype: torch.dtype
) -> None:
    batch = batch_of(8, dtype)
    for number in itertools.count(step=3):
        torch.manual_seed(3)
        model = stateful().to(dtype)
        made = OPTIMIZERS["adamw-foreach"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if dtype == torch.float32 else None
        options: Any = {"precision": "fp32" if scaler is None else "fp16", "scaler": scaler, "clip_norm": 0.1}
        accumulator = Accumulator(model, made, criterion=nn.CrossEntropyLoss(), micro_batch=3, recover=False, **options)
        before = state_digest(model, made, scaler)
        with out_of_memory_at(number) as injected:
            try:
                accumulator.step(batch)
            except torch.OutOfMemoryError:
                assert injected.fired
        if not injected.fired:
            break
        assert state_digest(model, made, scaler) == before
        if number % 4 == 0:
            assert accumulator.step(batch).updated
    assert number > 60


def test_an_error_in_the_scheduler_undoes_the_protected_update(stateful: Any) -> None:
    torch.manual_seed(3)
    model = stateful().double()
    made = OPTIMIZERS["adamw-foreach"](model.parameters())

    def factor(epoch: int) -> float:
        if epoch == 1:
            raise ValueError("no such epoch")
        return 1.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(made, factor)
    accumulator = Accumulator(model, made, criterion=nn.CrossEntropyLoss(), micro_batch=3, scheduler=scheduler)
    before, epoch = state_digest(model, made), copy.copy(scheduler.last_epoch)
    with pytest.raises(ValueError, match="no such epoch"):
        accumulator.step(BATCH)
    assert state_digest(model, made) == before
    assert scheduler.last_epoch == epoch


def test_an_error_in_the_scheduler_after_an_unprotected_update_undoes_nothing(stateful: Any) -> None:
    model = stateful().double()
    made = OPTIMIZERS["adamw-foreach"](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda epoch: 1 / (2 - epoch))
    accumulator = Accumulator(model, made, criterion=nn.CrossEntropyLoss(), micro_batch=3, scheduler=scheduler)
    accumulator.step(BATCH)
    with pytest.raises(ZeroDivisionError):
        accumulator.step(BATCH)
    assert [float(state["step"]) for state in made.state.values()] == [2.0] * 4
    assert int(model.seen) == 16
