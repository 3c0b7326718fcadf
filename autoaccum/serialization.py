"""Convert frozen dataclasses from and to JSON values, which msgspec checks against the annotations, and to HTML."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from autoaccum.errors import first_line
from autoaccum.messages import Message

_Record = TypeVar("_Record")


class RecordError(Exception):
    """A value has the wrong type, or a field is missing; the text names it."""


def read_record(plain: Any, kind: type[_Record]) -> _Record:
    """Return a dataclass of type `kind` from JSON values; unknown fields are ignored.

    Raises:
        RecordError: A field without a default is missing, or a value is not of its type.
    """
    try:
        return msgspec.convert(plain, kind, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, where = first_line(error).partition(" - at `$.")
        raise RecordError(f"{where.rstrip('`')}: {problem}" if where else problem) from None


def to_plain(value: Any) -> Any:
    """Return dataclasses, mappings and tuples as dicts and lists, recursively.

    Not by `msgspec.to_builtins`, which leaves out fields that keep their default in a record that msgspec has read.

    >>> to_plain((1, {"a": (2,)}))
    [1, {'a': [2]}]
    """
    if isinstance(value, Message):
        return {"code": value.code, "facts": to_plain(value.facts), "text": str(value)}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


class HtmlRecord:
    """A plan, a comparison or a verification, which a notebook shows as HTML.

    Attributes:
        to_html: Returns the HTML. The package sets it with the first of its names that is used: `reporting`, which has
            the HTML, lies above the records.
    """

    to_html: ClassVar[Callable[[Any], str] | None] = None

    def _repr_html_(self) -> str | None:
        return None if HtmlRecord.to_html is None else HtmlRecord.to_html(self)


def encode_record(record: Any) -> bytes:
    """Return a dataclass as JSON for `decode_record`; it is for our own processes, and faster than `to_plain`."""
    return msgspec.json.encode(record, enc_hook=lambda value: dict(value) if isinstance(value, Mapping) else str(value))


def decode_record(text: bytes, kind: type[_Record]) -> _Record:
    """Return the dataclass that `encode_record` wrote; raises as `read_record`."""
    return read_record(msgspec.json.decode(text), kind)


def freeze(value: Any) -> Any:
    """Return mappings as read-only mappings and sequences as tuples, recursively, also within dataclasses.

    >>> freeze({"sizes": [1, 2]})["sizes"]
    (1, 2)
    """
    if isinstance(value, Message):
        return value
    if isinstance(value, Mapping):
        return types.MappingProxyType({str(key): freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: freeze(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **items)
    return value
