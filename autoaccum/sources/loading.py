"""Load a Workload from `model.py` or `model.py:name`, or make it of a framework's Trainer.

The adapter of a framework is found by the module of the Trainer's class, and imported only then: none is known here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from torch import nn

from autoaccum.checks import describe_type, join_words
from autoaccum.errors import AutoaccumError, UsageError, WorkloadError
from autoaccum.sources.module_names import module_files, package_root
from autoaccum.sources.overrides import OverridingLoader
from autoaccum.sources.samples import take_longest
from autoaccum.sources.token_costs import is_length_sequence
from autoaccum.sources.workload import Workload
from autoaccum.spec import Padding
from autoaccum.tracebacks import blame_workload


def _is_given(value: Any) -> bool:
    """Return whether a name is bound to more than an imported module, such as Hugging Face's `evaluate`."""
    return value is not None and not isinstance(value, ModuleType)


_PAIRS = (("split", "size"), ("outputs", "coupled_loss"))
"""Functions of which one alone has another meaning."""
_NOT_BY_NAME = {"model", "batch", "name", "path", "digest", "longest_of", "sample_lengths"}
_BY_NAME: Mapping[str, Callable[[Any], bool]] = {
    **{field.name: _is_given for field in dataclasses.fields(Workload) if field.name not in _NOT_BY_NAME},
    **{name: inspect.isfunction for pair in _PAIRS for name in pair},
    "accumulate": lambda value: _is_given(value) and value is not itertools.accumulate,
    **{name: inspect.isroutine for name in ("length", "trim")},
    "lengths": lambda value: inspect.isroutine(value) or is_length_sequence(value),
    "padding": lambda value: value in get_args(Padding),
    "batchnorm": lambda value: isinstance(value, str),
    "coupled": lambda value: isinstance(value, bool | str),
}
"""The fields that a file may define by name, and whether what has that name is meant."""

SAMPLES = 256
"""Samples of the dataset of which the longest make the batches, unless `longest_of` says otherwise."""

_ADAPTERS = {
    "transformers.trainer": "transformers_workload",
    "lightning.pytorch.trainer.trainer": "lightning_workload",
    "pytorch_lightning.trainer.trainer": "lightning_workload",
}
"""The module of a class named Trainer, and the adapter: a module with `PARTS` and `make_workload`."""


def load_workload(file: str, variable: str | None = None, overrides: Mapping[str, Any] | None = None) -> Workload:
    """Load the workload of a file, without its digest, with the overrides in place of its constants.

    The file defines `workload = autoaccum.Workload(...)`, or the fields of a Workload by their names. The variable is a
    Workload, a Trainer (see `workload_of`), or a model (function, class or instance) to be used in place of `model`.
    `batch` may be missing if there is a `dataset` (see `samples`). Of `coupled_loss`, `loss` and `criterion` the first
    counts, where one of them calls the other. A `batchnorm` that is not a string is ignored, and so is one of `split`
    and `size`, or of `outputs` and `coupled_loss`, without the other.

    Raises:
        UsageError: The file has no constant of the name of an override, or one of another type.
        WorkloadError: There is no such file or variable; its code raises; or it defines no usable workload.
    """
    is_name = variable is None or variable.isidentifier()
    if not file.strip() or not is_name or "\0" in file:
        reference = file if variable is None else f"{file}:{variable}"
        raise WorkloadError(
            f"{reprlib.repr(reference)} is not a reference to a workload",
            hint="write model.py or model.py:name",
        )
    path, name = _find_file(file), variable or ""
    check_import(path, name)
    return dataclasses.replace(_read(import_file(path, overrides), name, path), path=path)


