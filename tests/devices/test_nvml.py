"""Parsing against recordings in the form of NVML's documented structs; asking against the machine as it is."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autoaccum.devices.nvml import (
    CardProcess,
    Nvml,
    NvmlMissing,
    ask_card,
    find_card,
    parse_card,
    read_all_cards,
    read_nvml,
)
from autoaccum.units import GIB, MIB

NO_PERMISSION = NvmlMissing("Insufficient Permissions")
NOT_SUPPORTED = NvmlMissing("Not Supported")

RTX_3090 = {
    "uuid": "GPU-8f2b6c1e-11d2-7a3e-9d57-0c6f3f1f2a77",
    "name": "NVIDIA GeForce RTX 3090",
    "driver": "580.95.05",
    "cards": 2,
    "memory": SimpleNamespace(
        version=0x02000028, total=24 * GIB, reserved=325 * MIB, free=15 * GIB, used=9 * GIB - 325 * MIB
    ),
    "mig_mode": NOT_SUPPORTED,
    "is_slice": 0,
    "compute": [
        SimpleNamespace(pid=4711, usedGpuMemory=8 * GIB, gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF)
    ],
    "graphics": [
        SimpleNamespace(pid=1502, usedGpuMemory=310 * MIB),
        SimpleNamespace(pid=4711, usedGpuMemory=8 * GIB),
    ],
}

A100_SLICE = {
    "uuid": "MIG-4d0d6dc1-9a9c-5f6f-8a5e-6a0b4c3a2b11",
    "name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "driver": "535.183.01",
    "cards": 8,
    "memory": SimpleNamespace(total=4864 * MIB, reserved=0, free=4850 * MIB, used=14 * MIB),
    "mig_mode": NvmlMissing("Invalid Argument"),
    "is_slice": 1,
    "compute": [],
    "graphics": NOT_SUPPORTED,
}


def test_a_card_with_a_foreign_process() -> None:
    assert parse_card(RTX_3090) == Nvml(
        uuid="GPU-8f2b6c1e-11d2-7a3e-9d57-0c6f3f1f2a77",
        driver="580.95.05",
        cards=2,
        total_bytes=24 * GIB,
        free_bytes=15 * GIB,
        used_bytes=9 * GIB - 325 * MIB,
        reserved_bytes=325 * MIB,
        mig=None,
        slice=None,
        processes=(CardProcess(pid=4711, used_bytes=8 * GIB), CardProcess(pid=1502, used_bytes=310 * MIB)),
    )


def test_a_slice() -> None:
    card = parse_card(A100_SLICE)
    assert (card.mig, card.slice) == (True, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert (card.total_bytes, card.reserved_bytes, card.processes) == (4864 * MIB, 0, ())


def test_without_permission_the_processes_are_not_told() -> None:
    card = parse_card({**RTX_3090, "compute": NO_PERMISSION, "compute_v2": NO_PERMISSION, "graphics": NO_PERMISSION})
    assert card.processes is None
    assert card.used_bytes == 9 * GIB - 325 * MIB


@pytest.mark.parametrize("used", [None, 2**64 - 1])
def test_where_the_driver_does_not_tell_a_process_is_known_without_its_bytes(used: int | None) -> None:
    card = parse_card({**RTX_3090, "compute": [SimpleNamespace(pid=7, usedGpuMemory=used)], "graphics": NOT_SUPPORTED})
    assert card.processes == (CardProcess(pid=7, used_bytes=None),)


class Recorded:
    """Stands where pynvml does: its errors, and one card that is found by one name only."""

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def __init__(self, known: str) -> None:
        self.known = known

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.known:
            raise self.NVMLError("Not Found")
        return f"the handle of {uuid}"

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any, **__: Any) -> Any:
            raise self.NVMLLibraryMismatchError(f"{name} is too new")

        return ask


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-"])
@pytest.mark.parametrize("given", ["", "own"])
def test_a_card_is_found_with_and_without_its_prefix(prefix: str, given: str) -> None:
    library = Recorded(f"{prefix}abc")
    assert find_card(library, f"{prefix}abc" if given else "abc") == f"the handle of {prefix}abc"


def test_every_question_is_put_whatever_the_others_gave() -> None:
    answers = ask_card(Recorded("GPU-abc"), "handle")
    assert set(answers) == set(RTX_3090)
    assert all(isinstance(answer, NvmlMissing) for answer in answers.values())


def test_the_questions_are_ones_the_real_library_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    asked: dict[str, bool] = {}

    class Asked(Recorded):
        def __getattr__(self, name: str) -> Any:
            asked[name] = hasattr(pynvml, name)
            return super().__getattr__(name)

    ask_card(Asked("GPU-abc"), "handle")
    assert len(asked) == len(RTX_3090)
    assert all(asked.values())
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", *vars(Recorded)):
        assert name.startswith("_") or hasattr(pynvml, name), name
    memory = pynvml.c_nvmlMemory_v2_t()
    assert all(hasattr(memory, field) for field in ("total", "reserved", "free", "used"))
    assert pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value == 2**64 - 1


@pytest.mark.without_gpu
def test_without_a_driver_the_real_library_says_so() -> None:
    pytest.importorskip("pynvml")
    assert read_nvml("8f2b6c1e-11d2-7a3e-9d57-0c6f3f1f2a77") == NvmlMissing("NVML Shared Library Not Found")
    assert read_all_cards() == NvmlMissing("NVML Shared Library Not Found")


def test_without_pynvml_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    read = read_nvml("abc")
    assert isinstance(read, NvmlMissing)
    assert read.reason.startswith("pynvml (nvidia-ml-py) cannot be imported")
