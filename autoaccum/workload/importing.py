"""Run a Python file, or import a module, as the user's own, with what lies beside it; and a digest over all that."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.workload.tracebacks import blame_workload

_PREFIX = "_autoaccum_workload_"

_loaded: set[str] = set()
"""The user's modules in `sys.modules`; the next load drops them, so that a changed file is read again."""


def import_file(path: Path) -> ModuleType:
    """Run the file at `path` as a module, anew each time.

    Beside an `__init__.py` it is imported under its true dotted name. Elsewhere its directory goes first on `sys.path`,
    so that `import x` finds what lies beside it. Either way it is found in `sys.modules`, as dataclasses and pickle
    want; both stay so, for what the workload imports late.

    Raises:
        WorkloadError: It cannot be compiled, or raises.
    """
    root = _package_root(path)
    if root is None:
        with _user_code(path.name, [path.parent]):
            return _run(_PREFIX + path.stem.replace(".", "_"), path)
    dotted = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    with _user_code(path.name, [root], [path.parent]):
        return importlib.import_module(dotted)


def import_dotted(name: str) -> ModuleType:
    """Import the module `name`, with the current directory first on `sys.path`.

    Raises:
        WorkloadError: There is no such module, it cannot be compiled, or it raises.
    """
    try:
        with _user_code(name, [Path.cwd()]):
            return importlib.import_module(name)
    except WorkloadError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise
        raise WorkloadError(
            f"there is no module {missing!r}",
            hint=f"give a file such as model.py, or a module that can be imported from {Path.cwd()}",
        ) from None


def _run(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _user_code(called: str, first: Sequence[Path], last: Sequence[Path] = ()) -> Iterator[None]:
    """Import the user's modules with these directories on `sys.path`; undone on failure. Writes no bytecode."""
    while _loaded:
        sys.modules.pop(_loaded.pop(), None)
    before, path, bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [str(place) for place in first if str(place) not in sys.path[:1]]
    sys.path.extend(str(place) for place in last if str(place) not in sys.path)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    except BaseException as error:
        sys.path[:] = path
        translated = _translated(error, called)
        if translated is error:
            raise
        raise translated from error
    finally:
        sys.dont_write_bytecode = bytecode
        _loaded.update(name for name in set(sys.modules) - before if _is_local(name, [*first, *last]))


def _translated(error: BaseException, called: str) -> BaseException:
    if isinstance(error, AutoaccumError | KeyboardInterrupt | MemoryError):
        return error
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename).name if error.filename else called}, line {error.lineno}"
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        return WorkloadError(f"{place} is not valid Python ({error.msg})", hint="correct it", user_traceback=shown)
    if isinstance(error, SystemExit):
        return blame_workload(
            error, f"importing {called}", hint='put what runs as a script under if __name__ == "__main__"'
        )
    return blame_workload(error, f"importing {called}")


def _package_root(path: Path) -> Path | None:
    """The directory above the outermost package that `path` belongs to; None beside no `__init__.py`."""
    place = path.parent
    while (place / "__init__.py").is_file() and place != place.parent:
        place = place.parent
    return None if place == path.parent else place


def _is_local(name: str, places: list[Path]) -> bool:
    """Whether a module came from below `places`, and is neither installed nor autoaccum's own."""
    module = sys.modules[name]
    found = [*getattr(module, "__path__", []), getattr(module, "__file__", None) or ""]
    installed = name.partition(".")[0] == "autoaccum" or any("-packages" in str(file) for file in found)
    return not installed and any(
        place in Path(file).parents or place == Path(file) for place in places for file in found
    )


def digest_sources(path: Path) -> str:
    """SHA-256 over the file at `path` and, transitively, the modules it imports from beside it or from its package.

    Read from the import statements, wherever they stand, so it does not depend on what a process has imported before;
    a module imported by other means does not count. Independent of where the directory lies.
    """
    top = _package_root(path) or path.parent
    found, waiting = set[Path](), [path]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file() or top not in file.parents or "-packages" in str(file.relative_to(top)):
            continue
        found.add(file)
        waiting += [place / "__init__.py" for place in file.parents if top in place.parents]
        waiting += _imported(file, top)
    digest = hashlib.sha256()
    for file in sorted(found, key=lambda file: file.relative_to(top).as_posix()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(os.fsencode(f"{file.relative_to(top).as_posix()}\0{content}\n"))
    return digest.hexdigest()


def _imported(file: Path, top: Path) -> Iterator[Path]:
    """Where the modules would be that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, level = [alias.name for alias in node.names], 0
        elif isinstance(node, ast.ImportFrom):
            base, level = node.module or "", node.level
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        places = file.parents[level - 1 : level] if level else [top, file.parent]
        for stem in (place.joinpath(*name.split(".")) for place in places for name in names):
            yield stem / "__init__.py"
            yield stem.parent / f"{stem.name}.py"
