from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.cautions import BufferVersions, buffers_warning


def make(model: nn.Module, micro_batch: int) -> Accumulator:
    return Accumulator(
        model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).square().mean(), micro_batch=micro_batch
    )


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))


def test_spectral_norm_in_training_mode_is_named_once() -> None:
    accumulator = make(spectral(), 2)
    with pytest.warns(UserWarning, match=r"buffers 0\.parametrizations\.weight\.0\._u and .*the full batch's") as seen:
        accumulator.step(torch.randn(4, 4))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(torch.randn(4, 4))


def test_one_part_or_eval_mode_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(spectral(), 4).step(torch.randn(4, 4))
        make(spectral().eval(), 2).step(torch.randn(4, 4))


def test_instance_norm_and_a_table_that_is_replaced_do_not_count() -> None:
    class Growing(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))
            self.norm = nn.InstanceNorm1d(2, track_running_stats=True, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.zeros(2)
            return torch.as_tensor(self.norm(x))

    model = Growing()
    before = BufferVersions(model)
    model(torch.randn(2, 2, 3))
    assert before.written() == []


def test_many_names_are_cut_short() -> None:
    assert "a, b, c, d, e and 2 more, once per micro-batch" in buffers_warning(list("abcdefg"))