def workload_of(
    trainer: Any, *, live: bool = False, names: Mapping[str, Any] | None = None, **parts: Any
) -> Workload | None:
    """Return the Workload of a Trainer, with batches of the longest samples; None if it is no Trainer.

    Args:
        trainer: The Trainer, which is not changed.
        live: Whether `model()` of the Workload shares the parameters and buffers of the Trainer's model, for trials in
            place, which restore them; if not, it returns a copy. A module of Lightning has its device only when its
            Trainer fits, so that it is always copied.
        names: The names of the file that defines the Trainer, among which the parts of Lightning are; a model that
            the Trainer moved to a card is moved back.
        parts: The parts that a Trainer of Lightning does not hold before it fits: `model`, `data` and `weight`.

    Raises:
        UsageError: Parts are given that the Trainer has itself.
        WorkloadError: The Trainer trains in a way that no trial can run.
    """
    of_trainer = (kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer" and kind.__module__ in _ADAPTERS)
    kind = next(of_trainer, None)
    if kind is None:
        return None
    adapter = importlib.import_module(f"autoaccum.integrations.{_ADAPTERS[kind.__module__]}")
    if others := [name for name in parts if name not in adapter.PARTS]:
        raise UsageError(
            f"a trainer is given, and {join_words(others)} too", hint="the trainer has its own: leave them out"
        )
    workload: Workload = adapter.make_workload(trainer, live=live, names=names, **parts)
    return take_longest(workload, SAMPLES)


def check_import(path: Path, name: str) -> None:
    """Raise WorkloadError if a file trains at its top level by the Trainer that it calls `name`, as an import would."""
    with suppress(SyntaxError, ValueError):  # The import will say so.
        for statement in ast.parse(path.read_bytes()).body:
            call: Any = getattr(statement, "value", None)
            trains = isinstance(call, ast.Call) and ast.unparse(call.func) in (f"{name}.train", f"{name}.fit")
            if trains and "trainer" in name.lower():
                raise WorkloadError(
                    f"importing {path.name} trains: line {statement.lineno} calls {ast.unparse(call)}",
                    hint='put that line under if __name__ == "__main__":',
                )


def _find_file(target: str) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        raise WorkloadError(f"{target} is a directory", hint="name a Python file")
    if not path.exists():
        raise WorkloadError(f"there is no file {target}", hint=f"check the path {path.resolve()}")
    if path.suffix != ".py":
        raise WorkloadError(f"{target} is not a Python file", hint="give a file that ends in .py")
    return path.resolve()


def _read(module: ModuleType, name: str, path: Path) -> Workload:
    label, title = path.name, f"{path.stem}:{name}" if name else path.stem
    if name and not hasattr(module, name):
        raise WorkloadError(f"{label} has no {name!r}", hint=f"use a name that it defines: {_list_names(module, path)}")
    chosen = getattr(module, name) if name else vars(module).get("workload")
    chosen = None if isinstance(chosen, ModuleType) and not name else chosen
    if isinstance(chosen, Workload):
        title = title if chosen.name == "workload" else chosen.name
        return dataclasses.replace(chosen, name=title)
    if (trained := workload_of(chosen, names=vars(module))) is not None:
        return dataclasses.replace(trained, name=title)
    is_model = callable(chosen) and (not isinstance(chosen, type) or issubclass(chosen, nn.Module))
    if chosen is not None and not (name and is_model):
        raise WorkloadError(
            f"{name or 'workload'} in {label} is {describe_type(chosen)}, neither a workload nor a model",
            hint="name an autoaccum.Workload, an nn.Module, its class, a function that returns one, or a Trainer of"
            " transformers or Lightning",
        )
    model = _require(module, "model", path) if chosen is None else chosen
    fields: dict[str, Any] = {
        key: value for key, is_meant in _BY_NAME.items() if is_meant(value := getattr(module, key, None))
    }
    for first, second in _PAIRS:
        if (first in fields) != (second in fields):
            del fields[first if first in fields else second]
    losses = [key for key in ("coupled_loss", "loss", "criterion") if key in fields]
    for other in losses[1:]:
        _check_unused(path, losses[0], other)
        del fields[other]
    if "dataset" not in fields or hasattr(module, "batch"):
        fields["batch"] = _require(module, "batch", path)
    return Workload(model=model, name=title, **fields)


def _check_unused(path: Path, counts: str, other: str) -> None:
    """Raise WorkloadError if a file binds the name `other`, but reads neither it nor that of the loss that counts."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = [(node.id, type(node.ctx)) for node in nodes if isinstance(node, ast.Name)]
    binds = (other, ast.Store) in names or any(isinstance(n, ast.FunctionDef) and n.name == other for n in nodes)
    if binds and not {(other, ast.Load), (counts, ast.Load)} & set(names):
        raise WorkloadError(
            f"{path.name} defines both {counts} and {other}, of which {counts} counts, and neither calls the other",
            hint=f"remove {other}, or give it another name",
        )


def _require(module: ModuleType, name: str, path: Path) -> Any:
    value = getattr(module, name, None)
    if _is_given(value):
        return value
    forms = {
        "model": "def model(): return a new nn.Module; or name what it defines: model.py:name",
        "batch": "def batch(size): return a batch of that many samples",
    }
    description = f"{name} in {path.name} is a module" if value is not None else f"{path.name} defines no {name!r}"
    raise WorkloadError(
        f"{description} (it defines {_list_names(module, path)})",
        hint=f"write {forms[name]}; or run it as a command: -- python {path.name} ...",
    )


def _list_names(module: ModuleType, path: Path) -> str:
    """List what a file defines, without what it imports."""
    imports = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    names = [name for name in vars(module) if not name.startswith("_") and name not in imported]
    return ", ".join(names[:12]) or "nothing"


_PREFIX = "_autoaccum_workload_"

_loaded: set[str] = set()
"""The user's modules in `sys.modules`; the next load removes them, so that a changed file is read again."""


def import_file(path: Path, overrides: Mapping[str, Any] | None = None) -> ModuleType:
    """Run the file at `path` as a module, again at each call, with the overrides in place of its constants.

    In a package, it is imported under its full dotted name. Elsewhere its directory becomes the first on `sys.path`, so
    that it can import the files next to it. The module stays in `sys.modules`, as dataclasses and pickle need, and the
    path stays on `sys.path` for later imports.

    Raises:
        WorkloadError: It cannot be compiled, or raises.
    """
    root = package_root(path)
    if root is None:
        with _importing(path.name, [path.parent]):
            name = _PREFIX + path.stem.replace(".", "_")
            loader = OverridingLoader(name, path, overrides) if overrides else None
            spec: Any = importlib.util.spec_from_file_location(name, path, loader=loader)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    dotted = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    with _importing(path.name, [root], [path.parent]), ExitStack() as stack:
        if overrides:
            finder: Any = OverridingLoader(dotted, path, overrides)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        return importlib.import_module(dotted)


@contextmanager
def _importing(label: str, first: Sequence[Path], last: Sequence[Path] = ()) -> Iterator[None]:
    """Import the user's modules with these directories on `sys.path`; restore it on failure, and write no bytecode."""
    while _loaded:
        sys.modules.pop(_loaded.pop(), None)
    before, path, bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [str(folder) for folder in first if str(folder) not in sys.path[:1]]
    sys.path.extend(str(folder) for folder in last if str(folder) not in sys.path)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    except BaseException as error:
        sys.path[:] = path
        shown_error = _translate(error, label)
        if shown_error is error:
            raise
        raise shown_error from error
    finally:
        sys.dont_write_bytecode = bytecode
        _loaded.update(name for name in set(sys.modules) - before if _is_local(name, [*first, *last]))


def _translate(error: BaseException, label: str) -> BaseException:
    if isinstance(error, AutoaccumError | KeyboardInterrupt | MemoryError):
        return error
    if isinstance(error, SyntaxError):
        line = f"{Path(error.filename).name if error.filename else label}, line {error.lineno}"
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        hint = "correct the syntax error"
        return WorkloadError(f"{line} is not valid Python ({error.msg})", hint=hint, user_traceback=shown)
    guard = 'put code that runs as a script under if __name__ == "__main__"'
    return blame_workload(error, f"importing {label}", hint=guard if isinstance(error, SystemExit) else None)


def _is_local(name: str, folders: list[Path]) -> bool:
    """Return whether a module lies below `folders` and is neither installed nor a part of autoaccum."""
    files = module_files(sys.modules.get(name))
    if name.partition(".")[0] == "autoaccum" or any("-packages" in file for file in files):
        return False
    return any(folder in (Path(file), *Path(file).parents) for folder in folders for file in files)
