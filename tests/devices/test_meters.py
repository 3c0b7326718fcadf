"""The seam between the child and what it measures with: any meter goes, and what it refuses is told as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autoaccum.devices import meters
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child import Child
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.meters import warm_up
from autoaccum.devices.process import child_environment
from autoaccum.devices.recording import Reading
from autoaccum.devices.worker import Worker
from autoaccum.errors import NotMeasuredError, UsageError

WORKLOAD = """
    import torch
    from torch import nn

    def model():
        return nn.Linear(4, 2)

    def batch(size):
        return torch.randn(size, 4), torch.randn(size, 2)

    criterion = nn.MSELoss()
"""


class Recorder:
    """A meter of a device that is not there: tells what it was asked for, in order."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.device = torch.device("cpu")
        self.failure = failure
        self.asked: list[str] = []

    def open(self) -> None:
        self.asked.append("open")
        if self.failure is not None:
            raise self.failure

    def begin(self) -> Mapping[str, Any]:
        self.asked.append("begin")
        return {"facts": 1}

    def start(self) -> None:
        self.asked.append("start")

    @contextmanager
    def limit(self, budget_bytes: int) -> Iterator[None]:
        self.asked.append(f"limit {budget_bytes}")
        yield
        self.asked.append("no limit")

    def read(self) -> Reading:
        self.asked.append("read")
        return Reading(peak_reserved_bytes=123, peak_allocated_bytes=45, retries=0)

    def settle(self) -> int:
        self.asked.append("settle")
        return 67


def load(monkeypatch: pytest.MonkeyPatch, meter: Recorder, reference: str) -> tuple[Child, dict[str, Any]]:
    monkeypatch.setattr(meters, "make_meter", lambda device: meter)
    monkeypatch.setattr(sys, "path", list(sys.path))
    child = Child()
    request = {
        "job": "load",
        "device": "elsewhere:3",
        "reference": reference,
        "precision": None,
        "cwd": str(Path.cwd()),
        "sys_path": sys.path,
        "pythonpath": os.environ.get("PYTHONPATH"),
    }
    return child, child.answer(request)


def test_a_child_asks_its_meter_and_nothing_else(monkeypatch: pytest.MonkeyPatch, write_workload: Any) -> None:
    meter = Recorder()
    child, facts = load(monkeypatch, meter, write_workload(WORKLOAD))
    assert facts == {"facts": 1}
    job = {"share": 4, "optimizer": None}
    inspected = child.answer({"job": "inspect", **job})
    assert inspected["inspection"]["update_bytes"] == 123
    assert inspected["kept_bytes"] == 67
    tried = child.answer({"job": "trial", **job, "parts": [2, 2], "limit_bytes": 1000})
    assert tried["reading"]["peak_reserved_bytes"] == 123
    assert tried["reading"]["peak_allocated_bytes"] == 45
    assert tried["kept_bytes"] == 67
    trial = ["start", "limit 1000", "no limit", "read", "settle"]
    assert meter.asked == ["open", "begin", "start", "read", "settle", *trial]


def test_after_a_failure_nothing_more_is_asked_of_the_device(
    monkeypatch: pytest.MonkeyPatch, write_workload: Any
) -> None:
    meter = Recorder()
    child, _ = load(monkeypatch, meter, write_workload(WORKLOAD.replace("nn.Linear(4, 2)", "nn.Linear(3, 2)")))
    reply = child.answer({"job": "trial", "share": 4, "optimizer": None, "parts": [2, 2], "limit_bytes": 1000})
    assert (reply["failure"]["outcome"], reply["failure"]["blames"], reply["phase"]) == ("error", "user", "forward")
    assert "kept_bytes" not in reply
    assert meter.asked[-1] == "read"


def test_a_device_that_is_refused_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch, write_workload: Any) -> None:
    refused = UsageError("there is no cuda:3", hint="take cuda:0")
    _, reply = load(monkeypatch, Recorder(refused), write_workload(WORKLOAD))
    assert reply == {"refused": "there is no cuda:3: take cuda:0"}


@pytest.mark.parametrize(
    ("error", "outcome", "blames"),
    [
        (NotMeasuredError("CUDA does not start"), "error", "measurement"),
        (RuntimeError("CUDA error: invalid device ordinal"), "error", "measurement"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "oom", None),
    ],
)
def test_a_device_that_does_not_start_is_never_the_users_fault(
    monkeypatch: pytest.MonkeyPatch, write_workload: Any, error: Exception, outcome: str, blames: str | None
) -> None:
    _, reply = load(monkeypatch, Recorder(error), write_workload(WORKLOAD))
    assert (reply["failure"]["outcome"], reply["failure"]["blames"]) == (outcome, blames)


@pytest.mark.without_gpu
def test_a_worker_on_a_card_that_is_not_there_is_a_usage_error(write_workload: Any) -> None:
    with pytest.raises(UsageError, match="^there is no cuda:5: no card is visible"):
        Worker(TrialSettings(reference=write_workload(WORKLOAD), share=4), "cuda:5")


HOST_METER = """
import torch
from autoaccum.devices.host_meter import HostMeter

meter = HostMeter()
meter.open()
assert set(meter.begin()) == {"resets_peak"}
meter.start()
taken = torch.ones(32 * 2**20, dtype=torch.uint8)
reading = meter.read()
assert reading.peak_reserved_bytes >= taken.nbytes - 2**20, reading
assert (reading.retries, reading.peak_allocated_bytes) == (None, None), reading
kept = meter.settle()
assert kept >= taken.nbytes - 2**20, kept
del taken
kept = meter.settle()
assert kept < -31 * 2**20, kept
meter.start()
with meter.limit(16 * 2**20):
    try:
        torch.empty(256 * 2**20, dtype=torch.uint8)
    except RuntimeError as error:
        print("refused")
torch.empty(256 * 2**20, dtype=torch.uint8)
print("granted")
"""


def test_the_hosts_meter_sees_what_is_taken_and_refuses_what_is_beyond() -> None:
    """In a process of its own, with a child's settings: a used one takes memory without asking for more."""
    command = [sys.executable, "-c", HOST_METER]
    seen = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert seen.stdout.split() == ["refused", "granted"], seen.stderr


def test_the_environment_of_a_card_tells_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    card, host = (describe_environment(torch.device(kind)) for kind in ("cuda", "cpu"))
    assert card["cuda"] == torch.version.cuda
    assert "cudnn" in card
    assert card["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert card["variables"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"cuda", "cudnn"} & set(host)
    assert "PYTORCH_ALLOC_CONF" not in host["variables"]


def test_warming_up_keeps_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    warm_up("cpu")
    assert torch.get_num_threads() == threads
