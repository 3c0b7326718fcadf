"""Gradients of half-precision parameters, summed in float32 or in their own dtype: bytes, rounding, and who tells."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum import Accumulator, plan
from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.observers import AccumulationWarning
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.records import Plan
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.workload.spec import Workload

ROUNDED = "gradients are summed in bfloat16, as accumulate_in=.parameters. asks: .* only to that"


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64).to(dtype)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (size, 64)
    return torch.randn(shape, generator=draw).bfloat16(), torch.randn(shape, generator=draw).bfloat16()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1].float())


def gradient(accumulate_in: Any, parts: int = 256) -> Tensor:
    model = linear()
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad.double()))  # type: ignore[union-attr]
    Accumulator(model, optimizer, loss, micro_batch=1, accumulate_in=accumulate_in).step(batch_of(parts))
    return seen[0]


def test_sums_in_float32_are_closer_and_sums_in_bf16_are_told() -> None:
    model = linear().double()
    x, y = batch_of(256)
    torch.autograd.backward(nn.functional.mse_loss(model(x.double()), y.double()))
    true = next(model.parameters()).grad
    assert true is not None
    with pytest.warns(AccumulationWarning, match=ROUNDED):
        half = gradient("parameters")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = gradient("fp32")
        assert torch.equal(wide, gradient(None))
        gradient("parameters", parts=1)  # Nothing is summed.
    off = [float((found - true).norm() / true.norm()) for found in (wide, half)]
    assert off[0] < 0.005 < off[1] < 0.1


def test_it_is_told_once_and_not_of_wide_parameters() -> None:
    model = linear(torch.float32)
    x, y = (part.float() for part in batch_of(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd = torch.optim.SGD(model.parameters())
        Accumulator(model, sgd, loss, micro_batch=2, accumulate_in="parameters").step((x, y))
    model = linear()
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters()), loss, micro_batch=2, accumulate_in="parameters"
    )
    with pytest.warns(AccumulationWarning, match=ROUNDED):
        accumulator.step(batch_of(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(batch_of(4))


def test_sums_of_the_parameters_own_dtype_take_no_bytes_beside_gradients() -> None:
    for wide, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = linear()
        buffers = GradientBuffers(list(model.parameters()), wide=wide)
        with buffers:
            for _ in range(2):
                torch.autograd.backward(loss(model, batch_of(3)))
        assert {total.dtype for total in buffers.values()} == {dtype}
        buffers.settle()
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def big() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).bfloat16()


def rows(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1024).bfloat16(), torch.randn(size, 1024).bfloat16()


def predicted(accumulate_in: str | None) -> Plan:
    workload = Workload(model=big, batch=rows, loss=loss, optimizer="sgd")
    return plan(workload, target_batch=64, gpu="rtx4090", max_micro_batch=8, accumulate_in=accumulate_in)


def test_the_plan_counts_the_bytes_and_tells_of_them_and_the_step_keeps_to_it() -> None:
    wide, half = predicted(None), predicted("parameters")
    assert wide.peak_bytes is not None
    assert half.peak_bytes is not None
    saved = 8 * 1024 * 1024 * 2  # Two of the four bytes of each sum.
    assert wide.peak_bytes - half.peak_bytes == pytest.approx(saved, rel=0.3)
    assert [p.workload["accumulate_in"] for p in (wide, half)] == ["fp32", "parameters"]
    told = [text for text in half.warnings if "gradients are summed in bfloat16" in text]
    assert len(told) == 1
    assert not any("summed in" in text for text in wide.warnings)
    model, sgd = linear(), torch.optim.SGD
    for given, other in ((wide, "parameters"), (half, "fp32")):
        with pytest.raises(UsageError, match=r"the plan is for .*gradients summed in .*; here is .*gradients summed"):
            Accumulator(model, sgd(model.parameters()), loss, plan=given, accumulate_in=other)  # type: ignore[arg-type]
    assert "Add up in float32" in emit_wrapper(wide)
    assert "Add up in float32" not in emit_wrapper(half)
    assert Plan.from_json(half.to_json()).workload["accumulate_in"] == "parameters"


def test_other_words_are_refused() -> None:
    model = linear()
    with pytest.raises(UsageError, match=r'accumulate_in is .bf16.: take one of "fp32", "parameters"'):
        Accumulator(model, torch.optim.SGD(model.parameters()), loss, micro_batch=1, accumulate_in="bf16")  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=r"accumulate_in is .bf16."):
        Workload(model=linear, batch=batch_of, loss=loss, accumulate_in="bf16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"accumulate_in is .bf16."):
        plan("model.py", target_batch=2, accumulate_in="bf16")
