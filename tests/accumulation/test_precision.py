"""Forward in half precision: autocast, and the scaler of fp16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from factories import CRITERION, Classifier, assert_close, labelled_rows, sgd
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.gradients import choose_scaler, restore_scaler


def test_bf16_autocast_equals_the_full_batch_to_its_precision() -> None:
    model = Classifier()
    other = copy.deepcopy(model)
    batch = labelled_rows(8, torch.float32)
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3, precision="bf16")
    dtypes = []
    model.last.register_forward_hook(lambda *arguments: dtypes.append(arguments[-1].dtype))
    accumulator.step(batch)
    Accumulator(other, sgd(other), CRITERION, micro_batch=8).step(batch)
    assert set(dtypes) == {torch.bfloat16}
    assert_close(model, other, 1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_update_is_reported_and_steps_no_scheduler(fused: bool) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    accumulator = Accumulator(
        model, optimizer, CRITERION, micro_batch=3, precision="fp16", scaler=scaler, scheduler=scheduler, clip_norm=1.0
    )
    before = copy.deepcopy(model)
    skipped = 0
    while not accumulator.step(labelled_rows(8, torch.float32)).updated:
        skipped += 1
        assert scaler.get_scale() == 2.0 ** (40 - skipped)
        assert scheduler.last_epoch == 0
        assert_close(model, before, 0.0)
    assert skipped > 5
    assert scheduler.last_epoch == 1
    assert not torch.equal(model.first.weight, before.first.weight)


def test_fp16_makes_a_scaler_and_unscales_once() -> None:
    model = Classifier()
    other = copy.deepcopy(model)
    batch = labelled_rows(8, torch.float32)
    result = Accumulator(model, sgd(model), CRITERION, micro_batch=3, precision="fp16", clip_norm=0.1).step(batch)
    expected = Accumulator(other, sgd(other), CRITERION, micro_batch=3, clip_norm=0.1).step(batch)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    assert_close(model, other, 1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_users_autocast_around_the_whole_loop_does_not_train_on_stale_weights(precision: Any) -> None:
    torch.manual_seed(0)
    model = Classifier()
    twin = copy.deepcopy(model)
    batch = labelled_rows(6, torch.float32)
    mine = Accumulator(model, sgd(model), CRITERION, micro_batch=2, precision=precision)
    theirs = Accumulator(twin, sgd(twin), CRITERION, micro_batch=2, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [mine.step(batch).loss for _ in range(3)]
        inside = CRITERION(model(batch[0]), batch[1])
    assert losses == [theirs.step(batch).loss for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(inside, CRITERION(twin(batch[0]), batch[1]))


CPU = torch.device("cpu")


def used_scaler() -> tuple[GradScaler, torch.optim.Optimizer, nn.Linear]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return scaler, optimizer, model


def scaled_backward(scaler: GradScaler, model: nn.Linear) -> None:
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 2)).sum()))


def test_an_unscaled_optimizer_can_be_unscaled_again() -> None:
    scaler, optimizer, model = used_scaler()
    for _ in range(3):
        scaled_backward(scaler, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = scaler.state_dict()
    scaled_backward(scaler, model)
    scaler.unscale_(optimizer)
    restore_scaler(scaler, state)
    assert scaler.state_dict() == state
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_fp16_gets_a_scaler_and_nothing_else_does() -> None:
    parameters = [torch.ones(1)]
    assert choose_scaler("fp32", None, CPU, parameters) is None
    assert choose_scaler("bf16", None, CPU, parameters) is None
    assert isinstance(choose_scaler("fp16", None, CPU, parameters), GradScaler)
    given = GradScaler("cpu")
    assert choose_scaler("bf16", given, CPU, parameters) is given
    assert choose_scaler("fp16", GradScaler("cpu", enabled=False), CPU, parameters) is None
