"""Read and write the lock file: the measurement of each case, as text that shows up in diffs and merges by lines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.errors import LockFileError
from autoaccum.files import write_text
from autoaccum.guarding.cases import Case, case_name, make_case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.serialization import freeze, to_plain
from autoaccum.units import precise_bytes
from autoaccum.workload.module_names import compact_names, expand_name, mask_numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA: Final = 1
_SCHEMA_KEY: Final = "autoaccum-lock"
_END: Final = "# The end: a lock that was cut off lacks it."
_HEAD = f"""\
# What training takes of memory, so that a change that takes more is told before it is merged: `autoaccum guard`.
# Not to be edited: `autoaccum guard --update` measures anew and writes it; after a conflict in a merge, with --force.
# Holdings at the peak: how many modules, bytes of each, what for, which modules (without those in them), their class,
# dtype, operator. What is below 1/1000 of the peak is one row for each purpose, however many modules that is.
{_SCHEMA_KEY} = {SCHEMA}
"""
_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_NUMBER = re.compile("([0-9]+)")
_DIGITS, _ROW, _LEAST_SHARE = 16, 7, 1000
_OF_NOTHING: tuple[Any, ...] = (None, "", (), {}, [])


def read_lock(path: Path, rewrite_command: str) -> dict[Case, Measurement]:
    """Return the entries of a lock, with their holdings folded; none where there is no file.

    `rewrite_command` writes the lock anew; messages name it.

    Raises:
        LockFileError: It cannot be read, is damaged or half merged, is no lock, or was written by a newer autoaccum.
    """
    way_out = f"restore it from git, or write it anew by `{rewrite_command}`"
    try:
        if not path.exists():
            return {}
        text = path.read_bytes().decode()
        table = tomllib.loads(text.replace("\r\n", "\n"))
    except OSError as error:
        hint = "name another by --lock"
        raise LockFileError(f"the lock {path} cannot be read ({error.strerror})", hint=hint) from None
    except (ValueError, RecursionError) as error:  # TOML's errors are ValueErrors, too.
        raise LockFileError(f"the lock {path} cannot be parsed ({error})", hint=way_out) from None
    schema = table.pop(_SCHEMA_KEY, None)
    if type(schema) is not int:
        raise LockFileError(f"{path} is not a lock of autoaccum", hint=f"name another by --lock, or {way_out}")
    if schema > SCHEMA:
        raise LockFileError(
            f"{path} was written by a newer autoaccum (format {schema}; this one reads {SCHEMA})",
            hint="update autoaccum: pip install -U autoaccum",
        )
    if not text.rstrip().endswith(_END):
        raise LockFileError(f"the lock {path} is cut off: its last line is missing", hint=way_out)
    entries = {}
    for name, record in table.items():
        digest = record.pop("digest", None) if isinstance(record, dict) else None
        if digest is None or digest != _digest(record):
            raise LockFileError(
                f"the entry {name!r:.80} of the lock {path} does not match its digest, as after an edit by hand",
                hint=way_out,
            )
        case, measurement = _from_record(record)
        entries[case] = measurement
    return entries


def write_lock(path: Path, entries: Mapping[Case, Measurement]) -> None:
    """Write a lock atomically, over an existing one, or raise UsageError; equal entries give equal bytes."""
    ordered = sorted(entries.items(), key=lambda entry: case_name(entry[0]))
    texts = ("\n".join([*_entry_lines(*entry), ""]) for entry in ordered)
    write_text(path, "\n".join([_HEAD, *texts, f"{_END}\n"]), force=True)


Group = tuple[str, str, str, str, str]


def group_of(holding: Holding) -> Group:
    """Return the key by which holdings are kept or folded together: all but the numbers in the module's path."""
    return holding.category, mask_numbers(holding.module), holding.kind, holding.dtype, holding.op


def fold(measurement: Measurement, keep: Set[Group] = frozenset()) -> Measurement:
    """Fold holdings as a lock keeps them: groups below 1/1000 of the peak are added up, one sum per category.

    Such a sum has no module, kind, dtype or operator. Folding twice changes nothing.

    Groups to `keep` are never folded: pass those of the locked measurement to compare with, so that none of them seems
    to be gone because it fell just below the bound.
    """
    sizes: dict[Group, int] = {}
    for holding in measurement.holdings:
        sizes[group_of(holding)] = sizes.get(group_of(holding), 0) + holding.bytes
    kept = {group for group, size in sizes.items() if size * _LEAST_SHARE >= measurement.peak_bytes} | keep
    folded = (
        holding if group_of(holding) in kept else Holding(category=holding.category, bytes=holding.bytes)
        for holding in measurement.holdings
    )
    return dataclasses.replace(measurement, holdings=_in_order(folded))


