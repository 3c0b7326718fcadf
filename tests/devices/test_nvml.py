"""Records from a library like pynvml, by its answers; and from the real one on this machine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autoaccum.devices.nvml import CardProcess, Nvml, NvmlMissing, query_card, read_all_cards, read_nvml_card
from autoaccum.units import GIB, MIB

RTX_3090 = {
    "nvmlDeviceGetUUID": "GPU-abc",
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 3090",
    "nvmlSystemGetDriverVersion": "580.95.05",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, free=15 * GIB, used=9 * GIB - 325 * MIB),
    "nvmlDeviceIsMigDeviceHandle": 0,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4711, usedGpuMemory=8 * GIB)],
    "nvmlDeviceGetGraphicsRunningProcesses": [
        SimpleNamespace(pid=1502, usedGpuMemory=310 * MIB),
        SimpleNamespace(pid=4711, usedGpuMemory=8 * GIB),
    ],
}


class Recorded:
    """Stands where pynvml does: its errors, one card that is found by one name only, and answers."""

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def __init__(self, known: str = "GPU-abc", **answers: Any) -> None:
        self.known, self.answers, self.asked = known, {**RTX_3090, **answers}, set[str]()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.known:
            raise self.NVMLError("Not Found")
        return f"the handle of {uuid}"

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any, **__: Any) -> Any:
            self.asked.add(name)
            if self.answers.get(name) is None and name not in ("nvmlInit", "nvmlShutdown"):
                raise self.NVMLLibraryMismatchError(f"{name} is too new")
            return self.answers.get(name)

        return ask


def test_a_card_with_foreign_processes() -> None:
    assert query_card(Recorded(), "handle") == Nvml(
        uuid="GPU-abc",
        driver="580.95.05",
        used_bytes=9 * GIB - 325 * MIB,
        mig=None,
        slice=None,
        processes=(CardProcess(pid=4711, used_bytes=8 * GIB), CardProcess(pid=1502, used_bytes=310 * MIB)),
    )


def test_a_mig_slice() -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    card = query_card(Recorded(nvmlDeviceIsMigDeviceHandle=1, nvmlDeviceGetName=name), "handle")
    assert (card.mig, card.slice) == (True, name)


def test_a_missing_answer_is_none() -> None:
    card = query_card(Recorded("GPU-abc", **dict.fromkeys(RTX_3090)), "handle")
    assert card == Nvml(uuid="", driver=None, used_bytes=None, mig=None, slice=None, processes=None)
    for used in (None, 2**64 - 1):
        untold = [SimpleNamespace(pid=7, usedGpuMemory=used)]
        library = Recorded(nvmlDeviceGetComputeRunningProcesses=untold, nvmlDeviceGetGraphicsRunningProcesses=None)
        assert query_card(library, "handle").processes == (CardProcess(pid=7, used_bytes=None),)


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-"])
def test_a_card_is_found_with_and_without_its_prefix(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorded(f"{prefix}abc")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert isinstance(read_nvml_card(f"{prefix}abc"), Nvml)
    assert isinstance(read_nvml_card("abc"), Nvml)
    assert read_nvml_card("xyz") == NvmlMissing("no card MIG-xyz: Not Found")


def test_the_queries_are_ones_the_real_library_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    library = Recorded()
    query_card(library, "handle")
    own = [name for name in vars(Recorded) if not name.startswith("_")]
    names = {*library.asked, *own, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    assert all(hasattr(pynvml, name) for name in names)
    assert hasattr(pynvml.c_nvmlMemory_v2_t(), "used")
    assert pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value == 2**64 - 1


@pytest.mark.without_gpu
def test_without_a_driver_the_real_library_says_so() -> None:
    pytest.importorskip("pynvml")
    assert read_nvml_card("8f2b6c1e") == read_all_cards() == NvmlMissing("NVML Shared Library Not Found")


def test_without_pynvml_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    read = read_nvml_card("abc")
    assert isinstance(read, NvmlMissing)
    assert read.reason.startswith("pynvml (nvidia-ml-py) cannot be imported")
