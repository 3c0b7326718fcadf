"""The text of a lock: TOML, one thing a line, so that a diff tells what changed and a merge takes it line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from autoaccum.units import precise_bytes

SCHEMA: Final = 1
SCHEMA_KEY: Final = "autoaccum-lock"
END: Final = "# The end: a lock that was cut off lacks it."
_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_HEAD = f"""\
# What training takes of memory, so that a change that takes more is told before it is merged: `autoaccum guard`.
# Not to be edited: `autoaccum guard --update` measures anew and writes it. After a conflict in a merge run it with
# --force, and it measures all that either side names. Holdings at the peak: how many modules, bytes of each, what for,
# which modules (without those in them), their class, dtype, operator. What is below 1/1000 of the peak is one row for
# each purpose, however many modules that is.
{SCHEMA_KEY} = {SCHEMA}
"""


def lock_text(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of entries, by name, in the order given.

    Args:
        records: Of `lock_entries.to_record`.
    """
    entries = ("\n".join([*_entry_lines(name, record), ""]) for name, record in records.items())
    return "\n".join([_HEAD, *entries, f"{END}\n"])


def _entry_lines(name: str, record: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{_text(name)}]"
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{_key(inner)} = {_with_size(key, each)}" for inner, each in value.items())
        elif key in ("holdings", "moments"):
            yield f"{key} = ["
            yield from (f"  {_row(each)}" for each in value)
            yield "]"
        else:
            yield f"{key} = {_with_size(key, value)}"


def _with_size(key: str, value: Any) -> str:
    if key.endswith("-bytes") or key == "categories":
        return f"{_value(value)}  # {precise_bytes(value)}"
    return _value(value)


def _row(row: list[Any]) -> str:
    """Of `lock_entries.to_record`: a holding, figures first so that columns stay where they are, or a moment."""
    if isinstance(row[0], str):
        return f"{_value(row)},  # {precise_bytes(row[1])}"
    count, each_bytes, *words = row
    figures = f"{count:>4_}, {each_bytes:>15_}"
    return f"[{figures}, {', '.join(map(_value, words))}],  # {precise_bytes(count * each_bytes)}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{value!r} has no place in a lock")


def _text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for DEL, which TOML has escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