def _in_order(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """Sort holdings by category, module (2 before 10), kind, dtype and operator; add up those that share them all."""
    sizes: dict[Holding, int] = {}
    for holding in holdings:
        alike = dataclasses.replace(holding, bytes=0)
        sizes[alike] = sizes.get(alike, 0) + holding.bytes
    joined = (dataclasses.replace(alike, bytes=size) for alike, size in sizes.items())
    rank = CATEGORIES.index
    return tuple(sorted(joined, key=lambda one: (rank(one.category), natural(one.module), one.kind, one.dtype, one.op)))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts numbers in names by their value.

    >>> sorted(["h.10.up", "h.2.up"], key=natural)
    ['h.2.up', 'h.10.up']
    """
    return tuple((int(part) if part.isdecimal() and part.isascii() else -1, part) for part in _NUMBER.split(name))


def _to_record(case: Case, measurement: Measurement) -> dict[str, Any]:
    """Return an entry as plain data, without its digest.

    Default values are left out; consecutive equal parts become `[count, samples]`; `_to_rows` makes rows of holdings.
    """
    folded = fold(measurement)
    values = {**vars(folded), "warnings": ()}
    values["micro_batches"] = [[len(list(run)), size] for size, run in groupby(folded.micro_batches)]
    values["categories"] = _sorted(folded.categories)
    values["holdings"] = list(_to_rows(folded.holdings))
    values["moments"] = [[each.phase, each.held_bytes, _sorted(each.categories)] for each in folded.moments]
    values["versions"] = dict(sorted(folded.versions.items()))
    values["settings"] = dict(sorted(folded.settings.items()))
    asked = {_key(name): value for name, value in case.to_record().items()}
    found = {_key(name): to_plain(value) for name, value in values.items() if value not in _OF_NOTHING}
    return {"asked": asked, **found}


def _from_record(record: dict[str, Any]) -> tuple[Case, Measurement]:
    """Make the entry from a record of `_to_record`, whose digest was checked."""
    asked = {key.replace("-", "_"): value for key, value in record.pop("asked").items()}
    values = {key.replace("-", "_"): value for key, value in record.items()}
    values["micro_batches"] = tuple(size for count, size in values["micro_batches"] for _ in range(count))
    for name in ("runs", "savers", "recomputed"):
        values[name] = tuple(values.get(name, ()))
    values["settings"] = freeze(values.get("settings", {}))
    values["holdings"] = _in_order(each for row in values.get("holdings", ()) for each in _from_row(row))
    moments = values.get("moments", ())
    values["moments"] = tuple(Moment(phase=phase, held_bytes=held, categories=each) for phase, held, each in moments)
    return make_case(**asked), Measurement(**values)


def _digest(record: Mapping[str, Any]) -> str:
    """Return sixteen digits of the SHA-256 of plain data, for any order of its keys."""
    text = json.dumps(record, sort_keys=True, default=repr, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _to_rows(holdings: tuple[Holding, ...]) -> Iterator[list[Any]]:
    """Yield rows `[count, bytes of each, category, modules, kind, dtype, op]`, without empty values at the end.

    Modules that differ only in numbers share a row.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for each in holdings:
        key = (CATEGORIES.index(each.category), each.kind, each.dtype, each.op, each.bytes)
        alike.setdefault(key, []).append(each.module)
    rows = [
        ((key[0], natural(names[0]), *key[1:]), [len(names), key[4], CATEGORIES[key[0]], spelled, *key[1:4]])
        for key, modules in alike.items()
        for spelled, names in compact_names(modules)
    ]
    for _, row in sorted(rows):
        while not row[-1]:
            row.pop()
        yield row


def _from_row(row: list[Any]) -> Iterator[Holding]:
    _, each_bytes, category, spelled, kind, dtype, op = row + [""] * (_ROW - len(row))
    for module in expand_name(spelled) if spelled else [""]:
        yield Holding(category=category, module=module, kind=kind, dtype=dtype, op=op, bytes=each_bytes)


def _sorted(categories: Mapping[Category, int]) -> dict[str, int]:
    return {category: categories[category] for category in CATEGORIES if category in categories}


def _key(name: str) -> str:
    return name.replace("_", "-")


def _entry_lines(case: Case, measurement: Measurement) -> Iterator[str]:
    record = _to_record(case, measurement)
    yield f"[{_text(case_name(case))}]"
    for key, value in {**record, "digest": _digest(record)}.items():
        if isinstance(value, Mapping):
            for inner, each in value.items():
                size = f"  # {precise_bytes(each)}" if key == "categories" else ""
                yield f"{key}.{inner if _BARE.fullmatch(inner) else _text(inner)} = {_value(each)}{size}"
        elif key in ("holdings", "moments"):
            yield f"{key} = ["
            yield from (f"  {_row(each)}" for each in value)
            yield "]"
        else:
            size = f"  # {precise_bytes(value)}" if key.endswith("-bytes") else ""
            yield f"{key} = {_value(value)}{size}"


def _row(row: list[Any]) -> str:
    """Write a moment, or a holding with its numbers first, so that columns stay aligned."""
    if isinstance(row[0], str):
        return f"{_value(row)},  # {precise_bytes(row[1])}"
    count, each_bytes, *words = row
    figures = f"{count:>4_}, {each_bytes:>15_}"
    return f"[{figures}, {', '.join(map(_value, words))}],  # {precise_bytes(count * each_bytes)}"


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
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in value.items())} }}"
    return f"[{', '.join(map(_value, value))}]"


def _text(text: str) -> str:
    """Write a basic TOML string: its escapes are those of JSON, and DEL is escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
