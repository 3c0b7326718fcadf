from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autoaccum.devices.checkout import Checkout
from autoaccum.devices.process import PACKAGE_ROOT
from autoaccum.devices.strays import explain_stray

CHILD = """
import importlib.util, json, os, runpy, sys
for name in sys.argv[3:]:
    __import__(name)
from autoaccum.devices.strays import Strays
from autoaccum.errors import NotMeasuredError

def load(file, name="net"):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

strays = Strays(json.loads(sys.argv[1]))
strays.check()
exec(sys.argv[2])
try:
    strays.check()
except NotMeasuredError as error:
    print(error)
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The user's repository, and another checkout of it."""
    for name in ("original", "other"):
        (tmp_path / name / "src/pkg").mkdir(parents=True)
        for file in ("__init__.py", "net.py", "script", "table.yaml", "kernel.cu"):
            (tmp_path / name / "src/pkg" / file).write_text("")
    return tmp_path / "original", tmp_path / "other"


def ran(places: tuple[Path, Path], code: str, *imported: str, **environment: str) -> str:
    """What a child says that runs `code`."""
    record = Checkout(places[1], places[0]).to_record()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(record), code, *imported],
        capture_output=True,
        cwd=places[1],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "PYTHONDONTWRITEBYTECODE": "", **environment},
        text=True,
    )
    return done.stdout + done.stderr


WAYS = {
    "a module that sys.modules never has": "load('NET')",
    "one that it has no more": "sys.modules['pkg'] = load('NET')\ndel sys.modules['pkg']",
    "source": "exec(open('NET').read())",
    "source that is read in another way": "exec(os.read(os.open(b'NET', os.O_RDONLY), 99))",
    "source in another folder": "os.chdir('PKG')\nexec(open('net.py').read())",
    "a script": "runpy.run_path('NET')",
    "a script without a suffix": "runpy.run_path('PKG/script')",
    "source to be compiled": "open('PKG/kernel.cu').close()",
    "machine code": "import ctypes\ntry:\n    ctypes.CDLL('PKG/none.so')\nexcept OSError:\n    pass",
    "an extension": "try:\n    load('PKG/none.abi3.so')\nexcept ImportError:\n    pass",
}


@pytest.mark.parametrize("way", WAYS)
def test_code_of_the_users_own_folders_is_heard_of(places: tuple[Path, Path], way: str) -> None:
    package = places[0] / "src/pkg"
    said = ran(places, WAYS[way].replace("NET", str(package / "net.py")).replace("PKG", str(package)))
    assert said.startswith(f"{package}/")
    assert " is loaded, not from the revision that is to be measured, by an absolute path in the code or as an" in said
    assert said.count("\n") == 1
    assert said.endswith(
        ": have the path start from Path(__file__), and name a revision that has it so; or uninstall what is installed,"
        f" and set PYTHONPATH={places[0]}/src\n"
    )


def test_a_cache_is_code_too_wherever_it_lies(places: tuple[Path, Path], tmp_path: Path) -> None:
    """With a cache elsewhere nobody opens the source, and one without a source is opened itself."""
    load = f"load({str(places[0] / 'src/pkg/net.py')!r})"
    for _ in ("made", "used"):
        assert "src/pkg/net.py is loaded" in ran(places, load, PYTHONPYCACHEPREFIX=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("net*.pyc"))
    bare = f"import py_compile\nload(py_compile.compile({str(places[1] / 'src/pkg/net.py')!r}, 'FILE'))"
    assert "src/bare.pyc is loaded" in ran(places, bare.replace("FILE", str(places[0] / "src/bare.pyc")))


def test_what_is_in_a_zip_file_is_code(places: tuple[Path, Path]) -> None:
    archive = places[0] / "late.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("late.py", "")
    said = ran(places, f"sys.path.insert(0, {str(archive)!r})\nimport late")
    assert f"{archive}/late.py is loaded" in said
    assert f"since the workload puts {archive} on sys.path: have that path start from Path(__file__)" in said


def test_what_was_imported_before_is_heard_of(places: tuple[Path, Path]) -> None:
    said = ran(places, "", "pkg.net", PYTHONPATH=os.pathsep.join([str(PACKAGE_ROOT), str(places[0] / "src")]))
    assert f"NotMeasuredError: {places[0]}/src/pkg/__init__.py is loaded, not from" in said


def test_what_the_revision_has_and_data_and_environments_are_no_strays(places: tuple[Path, Path]) -> None:
    original, other = places
    inside = original / ".venv/lib/python3.11/site-packages/far.py"
    inside.parent.mkdir(parents=True)
    inside.write_text("")
    (original / "script").symlink_to(other / "src/pkg/net.py")
    code = f"""
sys.path[:0] = ["src", {str(inside.parent)!r}]
import email.message, linecache, inspect, pkg.net, far
assert pkg.net.__file__ == {str(other / "src/pkg/net.py")!r}, pkg.net
linecache.getlines(pkg.net.__file__)
inspect.getsourcefile(pkg.net)
runpy.run_path({str(original / "script")!r})
open({str(original / "src/pkg/table.yaml")!r}).close()
exec("x = 1")
for wrong in ("\\0.py", 99):
    try:
        open(wrong)
    except (OSError, ValueError):
        pass
"""
    assert ran(places, code) == ""
    record = Checkout(other, PACKAGE_ROOT).to_record()
    assert record["original"] == str(PACKAGE_ROOT)
    assert ran((PACKAGE_ROOT, other), "import autoaccum.units, autoaccum.guarding.judgements") == ""


def test_the_way_out_is_that_of_the_way_in(places: tuple[Path, Path], tmp_path: Path) -> None:
    original, other = places
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "pkg").symlink_to(original / "src/pkg")
    (installed / "alias").symlink_to(original / "src/pkg")
    (other / "net.py").symlink_to(original / "src/pkg/net.py")
    (tmp_path / "home").symlink_to(original)
    said = {
        str(path): str(explain_stray(str(path), str(original), str(other)))
        for path in (
            installed / "pkg/net.py",
            installed / "alias/net.py",
            other / "net.py",
            tmp_path / "home/src/pkg/net.py",
        )
    }
    missed = "not from the revision that is to be measured"
    assert list(said.values()) == [
        f"{installed}/pkg is a symbolic link to {original}/src/pkg, {missed}: set PYTHONPATH={original}/src",
        f"{installed}/alias is a symbolic link to {original}/src/pkg, {missed}: set PYTHONPATH to a folder of the"
        " repository that has it by the name alias",
        f"net.py is a symbolic link to {original}/src/pkg/net.py, {missed}: link it by a relative path, and name a"
        " revision that has it so",
        f"{original}/src/pkg/net.py is loaded, {missed}, by an absolute path in the code or as an editable installation"
        " has it: have the path start from Path(__file__), and name a revision that has it so; or uninstall what is"
        f" installed, and set PYTHONPATH={original}/src",
    ]
