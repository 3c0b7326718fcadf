"""What can still be told of a lock that cannot be read as a whole: an update by force loses none of its entries."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoaccum.errors import AutoaccumError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.lock_entries import ASKED, Damage, case_of, from_record
from autoaccum.guarding.locks.lock_text import SCHEMA, SCHEMA_KEY
from autoaccum.guarding.records import Case, Measurement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MARKER = re.compile(r"(<{7}|\|{7}|={7}|>{7})(?: .*)?", re.ASCII)
_STEPS = {("both", "<"): "ours", ("ours", "|"): "base", ("ours", "="): "theirs", ("base", "="): "theirs"}
_STEPS |= {("theirs", ">"): "both"}
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, AutoaccumError)

Line = tuple[int, str]
"""Its number, from 1, and its text."""


@dataclass
class Salvage:
    """What a lock says, as far as it can be told.

    Attributes:
        entries: Those that are as they were written; of two of one case that differ, none.
        damaged: The cases of which no more is known than that the lock has them.
        lost: Lines with entries of which not even that is known, as the start of a sentence.
    """

    entries: dict[Case, Measurement] = field(default_factory=dict)
    damaged: list[Case] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def named(self) -> tuple[Case, ...]:
        """All cases that it names."""
        return (*self.entries, *self.damaged)

    def add(self, case: Case, measurement: Measurement | None) -> None:
        """Another entry; None: its figures are not known."""
        if measurement is not None and case not in self.damaged and self.entries.get(case, measurement) == measurement:
            self.entries[case] = measurement
            return
        self.entries.pop(case, None)
        if case not in self.damaged:
            self.damaged.append(case)


def salvage(text: str) -> Salvage:
    """What the text of a lock says; of a conflict of a merge, what both sides say.

    Args:
        text: Of the file, its lines ended as on Unix.
    """
    found = Salvage()
    for side in _sides(text):
        known = any(line == f"{SCHEMA_KEY} = {SCHEMA}" for _, line in side)
        for entry in _entries(side):
            _tell(entry, found, known=known)
    found.lost = list(dict.fromkeys(found.lost))
    return found


def _tell(entry: Sequence[Line], found: Salvage, *, known: bool) -> None:
    """Add an entry to what is found; of a schema that is not `known` no figures."""
    number, header = entry[0]
    try:
        [name] = tomllib.loads(header)
        asked = "\n".join(line for _, line in entry if line.startswith(f"{ASKED}."))
        case = case_of(tomllib.loads(asked)[ASKED])
        if case_name(case) != name:
            raise ValueError(name)
    except _UNREADABLE:
        shown = header.strip('[]" ')[:80]
        found.lost.append(f"line {number}: the entry {shown if shown.isprintable() else repr(shown)}")
        return
    try:
        record = tomllib.loads("\n".join(line for _, line in entry))[name]
        measurement = from_record(name, record)[1] if known else None
    except (*_UNREADABLE, Damage):
        measurement = None
    found.add(case, measurement)


def _entries(side: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each entry, from its header on; also those of one that has lost its header."""
    entry: list[Line] = []
    for number, line in [*side, (0, "[")]:
        if not line.startswith("["):
            entry.append((number, line))
            continue
        if any(each.startswith(('["', f"{ASKED}.")) for _, each in entry):
            yield entry
        entry = [(number, line)]


def _sides(text: str) -> list[list[Line]]:
    """The whole text, or ours and theirs; where markers do not come in pairs, all lines that are none."""
    lines = list(enumerate(text.split("\n"), 1))
    sides: dict[str, list[Line]] = {"ours": [], "theirs": [], "base": []}
    state, sound = "both", True
    for number, line in lines:
        if marker := _MARKER.fullmatch(line):
            step = _STEPS.get((state, marker[1][0]))
            sound, state = sound and step is not None, step or state
            continue
        for side in ("ours", "theirs") if state == "both" else (state,):
            sides[side].append((number, line))
    if not sound or state != "both":
        return [[(number, line) for number, line in lines if not _MARKER.fullmatch(line)]]
    return [sides["ours"]] if sides["ours"] == sides["theirs"] else [sides["ours"], sides["theirs"]]
