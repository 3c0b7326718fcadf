"""Records and budgets of a CudaDevice, from recorded reports; its trials are in the contract suite and in tests/gpu."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import LINEAR_FILE, make_settings

from autoaccum.devices.budget import choose_budget
from autoaccum.devices.cuda import CudaDevice, InstalledCard, check_index
from autoaccum.devices.meters import check_allocator, memory_fraction
from autoaccum.devices.nvml import (
    CardAnswers,
    CardProcess,
    MachineAnswers,
    ask_nvml,
    list_cards,
    read_answers,
    read_cards,
)
from autoaccum.errors import UsageError
from autoaccum.units import GIB, MIB, MemorySize

CARD = InstalledCard(
    index=1,
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    free_bytes=15 * GIB - 20 * MIB,
    reserved_bytes=20 * MIB,
    capability=(8, 6),
    multiprocessors=82,
    uuid="abc",
    driver="580.95.05",
    context_bytes=400 * MIB,
    others=(CardProcess(pid=1502, used_bytes=310 * MIB), CardProcess(pid=4711, used_bytes=8 * GIB)),
)


def test_without_memory_the_reserve_of_a_card_is_smaller_than_that_of_the_host() -> None:
    assert choose_budget(CARD.available) == 15 * GIB - int(15 * GIB * 0.02)
    assert choose_budget(CARD.available, MemorySize(fraction=0.5)) == 12 * GIB


def test_a_budget_beyond_the_free_memory_names_who_holds_the_rest() -> None:
    with pytest.raises(UsageError) as seen:
        choose_budget(CARD.available, MemorySize(bytes=20 * GIB))
    assert str(seen.value) == (
        "a budget of 20.0 GiB is more than the 15.0 GiB that cuda:1 (NVIDIA GeForce RTX 3090) has free; process 4711 "
        "holds 8.0 GiB, process 1502 holds 310 MiB: lower --memory, leave it away to use what is free, or end other "
        "programs"
    )


@pytest.mark.parametrize(
    ("change", "holders"),
    [
        ({"others": ()}, ""),
        ({"others": (CardProcess(pid=7, used_bytes=None),)}, "; process 7 holds some"),
        (
            {"others": None, "nvml_missing": "NVML Shared Library Not Found"},
            "; who holds the rest is not known (NVML Shared Library Not Found)",
        ),
    ],
)
def test_holders(change: dict[str, Any], holders: str) -> None:
    assert dataclasses.replace(CARD, **change).holders == holders


def test_a_plan_records_the_card_and_who_was_on_it() -> None:
    device = CARD.describe("cuda:1", 8 * GIB)
    described = device.properties
    assert (device.card, device.used_by_others_bytes) == ("NVIDIA GeForce RTX 3090", 9 * GIB - 400 * MIB)
    assert (described["index"], described["capability"], described["multiprocessors"]) == (1, [8, 6], 82)
    assert described["context_bytes"] == 400 * MIB
    assert described["other_processes"] == [
        {"pid": 1502, "used_bytes": 310 * MIB},
        {"pid": 4711, "used_bytes": 8 * GIB},
    ]
    assert (described["driver"], described["nvml_missing"]) == ("580.95.05", None)


@pytest.mark.parametrize(
    ("environment", "backend", "message"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "native", "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        ({}, "cudaMallocAsync", "the allocator is 'cudaMallocAsync'"),
    ],
)
def test_allocators_that_cannot_be_limited(environment: dict[str, str], backend: str, message: str) -> None:
    check_allocator({}, "native")
    with pytest.raises(UsageError, match=message):
        check_allocator(environment, backend)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.without_gpu
def test_without_a_card_a_plan_is_refused_in_one_sentence(write_workload: Any) -> None:
    with (
        CudaDevice(make_settings(write_workload(LINEAR_FILE), 4), index=99) as device,
        pytest.raises(UsageError, match="^there is no cuda:99: no card is visible"),
    ):
        device.inspect()


@pytest.mark.parametrize(
    ("own", "context_bytes", "others"),
    [
        (CardProcess(pid=99, used_bytes=400 * MIB), 380 * MIB, (CardProcess(pid=7, used_bytes=GIB),)),
        (CardProcess(pid=99, used_bytes=None), None, (CardProcess(pid=7, used_bytes=GIB),)),
        (CardProcess(pid=98, used_bytes=400 * MIB), None, None),
    ],
    ids=["known", "without its memory", "in a container"],
)
def test_the_context_is_what_nvml_says_of_this_process_above_the_allocator(
    own: CardProcess, context_bytes: int | None, others: tuple[CardProcess, ...] | None
) -> None:
    nvml = CardAnswers(driver="580.95.05", processes=(CardProcess(pid=7, used_bytes=GIB), own))
    card = CARD.with_processes(nvml, own_pid=99)
    assert (card.context_bytes, card.others, card.driver) == (context_bytes, others, "580.95.05")


@pytest.mark.parametrize(
    ("names", "visible", "message"),
    [
        (["A100", "T4"], None, "there is no cuda:99, visible are A100, T4: take one of these"),
        (["A100"], "3", r"visible are A100 \(CUDA_VISIBLE_DEVICES=3\): take cuda:0"),
        ([], "", r"no card is visible \(CUDA_VISIBLE_DEVICES=\): nvidia-smi should list it"),
    ],
)
def test_an_index_beyond_says_what_is_there(names: list[str], visible: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_index(99, names, visible)


class Recorded:
    """Stands where pynvml does: its errors, and answers."""

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, set[str]()

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> Any:
            self.asked.add(name)
            if name not in self.answers:
                raise self.NVMLLibraryMismatchError(f"{name} is too new")
            return self.answers[name]

        return ask


COMPUTING = [SimpleNamespace(pid=4711, usedGpuMemory=8 * GIB), SimpleNamespace(pid=7, usedGpuMemory=2**64 - 1)]


@pytest.mark.parametrize(("mig", "names_processes"), [([0, 0], True), ([1, 1], False)])
def test_who_is_on_a_card_that_is_not_in_slices(mig: list[int], names_processes: bool) -> None:
    library = Recorded(nvmlDeviceGetMigMode=mig, nvmlDeviceGetComputeRunningProcesses=COMPUTING)
    processes = (CardProcess(pid=4711, used_bytes=8 * GIB), CardProcess(pid=7, used_bytes=None))
    assert read_answers(library, "handle") == CardAnswers(processes=processes if names_processes else None)
    if names_processes:
        pynvml = pytest.importorskip("pynvml")
        names = {*library.asked, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "NVMLError"}
        assert all(hasattr(pynvml, name) for name in names)


@pytest.mark.parametrize("memory", [{"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB)}, {}])
def test_the_cards_of_the_machine(memory: dict[str, Any]) -> None:
    library = Recorded(nvmlDeviceGetCount=2, nvmlDeviceGetHandleByIndex="handle", nvmlDeviceGetName="T4", **memory)
    assert read_cards(library) == MachineAnswers(cards=2 * (("T4", 24 * GIB if memory else None),))
    assert all(hasattr(pytest.importorskip("pynvml"), name) for name in library.asked)


@pytest.mark.without_gpu
def test_without_nvml_its_own_message_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_nvml(None).missing is not None
    missing = "NVML Shared Library Not Found"
    assert (ask_nvml("8f2b6c1e"), list_cards()) == (CardAnswers(missing=missing), MachineAnswers(missing=missing))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answers = ask_nvml("8f2b6c1e")
    assert "pynvml" in (answers.missing or "")
    assert CARD.with_processes(answers, own_pid=99).nvml_missing == answers.missing


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
