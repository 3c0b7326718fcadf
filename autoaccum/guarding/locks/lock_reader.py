"""What the text of a lock says, or in which line it is not what was written."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.errors import LockFileError
from autoaccum.guarding.locks.lock_entries import Damage, from_record
from autoaccum.guarding.locks.lock_text import END, SCHEMA, SCHEMA_KEY
from autoaccum.guarding.records import Case, Measurement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MARKER = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?$", re.MULTILINE)
_LINE = re.compile(r"at line (\d+)")
_SHOWN = 80


@dataclass(frozen=True)
class WaysOut:
    """What is to be done about a lock.

    Attributes:
        options: What a command has to say to be about it.
        named: Whether something else names what is guarded, so that a command need not.
    """

    options: Sequence[str] = ()
    named: bool = True

    def command(self, *flags: str, named: bool = True) -> str:
        """A command about this lock, as it is offered in a sentence."""
        words = shlex.join(["autoaccum", "guard", *self.options, *flags])
        return f"`{words if named else words.replace('guard', 'guard model.py --gpu NAME --target-batch N', 1)}`"

    @property
    def anew(self) -> str:
        """Of a lock that is damaged."""
        return f"restore it, or have all measured anew by {self.command('--update', '--force')}"

    @property
    def merged(self) -> str:
        """Of one that is half merged."""
        return f"have all that both sides name measured anew by {self.command('--update', '--force')}"

    @property
    def another(self) -> str:
        """Of what is none, or nothing."""
        return (
            "name another file by --lock, or overwrite this one by "
            f"{self.command('--update', '--force', named=self.named)}"
        )


def read_text(text: str, path: Path, ways: WaysOut) -> dict[Case, Measurement]:
    """The entries of a lock, in the order of the text.

    Args:
        text: Of the file.
        path: For messages.
        ways: Likewise.

    Raises:
        LockFileError: It is damaged, half merged, of something else or of a newer autoaccum.
    """
    if not text.strip():
        write = ways.command("--update", "--force", named=ways.named)
        raise LockFileError(f"{path} is empty", hint=f"restore it, or write it anew by {write}")
    text = text.replace("\r\n", "\n")
    if marker := _MARKER.search(text):
        line = text.count("\n", 0, marker.start()) + 1
        raise LockFileError(
            f"{path}, line {line}, has a conflict of a merge ({marker[1]})",
            hint=ways.merged,
        )
    lines = _headers(text, path, ways)
    table = _parse(text, path, ways)
    _check_schema(table, path, ways)
    if is_cut(text):
        raise cut_off(path, ways)
    if text.rstrip().rpartition("\n")[2] != END:
        raise LockFileError(f"{path} goes on after its end", hint=ways.anew)
    found: dict[Case, Measurement] = {}
    for name, record in table.items():
        if name == SCHEMA_KEY:
            continue
        where = f"{path}, line {lines[name]}: " if name in lines else f"{path}: "
        if not isinstance(record, Mapping):
            raise LockFileError(f"{where}{_shown(name)} is no entry of a lock", hint=ways.anew)
        try:
            case, measurement = from_record(name, record)
        except Damage as damage:
            raise LockFileError(f"{where}the entry {_shown(name)} {damage}", hint=ways.anew) from None
        found[case] = measurement
    return found


def is_cut(text: str) -> bool:
    """Whether the end of a lock is missing."""
    return SCHEMA_KEY in text and END not in text.split("\n")


def cut_off(path: Path, ways: WaysOut) -> LockFileError:
    """That nobody knows what was locked after the end of a file."""
    again = ways.command("--update", named=ways.named)
    return LockFileError(
        f"{path} is cut off: its last line is missing", hint=f"restore it, or delete it and lock all again by {again}"
    )


def _headers(text: str, path: Path, ways: WaysOut) -> dict[str, int]:
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
                    hint=f"delete one of the two, and run {ways.command('--update')}",
                )
            lines[name] = number
    return lines


def _parse(text: str, path: Path, ways: WaysOut) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        seen = "JSON" if _is_json(text) else None
        if SCHEMA_KEY not in text or seen:
            raise LockFileError(
                f"{path} is no lock of autoaccum, but {seen or 'no TOML at all'}", hint=ways.another
            ) from None
        if is_cut(text):
            raise cut_off(path, ways) from None
        place = _LINE.search(str(error))
        where = f", line {place[1]}," if place else ""
        raise LockFileError(f"{path}{where} is damaged ({_reason(error)})", hint=ways.anew) from None


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


def _check_schema(table: Mapping[str, Any], path: Path, ways: WaysOut) -> None:
    if SCHEMA_KEY not in table:
        shown = ", ".join(list(table)[:3])
        raise LockFileError(
            f"{path} is no lock of autoaccum, but TOML of something else ({_shown(shown)})", hint=ways.another
        )
    schema = table[SCHEMA_KEY]
    if type(schema) is not int or schema < 1:
        raise LockFileError(f"{path} is damaged: its {SCHEMA_KEY} is {schema!r}", hint=ways.anew)
    if schema > SCHEMA:
        raise LockFileError(
            f"{path} was written by a newer autoaccum (format {schema}, and this one reads {SCHEMA})",
            hint="update autoaccum: pip install -U autoaccum",
        )


def _shown(name: str) -> str:
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
