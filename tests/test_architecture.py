"""The house: imports run one way, heavy libraries stay in their rooms, and importing us loads none of them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import autoaccum

PACKAGE = Path(autoaccum.__file__).parent
ROWS = (
    {"errors"},
    {"units", "checks", "files", "tracebacks", "sharded_tensors"},
    {"sentences"},
    {"messages"},
    {"serialization"},
    {"spec"},
    {"options"},
    {"sources"},
    {"accumulation"},
    {"simulation"},
    {"devices"},
    {"planning"},
    {"training"},
    {"verification", "tuning", "guarding"},
    {"reporting"},
    {"api", "integrations"},
    {"cli", "pytest_plugin"},
)
LEVEL = {room: level for level, row in enumerate(ROWS) for room in row}
HOMES: dict[str, str | tuple[str, ...]] = {
    "click": "cli",
    "optuna": "tuning",
    "msgspec": ("serialization.py", "planning/plan_record.py"),
    "pynvml": "devices/nvml.py",
    "rich": "reporting",
    "matplotlib": "reporting/figures",
    "transformers": "integrations",
    "accelerate": "integrations",
    "lightning": "integrations",
}
WITHOUT_TORCH = (
    "errors.py",
    "units.py",
    "messages.py",
    "sentences.py",
    "accumulation/coupling.py",
    "accumulation/schedule.py",
    "planning/search.py",
    "planning/plan_record.py",
    "verification/verification_result.py",
    "simulation/allocator/caching_allocator.py",
    "simulation/allocator/blocks.py",
    "simulation/allocator/recording.py",
    "devices/simulated/breakdown.py",
    "devices/simulated/recorded_update.py",
    "simulation/cards.py",
    "simulation/tracing/trace_scaling.py",
    "simulation/allocator/replay.py",
    "simulation/operators/reductions.py",
    "simulation/operators/operator_call.py",
    "simulation/operators/workspace_sizes.py",
    "devices/child/import_paths.py",
    "devices/explanation.py",
    "devices/simulated/explainer.py",
    "simulation/trace_records.py",
    "guarding/",
    "pytest_plugin.py",
    "tuning/tuning_records.py",
    "tuning/study.py",
    "sources/module_names.py",
)
MODULES = sorted(set(PACKAGE.rglob("*.py")) - set(PACKAGE.glob("models/*")))  # Those are no modules, but files to load.


@cache
def modules_imported(path: Path) -> tuple[str, ...]:
    return tuple(_modules_imported(path))


def _modules_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write autoaccum.…"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def is_pure(where: str) -> bool:
    """Whether a file is listed, or lies in a listed folder."""
    return any(where == pure or (pure.endswith("/") and where.startswith(pure)) for pure in WITHOUT_TORCH)


def test_imports_run_one_way() -> None:
    wrong = []
    for path in MODULES:
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in LEVEL, f"{room} is no room of the house: give it a place in ROWS"
        for name in modules_imported(path):
            head, *rest = name.split(".")
            if head == "autoaccum" and rest and rest[0] in LEVEL and rest[0] != room and LEVEL[rest[0]] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}: {rest[0]} does not lie below {room}")
    assert wrong == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not even where types alone need it, within a function, or by name."""
    files = {".".join(("autoaccum", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in MODULES}
    imported = {name: set(modules_imported(path)) & files.keys() - {name} for name, path in files.items()}
    TopologicalSorter(imported).prepare()  # Raises CycleError, which names them.


def test_simulation_could_be_a_library_of_its_own() -> None:
    known = {"simulation", "checks", "errors", "units", "messages", "sentences", "serialization", "sharded_tensors"}
    known |= {"tracebacks"}
    rooms = {
        name.split(".")[1]
        for path in (PACKAGE / "simulation").rglob("*.py")
        for name in modules_imported(path)
        if name.startswith("autoaccum.")
    }
    assert rooms <= known


def test_no_two_folders_side_by_side_import_each_other() -> None:
    pairs = set()
    for path in MODULES:
        folders = ("autoaccum", *path.relative_to(PACKAGE).parent.parts)
        for name in modules_imported(path):
            parts = tuple(name.split("."))
            for depth in range(1, min(len(folders), len(parts))):
                if parts[:depth] == folders[:depth] and PACKAGE.joinpath(*parts[1 : depth + 1]).is_dir():
                    pairs.add((folders[: depth + 1], parts[: depth + 1]))
    assert {(one, other) for one, other in pairs if one < other and (other, one) in pairs} == set()


def test_libraries_stay_in_their_rooms() -> None:
    wrong = []
    for path in MODULES:
        where = path.relative_to(PACKAGE).as_posix()
        for library in {name.split(".")[0] for name in modules_imported(path)}:
            if library in HOMES and not where.startswith(HOMES[library]):
                wrong.append(f"{where} imports {library}: its place is {HOMES[library]}")
            if library in ("torch", "numpy") and is_pure(where):
                wrong.append(f"{where} is pure and imports {library}")
    assert wrong == []


def test_what_is_listed_as_pure_is_there() -> None:
    assert [pure for pure in WITHOUT_TORCH if not (PACKAGE / pure).exists()] == []


LOADED = "import sys; print([m for m in ('torch', 'numpy', 'optuna', 'pynvml') if m in sys.modules])"


@pytest.mark.parametrize(
    "statement",
    [
        "import autoaccum; dir(autoaccum); autoaccum.Plan; autoaccum.plan; autoaccum.fit; autoaccum.guard",
        "import autoaccum.accumulation.schedule, autoaccum.planning.search, autoaccum.planning.planner",
        "import autoaccum.guarding.guard_run, autoaccum.reporting.guard_report, autoaccum.reporting.emit",
    ],
)
def test_light_imports_load_nothing_heavy(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{LOADED}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_are_what_they_say() -> None:
    for name in autoaccum.__all__:
        assert getattr(autoaccum, name) is not None
    importlib.import_module("autoaccum.planning.planner")
    assert callable(autoaccum.plan), "a room must not replace the function of a like name"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = autoaccum.nonsense
