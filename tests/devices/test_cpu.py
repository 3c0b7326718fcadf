from __future__ import annotations

from typing import Any

import pytest
from planned import LINEAR_FILE, make_settings

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.sources.source import FileSource
from autoaccum.units import GIB, MIB


@pytest.mark.slow
def test_without_memory_the_budget_is_the_free_memory_less_a_reserve(write_workload: Any) -> None:
    free_before = read_host_memory().free_bytes
    with CpuDevice(TrialSettings(source=FileSource(write_workload(LINEAR_FILE)), rank_samples=4)) as device:
        free_then = device.describe().free_bytes  # Other programs may have ended meanwhile.
        assert free_then is not None
        assert 0.5 * free_before < device.limit_bytes <= free_then - 256 * MIB
        assert device.trial((4,)).outcome == "ok"


@pytest.mark.usefixtures("warm_children")
def test_a_budget_beyond_the_free_memory_is_refused(write_workload: Any) -> None:
    settings = make_settings(write_workload(LINEAR_FILE), 4, 10**6 * GIB)
    with CpuDevice(settings) as device, pytest.raises(UsageError, match="free"):
        device.inspect()


@pytest.mark.usefixtures("warm_children")
def test_a_model_that_ranks_would_shard_is_refused_and_replicated_on_request(write_workload: Any) -> None:
    reference = write_workload(LINEAR_FILE + "\ndef parallelize(model, mesh):\n    1 / 0\n")
    refused = pytest.raises(UsageError, match="a device of this machine run the whole model: plan for a simulated card")
    with CpuDevice(make_settings(reference, 4, world_size=2)) as device, refused:
        device.inspect()
    with CpuDevice(make_settings(reference, 4, world_size=2, parallel="ddp")) as device:
        assert device.trial((2, 2)).outcome == "ok"


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("return torch.randn(3, 64), torch.randn(3, 64)", WorkloadError, r"^batch\(2\) returned 3 samples"),
        ("return 1 / 0", WorkloadError, r"^an update from a small batch raised ZeroDivisionError"),
        (
            "return 1\n\nfrom autoaccum.devices.child.process import ChildProcess\nChildProcess('json:tool')",
            UsageError,
            "a workload starts trials while it is being loaded",
        ),
        ("pass\n\nos._exit(3)", NotMeasuredError, "^loading .*: its process left with exit status 3"),
    ],
)
def test_an_unusable_workload_is_refused_in_one_sentence(
    write_workload: Any, change: str, error: type[Exception], message: str
) -> None:
    reference = write_workload(LINEAR_FILE.replace("return torch.randn(size, 64), torch.randn(size, 64)", change))
    with (
        CpuDevice(TrialSettings(source=FileSource(reference), rank_samples=4)) as device,
        pytest.raises(error, match=message),
    ):
        device.inspect()
