"""What a run may change besides parameters: buffers, attributes of modules, and variables that functions name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.accumulation.copies import StateCopy, is_own_object
from autoaccum.accumulation.digest import Hasher

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)
_MOST_ENTRIES = 4096
_MOST_ELEMENTS = 2**22
"""Of what is looked at and put back: a dataset that a loss names is neither."""

_LIBRARIES = ("torch", "builtins", "typing", "abc")
"""Whose classes keep nothing that a run changes."""

_DEPTH = 3
_REGISTERED = frozenset(vars(nn.Module())) | {"training"}


class HeldState:
    """State as it is now, to be put back and compared.

    Args:
        roots: Modules by the prefix of their names; their parameters are left alone. What the user's own classes of
            them keep as attributes, and what their methods name, counts as well.
        functions: The user's: what they keep in closures, and name of their module's variables, counts as well, and
            so do the functions of the user's own that they name.
        classes_of: Modules of whose classes alone it counts what they keep.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        functions: Iterable[Any] = (),
        *,
        classes_of: Iterable[nn.Module] = (),
    ) -> None:
        self._roots = dict(roots)
        self._modules = [module for root in roots.values() for module in root.modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in self._modules]
        self._attributes = [(vars(module), _attributes(module)) for module in self._modules]
        self._modes = [(module, module.training) for module in self._modules]
        named = find_variables([*functions, *find_methods(self._modules)])
        self._variables = [variable for variable in named if _can_change(variable.value)]
        self._variables += _class_variables([*self._modules, *classes_of])
        kept = [[held for _, held in self._buffers], [held for _, held in self._attributes]]
        self._copy = StateCopy([*kept, [one.value for one in self._variables]], on_host=False, inside=True)
        self._hashes = self._hash()

    def restore(self) -> None:
        """Put everything back in place."""
        for held, before in self._buffers:
            held.clear()
            held.update(before)
        for attributes, before in self._attributes:
            for name in [name for name in attributes if name not in _REGISTERED and name not in before]:
                del attributes[name]
            attributes.update(before)
        for module, training in self._modes:
            module.training = training
        for variable in self._variables:
            variable.restore()
        self._copy.restore()

    def changed(self) -> list[str]:
        """Names of attributes (`encoder.calls`) and variables whose content is another one now."""
        now = self._hash()
        names = [name for name, content in now.items() if self._hashes.get(name) != content]
        return names + [name for name in self._hashes if name not in now]

    def _hash(self) -> dict[str, str]:
        hasher = Hasher(depth=_DEPTH)
        found = {
            f"{path}{'.' if path else ''}{name}": hasher.hash(_without_parameters(value))
            for prefix, root in self._roots.items()
            for path, module in root.named_modules(prefix=prefix)
            if not type(module).__module__.startswith("torch.")
            for name, value in _attributes(module).items()
        }
        for variable in self._variables:
            content = hasher.hash(_without_parameters(variable.now))
            found[variable.label] = found.get(variable.label, "") + content
        return found


class Variable:
    """One variable of a function's module, of its closure, or of a class, and the value it has now."""

    def __init__(self, name: str, place: MutableMapping[str, Any] | CellType | type) -> None:
        self.name = name
        self._place = place
        self.value = self.now

    @property
    def now(self) -> Any:
        """Its value now; None where there is none."""
        if isinstance(self._place, CellType):
            return self._place.cell_contents
        return (vars(self._place) if isinstance(self._place, type) else self._place).get(self.name)

    def set(self, value: Any) -> None:
        """Give it another value."""
        if isinstance(self._place, CellType):
            self._place.cell_contents = value
        elif isinstance(self._place, type):
            setattr(self._place, self.name, value)
        else:
            self._place[self.name] = value

    def restore(self) -> None:
        """Give it the value it began with."""
        self.set(self.value)

    @property
    def label(self) -> str:
        """What it is called among others."""
        return f"{self._place.__name__}.{self.name}" if isinstance(self._place, type) else self.name

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others."""
        return id(self._place), self.name


def _without_parameters(value: Any) -> Any:
    """Parameters, and modules, change by the update and not by what a run keeps."""
    if isinstance(value, (nn.Parameter, nn.Module)):
        return None
    if isinstance(value, (list, tuple)):
        return [_without_parameters(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_parameters(item) for key, item in value.items()}
    return value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


def find_methods(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Those that the user's own classes of `modules` define."""
    for kind in _users_classes(modules):
        yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _class_variables(modules: Iterable[nn.Module]) -> Iterator[Variable]:
    """Plain values and containers that are attributes of the user's own classes."""
    for kind in _users_classes(modules):
        for name, value in list(vars(kind).items()):
            plain = isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor, np.ndarray)) and _can_change(value)
            if plain and not name.startswith("__"):
                yield Variable(name, kind)


def _users_classes(modules: Iterable[nn.Module]) -> list[type]:
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return [kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES]


def find_variables(functions: Iterable[Any]) -> Iterator[Variable]:
    """The variables that `functions`, and those of the user's own that they call, hold or name, each once."""
    seen: set[tuple[int, str]] = set()
    waiting = [(function, 0) for function in functions]
    while waiting:
        function, depth = waiting.pop()
        if depth > _DEPTH:
            continue
        for variable in _within(function):
            if variable.key in seen:
                continue
            seen.add(variable.key)
            if not isinstance(variable.value, FunctionType):
                yield variable
            elif _is_users(variable.value, function):
                waiting.append((variable.value, depth + 1))


def _within(function: Any) -> Iterator[Variable]:
    """Of a function what it names; of a method also, and of another object that can be called only, its attributes."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        yield from _within(function.__self__)
        function = function.__func__
    if isinstance(function, FunctionType):
        yield from _named(function)
    elif not isinstance(function, (type, nn.Module)):
        attributes = getattr(function, "__dict__", {})
        yield from (Variable(name, attributes) for name in list(attributes))


def _named(function: FunctionType) -> Iterator[Variable]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Variable(name, cell)
        except ValueError:  # not assigned yet
            continue
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield Variable(name, function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_users(function: FunctionType, caller: Any) -> bool:
    """Whether it is of the same package as what names it: the user's own, no library's."""
    return function.__module__.partition(".")[0] == getattr(caller, "__module__", "").partition(".")[0]


def _can_change(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.numel() <= _MOST_ELEMENTS and not value.is_meta
    if isinstance(value, np.ndarray):
        return bool(value.size <= _MOST_ELEMENTS and value.dtype != object)
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ENTRIES
    return is_own_object(value) and not isinstance(value, nn.Module)
