from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tuned_workloads import FEATURES, Greedy, Streamed, line_data, line_workload

from autoaccum.accumulation.recovery import find_shortage
from autoaccum.errors import WorkloadError
from autoaccum.tuning.running.throughput_job import ThroughputJob


class Sized(nn.Module):
    """Notes what it is given, and its weights."""

    def __init__(self, seen: list[int], weights: set[float]) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        self._seen, self._weights = seen, weights

    def forward(self, inputs: Tensor) -> Tensor:
        self._seen.append(len(inputs))
        self._weights.add(float(self.line.weight.detach().sum()))
        return torch.as_tensor(self.line(inputs))


def test_sizes_take_turns_and_nothing_is_trained() -> None:
    seen, weights, warmed = list[int](), set[float](), list[int]()
    workload = line_workload(model=lambda: Sized(seen, weights), batch=lambda size: line_data(size)[:])
    timed = dict(ThroughputJob(workload, "cpu", 12).run([4, 6, 12], warmed.append)["sizes"])
    assert warmed == [12, 6, 4]
    assert list(timed) == [12, 6, 4]
    assert all(len(seconds) >= 5 and min(seconds) > 0 for seconds in timed.values())
    warm_up = [12] * 3 + [6, 6] * 2 + [4, 4, 4] * 2
    assert seen[: len(warm_up)] == warm_up
    assert seen[len(warm_up) :][:6] == [12, 6, 6, 4, 4, 4]
    assert len(weights) == 1


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_rate_of_any_kind_is_held_at_0(rate: Any) -> None:
    weights = set[float]()
    workload = line_workload(
        model=lambda: Sized([], weights), optimizer=lambda params: torch.optim.SGD(params, lr=rate, foreach=False)
    )
    ThroughputJob(workload, "cpu", 12).run([12], lambda size: None)
    assert len(weights) == 1


@pytest.mark.parametrize("data", [line_data(), Streamed()], ids=["by-index", "stream"])
def test_batches_are_made_of_the_dataset_where_there_is_none(data: Any) -> None:
    seen = list[int]()
    workload = line_workload(model=lambda: Sized(seen, set()), dataset=data)
    ThroughputJob(workload, "cpu", 7).run([7], lambda size: None)
    assert set(seen) == {7}


def test_a_lack_of_memory_is_that_of_the_size_that_ran() -> None:
    job = ThroughputJob(line_workload(model=lambda: Greedy(6)), "cpu", 12)
    with pytest.raises(RuntimeError) as caught:
        job.run([6, 12], lambda size: None)
    assert find_shortage(caught.value) is not None
    assert job.micro_batch == 12


def test_a_workload_that_fails_is_told() -> None:
    with pytest.raises(WorkloadError, match=r"batch\(12\) returned 80 samples"):
        ThroughputJob(line_workload(batch=lambda size: line_data()[:]), "cpu", 12)
