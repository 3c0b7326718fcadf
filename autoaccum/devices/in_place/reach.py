"""Modules and generators that the user's functions reach: a teacher in a closure, a generator in a global."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from autoaccum.accumulation.randomness import GENERATORS, Generator

_DEPTH = 3


def find_reachable(functions: Iterable[Any]) -> tuple[dict[str, nn.Module], list[Generator]]:
    """The modules (by a name) and generators that `functions` hold in closures, defaults, attributes or globals.

    Not found: what is deep in other objects, or reached by names that are put together at run time.
    """
    modules: dict[str, nn.Module] = {}
    generators: dict[int, Generator] = {}
    seen: set[int] = set()
    waiting = [("criterion" if isinstance(function, nn.Module) else "", function, 0) for function in functions]
    while waiting:
        name, node, depth = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, nn.Module):
            modules[name if name not in modules else f"{name} {len(modules)}"] = node
        elif isinstance(node, GENERATORS):
            generators[id(node)] = node
        elif depth < _DEPTH:
            waiting.extend((inner or name, value, depth + 1) for inner, value in _inside(node))
    return modules, list(generators.values())


def _inside(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, functools.partial):
        yield from [("", node.func), *(("", value) for value in node.args), *node.keywords.items()]
    elif isinstance(node, MethodType):
        yield from [("", node.__self__), ("", node.__func__)]
    elif isinstance(node, FunctionType):
        yield from _of_function(node)
    elif isinstance(node, (list, tuple)) and len(node) <= 64:
        yield from (("", value) for value in node)
    elif isinstance(node, Mapping) and len(node) <= 64:
        yield from ((str(key), value) for key, value in node.items())
    elif not isinstance(node, type) and type(node).__module__.partition(".")[0] not in ("builtins", "torch", "numpy"):
        yield from getattr(node, "__dict__", {}).items()


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", value
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
