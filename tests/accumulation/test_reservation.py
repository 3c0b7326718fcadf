from __future__ import annotations

import pytest
import torch
from torch import nn

from autoaccum.accumulation.recovery import find_shortage
from autoaccum.accumulation.update import TemporariesRecorder, reserve

CPU = torch.device("cpu")
COUNT = 1024


def test_records_what_is_born_and_dies_together() -> None:
    x = torch.ones(COUNT)
    with TemporariesRecorder() as recorder:
        first = x + 1
        second = first * 2
        del first
        third = second.double()
        view = third[:4]
        view.add_(1)
        del second, third, view
        kept = x * 3
    assert recorder.largest_set() == [(CPU, 4 * COUNT), (CPU, 8 * COUNT)]
    assert kept.shape == x.shape


def test_what_stays_is_no_temporary() -> None:
    x = torch.ones(COUNT)
    with TemporariesRecorder() as recorder:
        kept = x + 1
        x.mul_(2)
    assert recorder.largest_set() == []
    assert kept.shape == x.shape


@pytest.mark.parametrize(("foreach", "expected"), [(True, 6), (False, 3)])
def test_the_temporaries_of_an_optimizer(foreach: bool, expected: int) -> None:
    parameters = [nn.Parameter(torch.ones(COUNT)) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters, foreach=foreach)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(COUNT)
        with TemporariesRecorder() as recorder:
            optimizer.step()
        large = [size for _, size in recorder.largest_set() if size >= 4 * COUNT]
        assert large == [4 * COUNT] * expected


def test_reserving_more_than_there_is_is_a_shortage() -> None:
    reserve([(CPU, 1024), (CPU, 0)])
    with pytest.raises(RuntimeError) as caught:
        reserve([(CPU, 1024), (CPU, 1 << 60)])
    assert find_shortage(caught.value) is not None
