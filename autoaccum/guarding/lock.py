"""Read and write the lock: lines of JSON with the measurement of each case, which git can compare and merge."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from autoaccum.devices.explanation import Holding
from autoaccum.errors import LockFileError
from autoaccum.files import write_text
from autoaccum.guarding.cases import Case, case_name, make_case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.serialization import freeze, read_record, to_plain
from autoaccum.sources.module_names import compact_names, expand_name

SCHEMA: Final = 5
_SCHEMA: Final = re.compile(r'\{"autoaccum-lock": (\d{1,9})\b', re.ASCII)

_NOTES: Final = (
    "What an update takes of memory. Do not edit: `autoaccum guard --update` measures again and writes this file; after"
    " a conflict in a merge, with --force. An entry begins with what was asked and ends with a digest. Holdings are"
    " what is held at the peak: the bytes of each module, without those in it. Sizes are in bytes."
)
_END: Final = json.dumps({"end": "a lock that was cut off lacks this line"})
_DIGEST: Final = '{"digest": '
_WAY_OUT: Final = "restore it from git, or measure all cases anew by `autoaccum guard --update --force`"
_HOLDINGS: Final = "holdings"
"""The field with a line for each of its records."""


def read_lock(path: Path) -> dict[Case, Measurement]:
    """Return the entries of a lock; none where there is no file.

    Raises:
        LockFileError: It cannot be read, is damaged or half merged, is no lock, or is in another autoaccum's format.
    """
    try:
        if not path.exists():
            return {}
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockFileError(f"the lock {path} cannot be read ({error})", hint=_WAY_OUT) from None
    schema = _SCHEMA.match(text)
    if schema is None or int(schema[1]) != SCHEMA:
        raise LockFileError(
            f"{path} is no lock in the format {SCHEMA}, which this autoaccum reads",
            hint=f"use the autoaccum that wrote it, or {_WAY_OUT}",
        )
    lines = text.rstrip().split("\n")[1:]
    if lines[-1:] != [_END]:
        raise LockFileError(f"the lock {path} is cut off: its last line is missing", hint=_WAY_OUT)
    entries, entry = dict[Case, Measurement](), list[str]()
    for number, line in enumerate(lines, 2):
        if not line.startswith((_DIGEST, _END)):
            entry.append(line)
            continue
        if line != (_digest_line(entry) if entry else _END):
            raise LockFileError(
                f"the entry that ends in line {number} of the lock {path} does not match its digest, as after an edit"
                " by hand or a conflict in a merge",
                hint=_WAY_OUT,
            )
        entries.update([_read_entry(entry)] if entry else [])
        entry = []
    return entries


def write_lock(path: Path, entries: Mapping[Case, Measurement]) -> None:
    """Write a lock atomically, over an existing one, or raise UsageError; equal entries give equal bytes."""
    lines = [_line("autoaccum-lock", SCHEMA, notes=_NOTES)]
    for case, measurement in sorted(entries.items(), key=lambda entry: case_name(entry[0])):
        entry = list(_entry_lines(case, measurement))
        lines += [*entry, _digest_line(entry)]
    write_text(path, "\n".join([*lines, _END, ""]), force=True)


def _entry_lines(case: Case, measurement: Measurement) -> Iterator[str]:
    """Yield the lines of an entry, one for each field that is not empty; equal micro-batches are `[count, samples]`."""
    yield _line("asked", case.to_record())
    fields = {
        **_given(dataclasses.replace(measurement, warnings=(), holdings=())),
        "micro_batches": [[len(list(run)), size] for size, run in groupby(measurement.micro_batches)],
    }
    yield from (_line(name, value) for name, value in fields.items())
    yield from (_line(_HOLDINGS, _given(holding)) for holding in _compact(measurement.holdings))


def _read_entry(lines: Sequence[str]) -> tuple[Case, Measurement]:
    """Return the entry of `_entry_lines`."""
    fields, holdings = dict[str, Any](), list[dict[str, Any]]()
    for line in lines:
        ((name, value),) = json.loads(line).items()
        if name == _HOLDINGS:
            holdings += [{**value, "module": module} for module in expand_name(value.get("module", ""))]
        else:
            fields[name] = value
    case, environment = make_case(**fields.pop("asked")), fields.pop("environment", {})
    fields["micro_batches"] = [size for count, size in fields["micro_batches"] for _ in range(count)]
    measurement = read_record({**fields, _HOLDINGS: holdings}, Measurement)
    return case, dataclasses.replace(measurement, environment=freeze(environment))


def _compact(holdings: Iterable[Holding]) -> list[Holding]:
    """Return holdings sorted, with one for equal modules that differ only in numbers."""
    alike: dict[Holding, list[str]] = defaultdict(list)
    for holding in holdings:
        alike[dataclasses.replace(holding, module="")].append(holding.module)
    rows = (
        dataclasses.replace(holding, module=pattern)
        for holding, modules in alike.items()
        for pattern, _ in compact_names(modules)
    )
    return sorted(rows, key=dataclasses.astuple)


def _given(record: Any) -> dict[str, Any]:
    return {name: to_plain(value) for name, value in vars(record).items() if value not in (None, "", (), {})}


def _line(name: str, value: Any, **more: Any) -> str:
    return json.dumps({name: value, **more}, ensure_ascii=False)


def _digest_line(lines: Sequence[str]) -> str:
    """Return the last line of an entry: sixteen digits of the SHA-256 of the others."""
    return _line("digest", hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])
