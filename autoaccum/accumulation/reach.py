"""What the user's own code reaches: modules and generators, by reading only; no object of a library is looked into."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.copies import MAPPINGS, SEQUENCES
from autoaccum.accumulation.digest import tensor_hooks
from autoaccum.accumulation.randomness import GENERATORS, Generator

_DEPTH = 6
_PLAIN = (bool, int, float, str, type(None))
_REGISTERED = ("_parameters", "_buffers", "_modules")
_LISTED = ("param_groups", "state", "defaults")
_LIBRARIES = ("torch", "autoaccum")
"""Theirs wherever they lie, as in a checkout."""

_FOLDERS = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib")]


def is_users(kind: type) -> bool:
    """Whether a class is the user's own: defined in no installed library, nor in Python's."""
    top = kind.__module__.partition(".")[0]
    if top == "__main__":  # Of `python -m tool`, too, which runs the user's code.
        return True
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or _is_users_file(file)


def find_methods(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Those that the user's own classes of `modules` define."""
    for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
        if is_users(kind):
            yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def find_reachable(
    functions: Iterable[Any], held: Iterable[tuple[str, Any]] = ()
) -> tuple[dict[str, nn.Module], list[Generator]]:
    """The modules (by a name) and generators that `functions` hold in closures, defaults, attributes or globals.

    Not found: what is deep in other objects or in a library's, or reached by names that are put together at run time.

    Args:
        functions: The user's; None among them is passed over.
        held: More of them, or anything that may lead there, by name: see `find_held`.
    """
    modules: dict[str, nn.Module] = {}
    generators: dict[int, Generator] = {}
    seen: set[int] = set()
    waiting = [("criterion" if isinstance(function, nn.Module) else "", function, 0) for function in functions]
    waiting += [(name, node, 0) for name, node in held]
    while waiting:
        name, node, depth = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        with suppress(Exception):  # Raised by code of the node's own: a dead proxy, a lazy object.
            if isinstance(node, nn.Module):
                modules[name if name not in modules else f"{name} {len(modules)}"] = node
            elif isinstance(node, GENERATORS):
                generators[id(node)] = node
            elif depth < _DEPTH:
                waiting.extend([(inner or name, value, depth + 1) for inner, value in _inside(node)])
    return modules, list(generators.values())


def find_held(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Any]]:
    """What a model and its optimizer keep in Python, by name: hooks, and attributes that are not registered."""
    for path, module in model.named_modules():
        yield from _kept(vars(module), _REGISTERED, f"{path}." if path else "")
    for parameter in model.parameters():
        yield from (("hook", hook) for hooks in tensor_hooks(parameter) for hook in _values(hooks))
    if optimizer is not None:
        yield from _kept(vars(optimizer), _LISTED, "optimizer.")


def _kept(attributes: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if name.endswith("_hooks"):
            yield from (("hook", hook) for hook in _values(value))
        elif name not in known and type(value) not in _PLAIN:
            yield f"{prefix}{name}", value


def _values(mapping: Any) -> list[Any]:
    return list(mapping.values()) if type(mapping) in MAPPINGS else []


def _inside(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, functools.partial):
        yield from [("", node.func), *(("", value) for value in node.args), *node.keywords.items()]
    elif isinstance(node, MethodType):
        yield from [("", node.__self__), ("", node.__func__)]
    elif isinstance(node, FunctionType):
        yield from _of_function(node)
    elif isinstance(node, tuple) or type(node) in SEQUENCES:
        yield from (("", value) for value in node if len(node) <= 64)
    elif type(node) in MAPPINGS:
        yield from ((str(key), value) for key, value in node.items() if len(node) <= 64)
    elif not isinstance(node, type) and is_users(type(node)):
        yield from getattr(node, "__dict__", {}).items()


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Of a library's function only what it was given: a decorator holds the user's."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", value
    if _is_users_file(function.__code__.co_filename):
        for name in code_names(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]


def code_names(code: CodeType) -> Iterator[str]:
    """Globals and attributes that a function's code names, those within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)


@functools.cache
def _is_users_file(file: str) -> bool:
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.resolve().is_relative_to(folder) for folder in _FOLDERS)
