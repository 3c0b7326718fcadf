"""What is asked of a workload before its trials, in real processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from autoaccum.errors import DoesNotFitError, WorkloadError
from autoaccum.tuning.events import SpeedMeasured
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.describing import describe
from autoaccum.tuning.running.measuring import measure_throughput
from autoaccum.tuning.settings import BatchSpan
from autoaccum.workload.loading import load_workload

GREEDY = """
import torch
from torch import nn
print("loaded")
dataset = torch.utils.data.TensorDataset(torch.randn(80, 3), torch.randn(80, 1))
criterion = nn.MSELoss()

class Greedy(nn.Linear):
    def forward(self, inputs):
        if len(inputs) > {most}:
            torch.empty(2**48)
        return super().forward(inputs)

def model():
    return Greedy(3, 1)
"""

Write = Callable[[str], str]


def request_of(path: str, **asked: Any) -> TuneRequest:
    return TuneRequest(reference=path, target_batch=BatchSpan(8, 16), device="cpu", **asked)


@pytest.fixture(scope="module")
def facts(write_workload: Write) -> Facts:
    lines = list[str]()
    request = request_of(write_workload(GREEDY.format(most=8)), optimizer="sgd", precision="bf16")
    found = describe(request, on_output=lines.append)
    assert lines == ["loaded"]
    return found


def test_a_workload_is_described_as_it_is_asked_for(facts: Facts) -> None:
    assert (facts.name, facts.model, facts.optimizer, facts.precision) == ("model", "Greedy", "SGD", "bf16")
    assert (facts.learning_rate, facts.training_samples, facts.device) == (0.001, 72, "cpu")
    assert len(facts.digest) == 64


def test_what_cannot_be_loaded_is_told_with_the_users_frames(write_workload: Write) -> None:
    with pytest.raises(WorkloadError, match="ZeroDivisionError") as caught:
        describe(request_of(write_workload("model = 1 / 0")), on_output=lambda line: None)
    assert caught.value.user_traceback is not None
    assert "1 / 0" in caught.value.user_traceback


def test_a_size_that_runs_out_of_memory_is_left_out_and_the_others_are_timed(
    write_workload: Write, facts: Facts
) -> None:
    told = list[Any]()
    request = request_of(write_workload(GREEDY.format(most=8)))
    found = measure_throughput(request, facts, (4, 8, 16), tell=told.append, on_output=lambda line: None)
    states = {speed.micro_batch: speed.state for speed in found.speeds}
    assert states == {4: "measured", 8: "measured", 16: "out_of_memory"}
    assert (found.target_batch, found.device) == (16, "cpu")
    assert [event.speed for event in told] == list(found.speeds)
    assert all(isinstance(event, SpeedMeasured) for event in told)
    for speed in found.speeds[:2]:
        assert speed.iter_size == 16 // speed.micro_batch
        assert None not in (speed.low, speed.samples_per_second, speed.high)
        assert speed.low <= speed.samples_per_second <= speed.high  # type: ignore[operator]
    assert found.knee in (4, 8)
    assert found.fastest in (4, 8)


def test_a_changed_file_is_not_timed_and_where_no_size_fits_any_more_that_is_a_clear_no(
    write_workload: Write, facts: Facts
) -> None:
    request = request_of(write_workload(GREEDY.format(most=0)))

    def measure(facts: Facts) -> None:
        measure_throughput(request, facts, (4,), tell=lambda event: None, on_output=lambda line: None)

    with pytest.raises(WorkloadError, match="was changed while it is tuned"):
        measure(facts)
    with pytest.raises(DoesNotFitError, match="not even updates with micro-batch 4 fit any more"):
        measure(dataclasses.replace(facts, digest=load_workload(request.reference).digest))
