from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.checkout import Checkout, is_original, redirect_hooks
from autoaccum.devices.process import PACKAGE_ROOT
from autoaccum.devices.spare import where_to_import
from autoaccum.devices.worker import Worker
from autoaccum.errors import NotMeasuredError


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The user's repository, and another checkout of it."""
    for inside in (
        "original/.venv/lib/python3.11/site-packages",
        *(f"{name}/{folder}" for name in ("original", "other") for folder in ("src/pkg", "app")),
    ):
        (tmp_path / inside).mkdir(parents=True)
    return tmp_path / "original", tmp_path / "other"


def test_entries_within_the_repository_are_looked_for_in_the_checkout(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, other = places
    checkout = Checkout(other / "app", original, other)
    assert checkout.map_entry(str(original)) == str(other)
    assert checkout.map_entry(str(original / "src")) == str(other / "src")
    assert checkout.map_entry(str(original / "not there now")) == str(other / "not there now")
    (tmp_path / "link").symlink_to(original / "src")
    assert checkout.map_entry(str(tmp_path / "link")) == str(other / "src")
    for stays in (
        str(original / ".venv/lib/python3.11/site-packages"),
        str(tmp_path),
        str(other / "src"),
        str(original) + "-not",
        "__editable__.pkg-1.0.finder.__path_hook__",
        "",
        *(entry for entry in sys.path if "python" in entry),
    ):
        assert checkout.map_entry(stays) == stays
    monkeypatch.chdir(original)
    assert checkout.map_entry("src") == str(other / "src")
    assert Checkout(original / "app").map_entry("src") == str(original / "src")
    assert checkout.map_path(os.pathsep.join(["src", "", str(tmp_path)])) == f"{other}/src{os.pathsep * 2}{tmp_path}"


def test_a_child_is_told_its_folder_and_where_to_look(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, other = places
    monkeypatch.setattr(sys, "path", [str(original), "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", str(original / "src"))
    told = where_to_import(Checkout(other / "app", original, other))
    assert told == {
        "cwd": str(other / "app"),
        "sys_path": [str(other), "/elsewhere"],
        "pythonpath": str(other / "src"),
        "checkout": {"original": str(original), "root": str(other)},
    }
    monkeypatch.delenv("PYTHONPATH")
    told = where_to_import(Checkout(original))
    assert (told["cwd"], told["sys_path"][0], told["pythonpath"]) == (str(original), str(original), None)
    assert told["checkout"] == {}


def test_what_the_revision_has_of_its_own(places: tuple[Path, Path]) -> None:
    original, other = map(str, places)
    for own in ("", "/src/pkg/__init__.py", "/lib/site-packages/pkg/net.py"):
        (places[1] / "lib/site-packages/pkg").mkdir(parents=True, exist_ok=True)
        (places[1] / "lib/site-packages/pkg/net.py").write_text("")
        assert is_original(f"{original}{own}", original, other)
        assert not is_original(f"{other}{own}", original, other)
        assert not is_original(f"{original}-not{own}", original, other)
    assert not is_original(f"{original}/.venv/lib/python3.11/site-packages/numpy/__init__.py", original, other)
    assert not is_original(os.path.realpath(os.__file__), str(Path(os.path.realpath(os.__file__)).parents[2]), other)


def test_autoaccum_measures_itself_with_itself(places: tuple[Path, Path]) -> None:
    for name, own in (("autoaccum/errors.py", False), ("autoaccum", False), ("tests/shared/small_data.py", True)):
        assert is_original(str(PACKAGE_ROOT / name), str(PACKAGE_ROOT), str(places[1])) == own


def test_hooks_of_editable_installations_lead_to_the_checkout(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, other = places
    hook, stranger = ModuleType("__editable___pkg_1_0_finder"), ModuleType("stranger")
    for module in (hook, stranger):
        packages = {"pkg": str(original / "src/pkg"), "far": "/elsewhere/far"}
        module.__dict__["MAPPING"] = {**packages, "autoaccum": str(PACKAGE_ROOT / "autoaccum")}
        module.__dict__["NAMESPACES"] = {"space": [str(original / "app"), "/elsewhere"]}
        monkeypatch.setitem(sys.modules, module.__name__, module)
    redirect_hooks(Checkout(original).to_record())
    assert hook.__dict__["MAPPING"] == stranger.__dict__["MAPPING"]
    redirect_hooks(Checkout(other, original).to_record())
    own = {"autoaccum": str(PACKAGE_ROOT / "autoaccum")}
    assert hook.__dict__["MAPPING"] == {"pkg": str(other / "src/pkg"), "far": "/elsewhere/far"} | own
    assert hook.__dict__["NAMESPACES"] == {"space": [str(other / "app"), "/elsewhere"]}
    assert stranger.__dict__["MAPPING"]["pkg"] == str(original / "src/pkg")
    redirect_hooks(Checkout(other, PACKAGE_ROOT).to_record())
    assert hook.__dict__["MAPPING"]["autoaccum"] == str(PACKAGE_ROOT / "autoaccum")


WORKLOAD = """
import sys
import helper
import torch
from torch import nn

print("helper", helper.version, flush=True)

def model():
    sys.path.insert(0, {late!r})
    import late
    for name in ("late", "helper"):
        del sys.modules[name]
    return nn.Linear(2, 2)

def batch(size):
    return torch.randn(size, 2), torch.randn(size, 2)

criterion = nn.MSELoss()
"""


def test_a_child_imports_from_the_checkout_and_tells_what_it_could_not(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, other = places
    for number, place in enumerate(places):
        (place / "src/helper.py").write_text(f"version = {number}\n")
        (place / "app/model.py").write_text(WORKLOAD.format(late=str(original / "src/pkg")))
    (original / "src/pkg/late.py").write_text("")
    monkeypatch.syspath_prepend(original / "src")
    printed: list[str] = []
    settings = TrialSettings(
        reference="app/model.py", share=4, checkout=Checkout(other, original), on_output=printed.append
    )
    worker = Worker(settings, "cpu")
    try:
        with pytest.raises(
            NotMeasuredError,
            match=rf"^{original}/src/pkg/late.py is loaded, not from the rev.*puts {original}/src/pkg on",
        ):
            worker.inspect()
    finally:
        worker.end()
    assert "helper 1" in printed
