"""A whole training on a card: exact, resumed, with less memory in mid-run, with pinned workers, planned first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autoaccum.training.fit_events import FitResult, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train

WIDTH, SAMPLES, TARGET = 64, 480, 96


def build(place: torch.device, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(place, dtype)


def make_data(width: int = WIDTH, dtype: torch.dtype = torch.float64) -> TensorDataset:
    x = torch.randn(SAMPLES, width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.roll(1, 1))


def fit(model: nn.Module, data: Any, heard: Callable[[Any], Any] = id, **options: Any) -> FitResult:
    settings: dict[str, Any] = {"loss": nn.MSELoss(), "micro_batch": 20, "target_batch": TARGET, "steps": 30}
    settings |= {"device": str(next(model.parameters()).device)} | options
    return train(FitRequest.of(model, {"data": data, "callbacks": [heard], **settings}))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_thirty_updates_are_those_of_full_batches(place: torch.device) -> None:
    model, data = build(place), make_data()
    other = copy.deepcopy(model)
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    fit(model, loader, optimizer="AdamW")
    optimizer = torch.optim.AdamW(other.parameters())
    for update in range(30):
        start = update * TARGET % SAMPLES
        x, y = (tensor[start : start + TARGET].to(place) for tensor in data.tensors)
        optimizer.zero_grad()
        nn.functional.mse_loss(other(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for mine, theirs in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def test_a_stopped_run_goes_on_with_its_generators(place: torch.device, tmp_path: Path) -> None:
    def dropping() -> nn.Sequential:
        return nn.Sequential(build(place), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=place))

    def stop(event: Any) -> None:
        if isinstance(event, Updated) and event.update == 11:
            raise InterruptedError

    data = make_data()
    torch.manual_seed(0)
    whole = fit(dropping(), data, run_dir=tmp_path / "whole")
    with pytest.raises(InterruptedError):
        fit(dropping(), data, stop, run_dir=tmp_path / "parts")
    torch.manual_seed(5)
    resumed = fit(dropping(), data, run_dir=tmp_path / "parts")
    assert resumed.resumed_from is not None
    for mine, theirs in zip(weights(whole.model), weights(resumed.model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if place.type == "cpu" else 1e-9)


def test_fp16_trains_and_the_peak_is_the_allocator_s(place: torch.device) -> None:
    peaks: list[int | None] = []
    model = build(place, dtype=torch.float32)
    data = make_data(dtype=torch.float32)
    result = fit(
        model,
        data,
        lambda event: peaks.append(event.peak_bytes) if isinstance(event, Updated) else None,
        precision="fp16",
    )
    assert result.loss is not None
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(peak is not None and peak > 0 for peak in peaks)


@pytest.mark.gpu
def test_a_limit_lowered_in_mid_run_changes_no_result() -> None:
    place = torch.device("cuda", 0)
    width, heard = 2048, list[Any]()
    data = make_data(width)
    plain, limited = build(place, width), build(place, width)
    fit(plain, data, micro_batch=TARGET, steps=60)
    torch.cuda.empty_cache()

    def limit(event: Any) -> None:
        heard.append(event)
        if isinstance(event, Updated) and event.update in (3, 8):
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(place).total_memory
            held = torch.cuda.memory_reserved(place) / total
            torch.cuda.set_per_process_memory_fraction(held + 2**22 / total if event.update == 3 else 1.0, place)

    try:
        result = fit(limited, data, limit, micro_batch=TARGET, steps=60)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place)
    assert result.oom_retries == sum(event.retries for event in heard if isinstance(event, Updated)) > 0
    for mine, theirs in zip(weights(plain), weights(limited), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_it_plans_on_the_card_first_and_leaves_no_trace() -> None:
    place = torch.device("cuda", 0)
    data = make_data(1024)
    planned = fit(build(place, 1024), data, micro_batch=None, memory="512MiB", steps=6)
    assert planned.plan is not None
    assert planned.plan.kind == "measured"
    given = fit(build(place, 1024), data, micro_batch=planned.plan.micro_batch, steps=6)
    for mine, theirs in zip(weights(planned.model), weights(given.model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
