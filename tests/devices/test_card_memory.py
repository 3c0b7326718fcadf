from __future__ import annotations

import dataclasses

import pytest

from autoaccum.devices.card_memory import CardMemory, CardReport, check_index, report_card
from autoaccum.devices.nvml import CardProcess, Nvml, NvmlMissing
from autoaccum.errors import UsageError
from autoaccum.units import GIB, MIB

OWN = 7001
FOREIGN = CardProcess(pid=4711, used_bytes=8 * GIB)
MEMORY = CardMemory(
    index=1,
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    free_bytes=15 * GIB,
    reserved_bytes=20 * MIB,
    capability=(8, 6),
    multiprocessors=82,
    uuid="abc",
)
BEFORE = Nvml(
    uuid="GPU-abc",
    driver="580.95.05",
    used_bytes=8 * GIB,
    mig=False,
    slice=None,
    processes=(FOREIGN,),
)
OTHER_CARD = dataclasses.replace(BEFORE, uuid="GPU-xyz", used_bytes=0, processes=())


def after(*processes: CardProcess, used_bytes: int | None = 8 * GIB + 420 * MIB) -> Nvml:
    return dataclasses.replace(BEFORE, used_bytes=used_bytes, processes=processes)


def test_the_context_is_what_nvml_says_of_this_process_above_the_allocator() -> None:
    now = after(FOREIGN, CardProcess(pid=OWN, used_bytes=400 * MIB))
    report = report_card(MEMORY, [OTHER_CARD, BEFORE], now, own_pid=OWN)
    assert report.context_bytes == 380 * MIB
    assert report.others == (FOREIGN,)
    assert report.used_by_others_bytes == 9 * GIB - 20 * MIB - 380 * MIB
    assert (report.driver, report.mig, report.slice, report.nvml_missing) == ("580.95.05", False, None, None)


def test_in_a_container_the_process_that_came_is_this_one() -> None:
    now = after(FOREIGN, CardProcess(pid=90210, used_bytes=400 * MIB))
    report = report_card(MEMORY, [BEFORE], now, own_pid=OWN)
    assert (report.context_bytes, report.others) == (380 * MIB, (FOREIGN,))


@pytest.mark.parametrize(
    "processes", [(FOREIGN, CardProcess(pid=1, used_bytes=GIB), CardProcess(pid=2, used_bytes=GIB)), (FOREIGN,)]
)
def test_without_this_process_s_record_no_other_process_is_named(processes: tuple[CardProcess, ...]) -> None:
    report = report_card(MEMORY, [BEFORE], after(*processes), own_pid=OWN)
    assert report.others is None
    assert report.context_bytes == 400 * MIB


def test_processes_on_a_card_that_is_cut_may_be_on_other_slices() -> None:
    own = CardProcess(pid=OWN, used_bytes=400 * MIB)
    whole = dataclasses.replace(after(FOREIGN, own), mig=True)
    assert report_card(MEMORY, [BEFORE], whole, own_pid=OWN).others is None
    piece = dataclasses.replace(whole, slice="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    report = report_card(MEMORY, [BEFORE], piece, own_pid=OWN)
    assert (report.others, report.slice) == ((FOREIGN,), "NVIDIA A100-SXM4-40GB MIG 1g.5gb")


def test_without_permission_processes_are_unknown_and_the_rest_is_reported() -> None:
    now = dataclasses.replace(after(), processes=None)
    report = report_card(MEMORY, [dataclasses.replace(BEFORE, processes=None)], now, own_pid=OWN)
    assert (report.others, report.context_bytes) == (None, 400 * MIB)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (NvmlMissing("NVML Shared Library Not Found"), "NVML Shared Library Not Found"),
        (None, "PyTorch does not tell the card's uuid"),
    ],
)
def test_without_nvml_the_reason_is_kept(now: NvmlMissing | None, reason: str) -> None:
    report = report_card(MEMORY, NvmlMissing("NVML Shared Library Not Found"), now, own_pid=OWN)
    assert report == CardReport(memory=MEMORY, nvml_missing=reason)
    assert report.used_by_others_bytes is None


def test_available_memory_is_held_plus_free_memory() -> None:
    assert MEMORY.available_bytes == 15 * GIB + 20 * MIB
    assert MEMORY.held_outside_bytes == 9 * GIB - 20 * MIB


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
