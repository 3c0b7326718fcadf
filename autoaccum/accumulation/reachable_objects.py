"""Find the modules and random generators that the user's code uses beside the model, such as a teacher.

These auxiliary modules are not trained, but are moved to the model's device and need memory there. The search only
reads attributes, and does not enter objects of libraries.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from autoaccum.accumulation.rng_state import GENERATORS, Generator
from autoaccum.sources.module_names import module_files
from autoaccum.tracebacks import is_user_file

if TYPE_CHECKING:
    from autoaccum.sources.objective import Objective
    from autoaccum.sources.workload import Workload

MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, deque, set)
"""Python's own containers, which can be read without running other code."""

_DEPTH, _ENTRIES = 6, 64
_LIBRARIES = ("torch", "autoaccum")
"""Packages that are libraries wherever they are installed, also in a checkout."""


def all_modules(*roots: nn.Module | None) -> list[nn.Module]:
    """Return all modules of `roots`, the last one's first, each in the order of `modules()`.

    That is a generator within a generator for each level of a model, and takes several times as long.
    """
    queue, modules = list(roots), dict[nn.Module, None]()
    while queue:
        module = queue.pop()
        if module is not None and module not in modules:
            modules[module] = None
            if module._modules:
                queue.extend(reversed(module._modules.values()))
    return list(modules)


def find_used_modules(objective: Objective, model: nn.Module | None, *functions: object) -> dict[str, nn.Module]:
    """Return the modules by name that the loss and `functions` use and that are no part of the model or the criterion.

    Modules without parameters and buffers, as a loss without class weights, are left out.
    """
    modules, _ = find_reachable(
        function for function in (*objective.user_functions, *functions) if function is not None
    )
    excluded = set(all_modules(model, objective.criterion_module))
    others = {name: module for name, module in modules.items() if module not in excluded}
    return {name: module for name, module in others.items() if [*module.parameters(), *module.buffers()]}


def find_auxiliary_modules(workload: Workload) -> dict[str, nn.Module]:
    """Return a workload's modules beside its model by name: those it lists, and those its functions use."""
    model = workload.model if isinstance(workload.model, nn.Module) else None
    named = find_used_modules(workload.objective, model, workload.evaluate)
    listed = {id(module) for module in workload.modules.values()}
    return {**workload.modules, **{name: module for name, module in named.items() if id(module) not in listed}}


@contextmanager
def on_device(modules: Iterable[nn.Module], device: torch.device | None) -> Iterator[None]:
    """Move `modules` to `device` within it, and restore them afterwards; for the CPU, do nothing."""
    if device is None or device.type == "cpu":
        yield
        return
    roots = list(modules)
    inner = {id(module): module for root in roots for module in root.modules()}.values()
    tables = [(table, dict(table)) for module in inner for table in (module._parameters, module._buffers)]
    data = [(value, value.data) for _, before in tables for value in before.values() if isinstance(value, nn.Parameter)]
    try:
        for root in roots:
            root.to(device)
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        for parameter, values in data:
            parameter.data = values


def find_reachable(
    functions: Iterable[Any], others: Iterable[tuple[str, Any]] = ()
) -> tuple[dict[str, nn.Module], list[Generator]]:
    """Return the modules by name, and the generators, in closures, defaults, attributes and globals of `functions`.

    Objects deep within others, within a library's, or under names computed at run time are not found. `others` are
    further objects by name where the search begins.
    """
    modules: dict[str, nn.Module] = {}
    generators: dict[int, Generator] = {}
    seen: set[int] = set()
    queue = [("criterion" if isinstance(function, nn.Module) else "", function, 0) for function in functions]
    queue += [(name, node, 0) for name, node in others]
    while queue:
        name, node, depth = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        with suppress(Exception):  # Code of the object may raise: a dead proxy, a lazy object.
            if isinstance(node, nn.Module):
                modules[name if name not in modules else f"{name} {len(modules)}"] = node
            elif isinstance(node, GENERATORS):
                generators[id(node)] = node
            elif depth < _DEPTH:
                queue.extend([(inner or name, value, depth + 1) for inner, value in _children(node)])
    return modules, list(generators.values())


def find_generators(*owners: object) -> list[Generator]:
    """Return the generators that `owners` hold, also in functions, the user's objects, or one object of a library."""
    attributes = [entry for owner in owners for entry in getattr(owner, "__dict__", {}).items()]
    inner = [entry for _, value in attributes for entry in getattr(value, "__dict__", {}).items()]
    generators = [entry for entry in inner if isinstance(entry[1], GENERATORS)]
    return find_reachable([owner for owner in owners if callable(owner)], [*attributes, *generators])[1]


def is_user_class(kind: type) -> bool:
    """Return whether a class is the user's own: not defined in an installed or the standard library."""
    top = kind.__module__.partition(".")[0]
    if top == "__main__":  # Also under `python -m tool`, which runs the user's code.
        return True
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return False
    files = module_files(sys.modules.get(kind.__module__))
    return not files or _is_user_code(files[0])


def find_user_methods(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Yield the methods that the user's own classes of `modules` define."""
    for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
        if is_user_class(kind):
            yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def code_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code and in the functions nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)


def tensor_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the mappings of a tensor's hooks: of `register_hook` and of `register_post_accumulate_grad_hook`."""
    return getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, functools.partial):
        yield from [("", node.func), *(("", value) for value in node.args), *node.keywords.items()]
    elif isinstance(node, MethodType):
        yield from [("", node.__self__), ("", node.__func__)]
    elif isinstance(node, FunctionType):
        yield from _function_objects(node)
    elif isinstance(node, tuple) or type(node) in SEQUENCES:
        yield from (("", value) for value in node if len(node) <= _ENTRIES)
    elif type(node) in MAPPINGS:
        yield from ((str(key), value) for key, value in node.items() if len(node) <= _ENTRIES)
    elif not isinstance(node, type) and (is_user_class(type(node)) or isinstance(node, (Dataset, Sampler))):
        yield from getattr(node, "__dict__", {}).items()


def _function_objects(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the closure and defaults of a function and, if it is the user's, the globals it uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", value
    if _is_user_code(function.__code__.co_filename):
        yield from (
            (name, function.__globals__[name]) for name in code_names(function.__code__) if name in function.__globals__
        )


def _is_user_code(file: str) -> bool:
    return is_user_file(file) and not any(folder in file for folder in ("site-packages", "dist-packages"))
