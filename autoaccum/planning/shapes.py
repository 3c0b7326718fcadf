"""JSON values into frozen records and back: the records' own annotations say what belongs where."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ShapeError(Exception):
    """A value is not of its field's type, or a field is missing."""


def shape(record: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind` out of `record`; what it has besides is passed over.

    Raises:
        ShapeError: A field without a default is missing, or a value is not of its type.
    """
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in record:
            values[field.name] = _convert(record[field.name], hints[field.name], field.name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ShapeError(f"{field.name!r} is missing")
    return values


def freeze(value: Any) -> Any:
    """Mappings into read-only ones and sequences into tuples, all the way down, in records too.

    >>> freeze({"sizes": [1, 2]})["sizes"]
    (1, 2)
    """
    if isinstance(value, Mapping):
        return types.MappingProxyType({str(key): freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: freeze(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **items)
    return value


def thaw(value: Any) -> Any:
    """Records, mappings and tuples into what JSON knows, all the way down.

    >>> thaw((1, {"a": (2,)}))
    [1, {'a': [2]}]
    """
    if dataclasses.is_dataclass(value):
        return {field.name: thaw(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _convert(value, next(option for option in inner if option is not type(None)), where)
    if origin is Literal:
        if value in inner and isinstance(value, str):
            return value
        raise ShapeError(f"{where} is {value!r}, not one of {', '.join(map(str, inner))}")
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_convert(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value))
        raise _wrong(value, "a list", where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(value, hint, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(value, "an object", where)
        if inner[1] is Any:
            return value
        return {_convert(key, inner[0], where): _convert(value[key], inner[1], f"{where}.{key}") for key in value}
    return _plain(value, hint, where)


def _record(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(value, "an object", where)
    try:
        return kind(**shape(value, kind))
    except ShapeError as error:
        raise ShapeError(f"in {where}, {error}") from None


def _plain(value: Any, kind: type, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    raise _wrong(value, names.get(kind, f"a {kind.__name__}"), where)


def _wrong(value: Any, expected: str, where: str) -> ShapeError:
    seen = repr(value)
    return ShapeError(f"{where} is {seen if len(seen) <= 60 else seen[:57] + '...'}, not {expected}")
