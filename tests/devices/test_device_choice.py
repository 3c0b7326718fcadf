from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.devices import device_choice, installed_torch
from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.device_choice import (
    card_index,
    check_device,
    has_device_for_each,
    has_nvidia_gpu,
    make_device,
)
from autoaccum.devices.installed_torch import read_torch_release, torch_build
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.sources.source import FileSource
from autoaccum.units import parse_size

CPU_BUILD = "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


@pytest.fixture
def pretend_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch of which only `version.py` is there, in front of the real one."""
    import sys

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "torch" / "version.py"


def test_the_real_torch_is_read_as_it_says_itself() -> None:
    import torch

    assert torch_build() == (torch.__version__, torch.version.cuda)


def test_a_cpu_build_is_named(pretend_torch: Path) -> None:
    pretend_torch.write_text(CPU_BUILD)
    with pytest.raises(UsageError) as seen:
        check_device("cuda")
    assert str(seen.value) == (
        "--device cuda: the torch installed here (2.13.0+cpu) is the CPU build, without CUDA: install a CUDA build of "
        "torch (https://pytorch.org/get-started/locally), or take --device cpu"
    )


def test_a_cuda_build_without_a_gpu_is_named(pretend_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch.write_text(CUDA_BUILD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=r"torch 2.13.0\+cu130 is built for CUDA 13.0, but no NVIDIA GPU") as seen:
        check_device("cuda:1")
    assert "driver" in str(seen.value)


@pytest.mark.parametrize(("before", "file"), [("nvidiactl", "nvidia0"), ("dxg", "libcuda.so.1")], ids=["Linux", "WSL"])
def test_a_gpu_is_seen_by_its_device_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, file: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / before).touch()
    assert not has_nvidia_gpu(tmp_path, tmp_path / "libcuda.so.1")
    (tmp_path / file).touch()
    assert has_nvidia_gpu(tmp_path, tmp_path / "libcuda.so.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not has_nvidia_gpu(tmp_path, tmp_path / "libcuda.so.1")


@pytest.mark.parametrize(
    ("build", "is_there", "index"), [(CUDA_BUILD, True, 0), (CUDA_BUILD, False, None), (CPU_BUILD, True, None)]
)
def test_auto_is_the_gpu_where_torch_and_the_driver_have_one(
    pretend_torch: Path, monkeypatch: pytest.MonkeyPatch, build: str, is_there: bool, index: int | None
) -> None:
    pretend_torch.write_text(build)
    monkeypatch.setattr(device_choice, "has_nvidia_gpu", lambda: is_there)
    assert card_index("auto") == index


@pytest.mark.parametrize(
    ("name", "kind", "called"),
    [("cpu", CpuDevice, "cpu"), ("cuda", CudaDevice, "cuda:0"), ("cuda:3", CudaDevice, "cuda:3")],
)
def test_makes_the_device_without_starting_anything(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Device], called: str
) -> None:
    monkeypatch.setattr(device_choice, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(device_choice, "has_nvidia_gpu", lambda: True)
    made = make_device(TrialSettings(rank_samples=4, options=Options(device=name), source=FileSource("model.py")))
    assert isinstance(made, kind)
    assert made.name == called


def test_each_rank_of_a_launcher_has_the_card_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (card_index("cuda"), card_index("cuda:1"), card_index("cpu")) == (3, 1, None)


def test_ranks_are_started_where_each_has_a_device() -> None:
    memory = parse_size("1GiB")
    assert has_device_for_each(Options(world_size=2, device="cpu", memory=memory))
    assert not has_device_for_each(Options(world_size=1, device="cpu", memory=memory))
    assert not has_device_for_each(Options(world_size=2, device="cpu"))
    assert not has_device_for_each(Options(world_size=2, gpu="rtx3090", memory=memory))
    assert not has_device_for_each(Options(world_size=2, device="cuda:0"))
    assert not has_device_for_each(Options(world_size=10_000, memory=memory))


@pytest.mark.parametrize(("version", "release"), [("2.9.0", (2, 9)), ("2.15.0+cu132", (2, 15)), ("3.0.0a0", (3, 0))])
def test_torchs_release_is_read(monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int]) -> None:
    monkeypatch.setattr(installed_torch, "torch_build", lambda: (version, None))
    assert read_torch_release() == release
    monkeypatch.setattr(installed_torch, "torch_build", lambda: ("2.6.0+cu124", None))
    with pytest.raises(UsageError, match=r"needs torch 2.9 or newer, torch here is 2.6.0\+cu124: upgrade torch"):
        read_torch_release()
