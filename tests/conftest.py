"""Shared by all tests: one thread per process, settings of Hypothesis, and the only check for a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from example_counts import FULL
from hypothesis import settings
from warm_children import nurseries, warm_children, warm_python, warm_ranks

from autoaccum.devices.device_choice import has_nvidia_gpu
from autoaccum.devices.installed_torch import read_torch_release

__all__ = ["command", "nurseries", "warm_children", "warm_python", "warm_ranks"]

# Not part of README's second command: `.ci/run` installs these libraries in its second environment.
collect_ignore = [] if find_spec("timm") else ["libraries"]

# Set before torch is imported, here and in child processes: on few cores, the threads of several test processes
# would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of child processes import the package: compile it once, also where a container says not to.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A background job of a shell ignores SIGINT, and nohup ignores SIGHUP; child processes would inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# CI runs the same examples for every change; elsewhere each run tries others.
for name, examples in (("push", 15), ("full", FULL)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI"))
    )
settings.load_profile("push")


_FROZEN = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def light_collections(request: pytest.FixtureRequest) -> None:
    """Leave what has been imported out of collections of garbage: with all of PyTorch, each would take 0.1 s."""
    imported = len(sys.modules)
    if imported > request.config.stash.get(_FROZEN, 0) + 50:
        gc.collect()
        gc.freeze()
        request.config.stash[_FROZEN] = imported


@pytest.fixture(scope="module")
def write_workload(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Write a workload file into a new folder and return its path."""

    def write(source: str) -> str:
        path = tmp_path_factory.mktemp("workload") / "model.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the test module's MODEL as a file."""
    (tmp_path / "model.py").write_text(request.module.MODEL)
    return tmp_path


_DESELECTED = pytest.StashKey[dict[str, int]]()
_OUTPUT = "deselected"
_MEASURED = Path(__file__).parent / "gpu" / "data"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the options that pyproject.toml sets for plugins that are not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "for pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "without_gpu: shows what happens without a CUDA card")
    config.addinivalue_line("markers", "no_table: needs measurements on cards, and is left out if there are none")
    config.addinivalue_line("markers", "needs_torch(major, minor): needs this release of torch, or a newer one")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each worker begin with other folders, since what one has compiled another need not compile."""
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        inside = (path for path in Path(__file__).parent.iterdir() if path.name not in collect_ignore)
        folders = sorted(str(path) for path in inside if path.name[0] not in "._" and path.name != "conftest.py")
        first = int(worker["workerid"][2:]) * len(folders) // worker["workercount"]
        config.args = [*folders[first:], *folders[:first]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with slow files; deselect what the card or the torch here cannot run."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # What runs last is short, so that all workers end together. All have the same order, wherever they began.
    items.sort(key=lambda item: (item.path not in slow, item.path))
    unmeasured = [item for item in items if item.get_closest_marker("no_table")]
    if unmeasured:
        items[:] = [item for item in items if item not in unmeasured]
        config.hook.pytest_deselected(items=unmeasured)
    cards = count_cuda_cards()
    lacking = [item for item in items if cards < needed_cards(item)]
    early = [
        item for item in items if any(mark.args > read_torch_release() for mark in item.iter_markers("needs_torch"))
    ]
    dropped = [*lacking, *early, *(item for item in items if cards and item.get_closest_marker("without_gpu"))]
    if not dropped:
        return
    items[:] = [item for item in items if item not in set(dropped)]
    config.stash[_DESELECTED] = {"gpu": len(lacking), "torch": len(early)}
    config.hook.pytest_deselected(items=dropped)


def needed_cards(item: pytest.Item) -> int:
    """Return 1 for a test marked `gpu`, N for one marked `gpu(cards=N)`, else 0."""
    marker = item.get_closest_marker("gpu")
    return 0 if marker is None else int(marker.kwargs.get("cards", 1))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report to the controller of pytest-xdist, which collects no tests itself."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = session.config.stash.get(_DESELECTED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get(_OUTPUT, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(_DESELECTED, {})
    if count := counts.get("gpu"):
        terminalreporter.write_line(
            f"gpu: {count} tests deselected, too few CUDA cards here: see tests/gpu/README.md", yellow=True
        )
    if count := counts.get("torch"):
        terminalreporter.write_line(f"torch: {count} tests deselected, they need a newer release", yellow=True)
    if collect_ignore:
        terminalreporter.write_line(
            "libraries: tests/libraries left out, timm is not here: pip install -e '.[test,libraries]'", yellow=True
        )
    if not any(_MEASURED.glob("*.json")):
        terminalreporter.write_line(
            "gpu: no measurements of a card are committed: see tests/gpu/README.md", yellow=True
        )


def count_cuda_cards() -> int:
    """Return how many CUDA cards PyTorch can use; it is imported only if the driver finds one."""
    if not has_nvidia_gpu():
        return 0
    import torch

    return torch.cuda.device_count()
