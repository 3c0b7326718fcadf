"""Runs in fresh processes: their median and their spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import INSPECTION
from typing_extensions import Self

from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.errors import WorkloadError
from autoaccum.guarding import measuring
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.guarding.measuring import Task, measure, measure_by_runs
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.units import MIB

ENVIRONMENT = {
    "torch": "2.13.0+cu130",
    "processor": "EPYC",
    "threads": 2,
    "cuda": "13.0",
    "cudnn": 91000,
    "variables": {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "2"},
}
CARD = {"kind": "cuda", "card": "NVIDIA L4", "driver": "580.1", "allocator": "native"}


class Machine:
    """A device whose trials take 10 MiB and 1 MiB a sample; those from clean states what is told beforehand."""

    name = "cuda:0"
    limit_bytes = 64 * MIB

    def __init__(self, runs: Sequence[Trial | int], described: Mapping[str, Any]) -> None:
        self._runs, self._described, self.asked = list(runs), described, list[tuple[int, ...]]()

    def describe(self) -> Mapping[str, Any]:
        return self._described

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        return Inspection(**{**vars(INSPECTION), "environment": ENVIRONMENT})

    def trial(self, parts: tuple[int, ...], *, fresh: bool = False, **how: Any) -> Trial:
        self.asked += [parts] if fresh else []
        taken = (10 + max(parts)) * MIB
        if fresh and self._runs:
            told = self._runs.pop(0)
            if isinstance(told, Trial):
                return told
            taken = told
        outcome: Any = "ok" if taken <= self.limit_bytes else "oom"
        return Trial(parts=parts, outcome=outcome, peak_reserved_bytes=taken, fresh=fresh)

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None: ...


def measure_runs(
    *runs: Trial | int, micro_batches: tuple[int, ...] | None = (8, 8), described: Mapping[str, Any] = CARD
) -> tuple[Measurement, Machine]:
    machine = Machine(runs, described)
    task = Task(PlanSetup(machine, "model.py"), PlanRequest(16, max_micro_batch=8), micro_batches)
    return measure_by_runs(task), machine


def test_the_peak_is_the_median_of_three_fresh_runs() -> None:
    found, machine = measure_runs(20 * MIB, 18 * MIB, 19 * MIB)
    assert machine.asked == [(8, 8)] * 3, "one of them is the plan's"
    assert (found.peak_bytes, found.runs, found.spread_bytes) == (19 * MIB, (18 * MIB, 19 * MIB, 20 * MIB), 2 * MIB)
    assert (found.kind, found.fits, found.largest, found.capped) == ("measured", True, 8, True)
    assert (found.held_bytes, found.least_bytes, found.categories, found.holdings) == (None, None, {}, ())
    found, machine = measure_runs(micro_batches=(4, 4, 4, 4))
    assert machine.asked[1:] == [(4, 4)] * 3, "the plan ran another"
    assert (found.micro_batches, found.peak_bytes, found.largest) == ((4, 4, 4, 4), 14 * MIB, 8)


def test_a_run_that_does_not_go_through_does_not_fit() -> None:
    refused = Trial(parts=(4, 4), outcome="oom", peak_reserved_bytes=60 * MIB)
    found, _ = measure_runs(18 * MIB, 20 * MIB, refused, 19 * MIB, micro_batches=(4, 4, 4, 4))
    assert (found.fits, found.runs) == (False, (19 * MIB, 20 * MIB))
    found, _ = measure_runs(18 * MIB, refused, refused, refused, micro_batches=(4, 4, 4, 4))
    assert (found.fits, found.runs, found.peak_bytes) == (False, (), 64 * MIB)
    failed = Trial(parts=(8, 8), outcome="error", message="it raised", blames="user", traceback="line 1")
    with pytest.raises(WorkloadError, match="it raised") as told:
        measure_runs(20 * MIB, failed)
    assert told.value.user_traceback == "line 1"


def test_what_decides_about_the_figures_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found, _ = measure_runs()
    assert found.card == "NVIDIA L4"
    assert {**found.versions, "autoaccum": ""} == {
        "torch": "2.13.0",
        "autoaccum": "",
        "cuda": "13.0",
        "cudnn": "91000",
        "driver": "580.1",
    }
    assert found.settings == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    found, _ = measure_runs(described={"kind": "cpu"})
    assert (found.card, set(found.versions), found.settings) == ("EPYC", {"torch", "autoaccum"}, {"threads": 2})


LINEAR = """
    from torch import nn, randn

    def model():
        return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 8))

    def batch(size):
        return randn(size, 256), randn(size, 8)

    criterion = nn.MSELoss()
"""


def test_runs_on_the_cpu(
    write_workload: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, warm_children: None
) -> None:
    monkeypatch.setattr(measuring, "RUNS", 2)
    case = make_case(workload="model.py", device="cpu", target_batch=512, micro_batch=256, memory="256MiB")
    found = measure(case, Checkout(Path(write_workload(LINEAR)).parent))
    assert (found.micro_batches, found.largest, found.capped, found.fits) == ((256, 256), 256, True, True)
    assert len(found.runs) == 2
    assert found.runs[0] > 10 * MIB
    assert found.spread_bytes < 4 * MIB
    assert found.runs == tuple(sorted(found.runs))
    assert found.card
    assert found.settings["threads"] == 1
