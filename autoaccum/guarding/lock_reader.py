"""What the text of a lock says, or in which line it is not what was written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumError, LockFileError
from autoaccum.guarding.lock_entries import ASKED, Damage, case_of, from_record
from autoaccum.guarding.lock_text import END, SCHEMA, SCHEMA_KEY
from autoaccum.guarding.records import Case, Measurement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ANEW = "restore it, or have all measured anew by `autoaccum guard --update --force`"
ANOTHER = "name another file by --lock, or overwrite this one by `autoaccum guard --update --force`"
_MARKER = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?$", re.MULTILINE)
_LINE = re.compile(r"at line (\d+)")
_SHOWN = 80


def read_text(text: str, path: Path) -> dict[Case, Measurement]:
    """The entries of a lock, in the order of the text.

    Args:
        text: Of the file.
        path: For messages.

    Raises:
        LockFileError: It is damaged, half merged, of something else or of a newer autoaccum.
    """
    if not text.strip():
        raise LockFileError(f"{path} is empty", hint=ANEW)
    text = text.replace("\r\n", "\n")
    if marker := _MARKER.search(text):
        line = text.count("\n", 0, marker.start()) + 1
        raise LockFileError(
            f"{path}, line {line}, has a conflict of a merge ({marker[1]})",
            hint="take one side of each conflict, whichever, and run `autoaccum guard --update`",
        )
    lines = _headers(text, path)
    table = _parse(text, path)
    _check_schema(table, path)
    if text.rstrip().rpartition("\n")[2] != END:
        raise LockFileError(f"{path} is cut off: its last line is missing", hint=ANEW)
    found: dict[Case, Measurement] = {}
    for name, record in table.items():
        if name == SCHEMA_KEY:
            continue
        where = f"{path}, line {lines[name]}: " if name in lines else f"{path}: "
        if not isinstance(record, Mapping):
            raise LockFileError(f"{where}{_shown(name)} is no entry of a lock", hint=ANEW)
        try:
            case, measurement = from_record(name, record)
        except Damage as damage:
            raise LockFileError(f"{where}the entry {_shown(name)} {damage}", hint=ANEW) from None
        found[case] = measurement
    return found


def salvage_cases(text: str) -> Iterator[Case]:
    """The cases that a lock names, as far as they can be told, whatever became of their figures."""
    entries = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    for entry in entries:
        lines = dict.fromkeys(line for line in entry.splitlines() if line.startswith(f"{ASKED}."))
        try:
            yield case_of(tomllib.loads("\n".join(lines))[ASKED])
        except (KeyError, TypeError, ValueError, AttributeError, AutoaccumError):
            continue  # Both sides of a conflict, say.


def _headers(text: str, path: Path) -> dict[str, int]:
    """The line of each entry, counted from 1."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith('["') and line.rstrip().endswith('"]'):
            try:
                [name] = tomllib.loads(line)
            except (ValueError, RecursionError):
                continue  # A damaged one is told when all is parsed.
            if name in lines:
                raise LockFileError(
                    f"{path} has the entry {_shown(name)} in line {lines[name]} and in line {number}, as a merge leaves"
                    " it behind",
                    hint="delete one of the two, whichever, and run `autoaccum guard --update`",
                )
            lines[name] = number
    return lines


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        seen = "JSON" if _is_json(text) else None
        if SCHEMA_KEY not in text or seen:
            raise LockFileError(
                f"{path} is no lock of autoaccum, but {seen or 'no TOML at all'}", hint=ANOTHER
            ) from None
        place = _LINE.search(str(error))
        where = f", line {place[1]}," if place else ""
        raise LockFileError(f"{path}{where} is damaged ({_reason(error)})", hint=ANEW) from None


def _reason(error: Exception) -> str:
    """What TOML says of it, without its place."""
    text = str(error).partition(" (at ")[0] or "nested too deep"
    return text[:1].lower() + text[1:]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_schema(table: Mapping[str, Any], path: Path) -> None:
    if SCHEMA_KEY not in table:
        shown = ", ".join(list(table)[:3])
        raise LockFileError(
            f"{path} is no lock of autoaccum, but TOML of something else ({_shown(shown)})", hint=ANOTHER
        )
    schema = table[SCHEMA_KEY]
    if type(schema) is not int or schema < 1:
        raise LockFileError(f"{path} is damaged: its {SCHEMA_KEY} is {schema!r}", hint=ANEW)
    if schema > SCHEMA:
        raise LockFileError(
            f"{path} was written by a newer autoaccum (format {schema}, and this one reads {SCHEMA})",
            hint="update autoaccum: pip install -U autoaccum",
        )


def _shown(name: str) -> str:
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
