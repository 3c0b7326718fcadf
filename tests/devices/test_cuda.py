"""Records and budgets of a CudaDevice, from recorded reports; its trials are in the contract suite and in tests/gpu."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.card_memory import CardMemory, CardReport
from autoaccum.devices.card_meter import card_limit, check_allocator, choose_name, memory_fraction, read_card
from autoaccum.devices.cuda import CudaDevice, choose_card_budget, describe_card, name_holders
from autoaccum.devices.nvml import CardProcess
from autoaccum.errors import UsageError
from autoaccum.units import GIB, MIB, MemorySize

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REPORT = CardReport(
    memory=CardMemory(
        index=1,
        name="NVIDIA GeForce RTX 3090",
        total_bytes=24 * GIB,
        free_bytes=15 * GIB - 20 * MIB,
        reserved_bytes=20 * MIB,
        capability=(8, 6),
        multiprocessors=82,
        uuid="abc",
    ),
    driver="580.95.05",
    mig=False,
    context_bytes=400 * MIB,
    others=(CardProcess(pid=1502, used_bytes=310 * MIB), CardProcess(pid=4711, used_bytes=8 * GIB)),
)


def size(count: int) -> MemorySize:
    return MemorySize(bytes=count)


@pytest.mark.parametrize(
    ("memory", "reserve", "budget"),
    [
        (None, None, 15 * GIB - int(15 * GIB * 0.02)),
        (None, size(GIB), 14 * GIB),
        (size(10 * GIB), None, 10 * GIB),
        (MemorySize(fraction=0.5), None, 12 * GIB),
        (MemorySize(fraction=0.5), size(2 * GIB), 10 * GIB),
        (size(15 * GIB), None, 15 * GIB),
    ],
)
def test_a_budget_is_the_requested_or_the_free_memory(
    memory: MemorySize | None, reserve: MemorySize | None, budget: int
) -> None:
    assert choose_card_budget(REPORT, memory, reserve) == budget


def test_a_budget_beyond_the_free_memory_names_who_holds_the_rest() -> None:
    with pytest.raises(UsageError) as seen:
        choose_card_budget(REPORT, size(20 * GIB))
    assert str(seen.value) == (
        "a budget of 20.0 GiB is more than the 15.0 GiB that cuda:1 (NVIDIA GeForce RTX 3090) has free; process 4711 "
        "holds 8.0 GiB, process 1502 holds 310 MiB: lower --memory, leave it away to use what is free, or end other "
        "programs"
    )


OWN_PID = 99


@pytest.mark.parametrize(
    ("change", "holders"),
    [
        ({"others": ()}, ""),
        ({"others": (CardProcess(pid=7, used_bytes=None),)}, "; process 7 holds some"),
        (
            {"others": (CardProcess(pid=7, used_bytes=None), CardProcess(pid=OWN_PID, used_bytes=GIB))},
            f"; process {OWN_PID} (this one) holds 1.0 GiB, process 7 holds some",
        ),
        (
            {"others": None, "nvml_missing": "NVML Shared Library Not Found"},
            "; who holds the rest is not known (NVML Shared Library Not Found)",
        ),
        ({"others": None}, "; who holds the rest is not known (the driver does not tell)"),
        (
            {"others": tuple(CardProcess(pid=pid, used_bytes=pid * GIB) for pid in range(1, 8))},
            "; process 7 holds 7.0 GiB, process 6 holds 6.0 GiB, process 5 holds 5.0 GiB, process 4 holds 4.0 GiB, "
            "process 3 holds 3.0 GiB",
        ),
    ],
)
def test_holders(change: dict[str, Any], holders: str) -> None:
    assert name_holders(dataclasses.replace(REPORT, **change), OWN_PID) == holders


def test_a_plan_records_the_card_and_who_was_on_it() -> None:
    described = describe_card(REPORT)
    assert described["card"] == "NVIDIA GeForce RTX 3090"
    assert (described["index"], described["capability"], described["multiprocessors"]) == (1, [8, 6], 82)
    assert (described["context_bytes"], described["used_by_others_bytes"]) == (400 * MIB, 9 * GIB - 400 * MIB)
    assert described["other_processes"] == [
        {"pid": 1502, "used_bytes": 310 * MIB},
        {"pid": 4711, "used_bytes": 8 * GIB},
    ]
    assert (described["driver"], described["nvml_missing"]) == ("580.95.05", None)


@pytest.mark.parametrize(
    ("environment", "backend", "message"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "native", "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        ({}, "pluggable", "the allocator is 'pluggable'"),
    ],
)
def test_allocators_that_cannot_be_limited(environment: dict[str, str], backend: str, message: str) -> None:
    for known in ("native", "cudaMallocAsync"):
        check_allocator({}, known)
    with pytest.raises(UsageError, match=message):
        check_allocator(environment, backend)


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "abc"),
        ("", "abc"),
        ("1,0", "abc"),
        ("GPU-xyz", "abc"),
        ("MIG-xyz", "MIG-xyz"),
        ("MIG-GPU-xyz/3/0,MIG-GPU-xyz/4/0", "MIG-GPU-xyz/3/0"),
    ],
)
def test_a_mig_slice_is_queried_by_the_name_that_made_it_visible(visible: str | None, name: str) -> None:
    assert choose_name("abc", visible) == name
    assert choose_name(None, visible) == (None if name == "abc" else name)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.without_gpu
def test_without_a_card_a_plan_is_refused_in_one_sentence(write_workload: Any) -> None:
    reference = write_workload("""
        import torch
        from torch import nn

        def model():
            return nn.Linear(8, 8)

        def batch(size):
            return torch.randn(size, 8), torch.randn(size, 8)

        criterion = nn.MSELoss()
    """)
    with (
        CudaDevice(TrialSettings(reference=reference, share=4), index=99) as device,
        pytest.raises(UsageError, match="^there is no cuda:99: no card is visible"),
    ):
        device.inspect()


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_peaks_are_forecast_by_a_simulation_of_this_very_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the trials need the card; what it is comes from the report."""
    settings = TrialSettings(reference=str(EXAMPLES / "digits_cnn.py"), share=256)
    with CudaDevice(settings, index=1) as device:
        monkeypatch.setattr(device, "_use_child", lambda: None)
        device._report = REPORT
        forecast = device.forecast()
    assert forecast.notes == ()
    assert forecast.peak_bytes is not None
    peaks = [forecast.peak_bytes(size) for size in (2, 64, 128)]
    assert None not in peaks
    assert peaks == sorted(set(peaks), key=lambda peak: peak or 0)


