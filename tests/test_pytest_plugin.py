"""The fixture `assert_fits`, in sessions of pytest that know it by its entry point, as where autoaccum is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_classifier import layers_file

import autoaccum

ROOT = Path(autoaccum.__file__).parents[1]
MODEL = layers_file(64, "WIDTH", 8)
TESTS = """
import sys
import pytest

@pytest.mark.parametrize("size", [32])
class TestIt:
    def test_fits(self, assert_fits, size):
        assert_fits("beside.py", gpu="rtx3090", micro_batch=size, limit="1GiB")
        assert "torch" not in sys.modules

def test_does_not(assert_fits):
    assert_fits("model.py", gpu="rtx3090", micro_batch=4000, limit="128MiB")

def test_raises(assert_fits):
    assert_fits("raises.py", gpu="rtx3090", micro_batch=2)

def test_is_nowhere(assert_fits):
    assert_fits("nowhere.py", gpu="rtx3090", micro_batch=2)

def test_is_asked_wrongly(assert_fits):
    assert_fits("model.py", gpus="rtx3090", micro_batch=2)

def test_is_asked_by_the_name_that_a_plan_has(assert_fits):
    assert_fits("model.py", gpu="rtx3090", micro_batch=2, memory="1MiB")

def test_is_asked_for_nothing(assert_fits):
    assert_fits(None, gpu="rtx3090", micro_batch=2)
"""
WARM = """
import pytest
from warm_children import nurseries, warm_children

@pytest.fixture(autouse=True)
def warm(warm_children):
    pass
"""
UNUSED = """
import sys

HEAVY = {"torch", "numpy", "optuna", "rich", "click"}

def test_nothing_is_loaded():
    assert not HEAVY & set(sys.modules)
    assert not [name for name in sys.modules if name.startswith("autoaccum.") and name != "autoaccum.pytest_plugin"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says what pyproject.toml says of plugins, as an installation would."""
    told = re.search(r"\[project\.entry-points\.pytest11\]\n(.+)\n", (ROOT / "pyproject.toml").read_text())
    assert told is not None
    folder = tmp_path_factory.mktemp("installed")
    record = folder / "autoaccum_here-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: autoaccum-here\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[pytest11]\n{told[1].replace(chr(34), '')}\n")
    return folder


def run_pytest(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(ROOT), str(ROOT / "tests/shared"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(folder), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, installed: Path, warm_children: None) -> str:
    """What pytest says of `TESTS`, in a worker."""
    folder = tmp_path_factory.mktemp("project")
    model, tests = folder / "model.py", folder / "tests"
    tests.mkdir()
    model.write_text(f"WIDTH = 4096\n{MODEL}")
    (tests / "beside.py").write_text(f"WIDTH = 64\n{MODEL}")
    (tests / "raises.py").write_text(f"WIDTH = 64\n{MODEL}".replace("return torch", "return 1 / 0, torch"))
    (tests / "conftest.py").write_text(WARM)
    (tests / "test_them.py").write_text(TESTS)
    done = run_pytest(folder, installed, "-n", "1", "-q", "-rA")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def told_of(test: str, outcome: str) -> str:
    """What is shown of a failure."""
    found = re.search(rf"_+ {re.escape(test)} _+\n(.*?)\n(?=___|===)", outcome, re.DOTALL)
    assert found is not None, outcome
    return re.sub(r"^\[gw\d\].*\n", "", found[1])


@pytest.mark.slow
def test_what_fits_passes_and_the_rest_fails(outcome: str) -> None:
    assert "6 failed, 1 passed" in outcome
    assert re.search(r"PASSED .*TestIt::test_fits", outcome)


@pytest.mark.slow
def test_a_failure_says_what_is_needed_and_what_would_fit(outcome: str) -> None:
    told = told_of("test_does_not", outcome)
    needed = r"micro-batch 4000 does not fit: it needs at least \d+ MiB, 128 MiB are available"
    assert re.fullmatch(rf"model\.py --gpu rtx3090 .*: {needed}: take \d+, the largest that fits, or .*", told.strip())


@pytest.mark.slow
def test_what_cannot_be_measured_fails_with_its_sentence(outcome: str) -> None:
    told = told_of("test_raises", outcome)
    assert "raises.py" in told
    assert re.search(r"ZeroDivisionError", told)
    assert "return 1 / 0" in told, "the user's own frames"
    assert re.match(r"there is no file nowhere\.py in .* or in .*tests: ", told_of("test_is_nowhere", outcome))
    assert told_of("test_is_asked_wrongly", outcome).startswith("there is no argument 'gpus': ")
    by_another_name = told_of("test_is_asked_by_the_name_that_a_plan_has", outcome)
    assert by_another_name.startswith("there is no argument 'memory': the budget is limit=")
    assert told_of("test_is_asked_for_nothing", outcome).startswith("the workload is None: ")
    assert "autoaccum/pytest_plugin.py" not in outcome


def test_unused_it_loads_nothing(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "test_unused.py").write_text(UNUSED)
    done = run_pytest(tmp_path, installed, "-q")
    assert done.returncode == 0, done.stdout + done.stderr
