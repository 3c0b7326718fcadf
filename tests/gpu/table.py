"""The table that is measured, as a file: written after each row, so that what was cut short goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
SECTIONS = ("machine", "probes", "constants", "comparison")
DATA = Path(__file__).parent / "data"


class Table:
    """Rows by section and title.

    Args:
        path: Its file; one that is there is gone on with.

    Raises:
        ValueError: The file is of another form, or of another machine than `about` says.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        empty: dict[str, Any] = {"schema": SCHEMA, "about": dict(about), **{name: {} for name in SECTIONS}}
        self._record = read_table(path) if path.exists() else empty
        if _kind(self._record["about"]) != _kind(about):
            raise ValueError(f"{path} is of {self._record['about']}, and this is {dict(about)}: take another file")

    def has(self, section: str, title: str, *, again: bool = False) -> bool:
        """Return whether a row is there; with `again`, a failed one does not count."""
        row = self._record[section].get(title)
        return row is not None and not (again and "error" in row)

    def write(self, section: str, title: str, row: Mapping[str, Any]) -> None:
        """Add or replace a row, and save: a file is whole at any time."""
        self._record[section][title] = dict(row)
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)  # noqa: PTH105


def _kind(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that all machines of a table share; the total memory of equal cards may differ a little."""
    return {name: value for name, value in about.items() if name != "total_bytes"}


def read_table(path: Path) -> dict[str, Any]:
    """A table's record.

    Raises:
        ValueError: It is none, or of another schema.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no table of schema {SCHEMA}")
    missing = [name for name in ("about", *SECTIONS) if not isinstance(record.get(name), dict)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return record