@pytest.mark.usefixtures("warm_children")
def test_what_cannot_be_simulated_has_no_forecast_and_says_why(
    monkeypatch: pytest.MonkeyPatch, write_workload: Any
) -> None:
    lines = "model = nn.Linear(3, 1)\ndef batch(n): return torch.zeros(n, 3)\n"
    loss = "def loss(m, b): return m(b).sum() * float(m.bias)\n"
    reference = write_workload(f"import torch\nfrom torch import nn\n{lines}{loss}")
    with CudaDevice(TrialSettings(reference=reference, share=256)) as device:
        monkeypatch.setattr(device, "_use_child", lambda: None)
        device._report = REPORT
        forecast = device.forecast()
    assert forecast.peak_bytes is None
    assert "began without a simulation of the card (" in forecast.notes[0]
    assert "a value is read" in forecast.notes[0]


TOTALS = st.integers(MIB, 1024 * GIB)


def permitted_bytes(fraction: float, total_bytes: int) -> int:
    """As setMemoryFraction in c10/cuda/CUDACachingAllocator.cpp computes it: in doubles, then cut."""
    return int(fraction * float(total_bytes))


@given(total=TOTALS, data=st.data())
def test_a_fraction_never_permits_more_than_the_limit(total: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(0, total))
    fraction = memory_fraction(limit, total)
    assert 0 <= fraction <= 1
    assert limit - 2 <= permitted_bytes(fraction, total) <= limit


def test_beyond_the_card_is_all_of_it_and_below_nothing_is_nothing() -> None:
    assert memory_fraction(25 * GIB, 24 * GIB) == 1.0
    assert memory_fraction(-1, 24 * GIB) == 0.0
    assert isinstance(memory_fraction(0, 24 * GIB), float)


@pytest.mark.without_gpu
def test_without_a_card_pytorchs_own_error_comes_and_nothing_is_set() -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        read_card(0)
    with pytest.raises((RuntimeError, AssertionError)), card_limit(0, GIB):
        pytest.fail("entered")
