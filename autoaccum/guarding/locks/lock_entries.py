"""An entry of the lock as plain data: what a case asked for, what was measured, and a digest of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.folding import fold, in_order, natural
from autoaccum.guarding.records import Case, Measurement
from autoaccum.workload.module_names import compact_names, expand_name

ASKED: Final = "asked"
DIGEST: Final = "digest"
_DIGITS, _ROW = 16, 7
_CASE_FIELDS = {field.name: field.default for field in dataclasses.fields(Case)}
_FIELDS = [field.name for field in dataclasses.fields(Measurement)]
_OF_NOTHING: tuple[Any, ...] = (None, "", (), {})
_TYPES: dict[str, type] = {
    **dict.fromkeys(("equal", "fits", "capped"), bool),
    **dict.fromkeys(("target_batch", "micro_batch", "world_size", "evaluation_batch", "worst_of"), int),
    **dict.fromkeys(("parameters", "largest", "limit_bytes", "peak_bytes", "held_bytes", "least_bytes"), int),
    **dict.fromkeys(("categories", "versions", "settings"), dict),
    **dict.fromkeys(("keeps", "micro_batches", "runs", "holdings", "moments"), list),
}
"""Of the values in an entry; text where it is not said."""


class Damage(Exception):
    """An entry that was not written so, as the rest of a sentence about it."""


def to_record(case: Case, measurement: Measurement) -> dict[str, Any]:
    """An entry as plain data, with its digest last.

    What is as it is by default is left out; equal parts that follow each other are `[count, samples]`; holdings are
    rows, see `_to_rows`.
    """
    asked = {_key(name): _plain(getattr(case, name)) for name in _CASE_FIELDS if _is_asked(case, name)}
    folded = fold(measurement)
    values: dict[str, Any] = {name: getattr(folded, name) for name in _FIELDS}
    values["micro_batches"] = [[len(list(run)), size] for size, run in groupby(folded.micro_batches)]
    values["categories"] = _in_order(folded.categories)
    values["holdings"] = list(_to_rows(folded.holdings))
    values["moments"] = [[each.phase, each.held_bytes, _in_order(each.categories)] for each in folded.moments]
    values["versions"] = dict(sorted(folded.versions.items()))
    values["settings"] = dict(sorted(folded.settings.items()))
    found = {_key(name): _plain(value) for name, value in values.items() if value not in _OF_NOTHING and value != []}
    record = {ASKED: asked, **found}
    return {**record, DIGEST: digest_of(record)}


def from_record(name: str, record: Mapping[str, Any]) -> tuple[Case, Measurement]:
    """What an entry says.

    Args:
        name: What it is called.
        record: Of `to_record`.

    Raises:
        Damage: It was not written so.
    """
    content = {key: value for key, value in record.items() if key != DIGEST}
    if DIGEST not in record:
        raise Damage("has no digest")
    if record[DIGEST] != digest_of(content):
        raise Damage("does not match its digest, as after an edit or a merge by hand")
    try:
        case, measurement = case_of(content.pop(ASKED)), _measurement(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damage(f"is not as it is written by this autoaccum ({error})") from None
    if case_name(case) != name:
        raise Damage(f"is of {case_name(case)}")
    if wrong := find_wrong_sum(measurement):
        raise Damage(wrong)
    return case, measurement


def digest_of(record: Mapping[str, Any]) -> str:
    """Sixteen digits of the SHA-256 of plain data, whatever the order of its keys."""
    text = json.dumps(record, sort_keys=True, default=repr, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def find_wrong_sum(measurement: Measurement) -> str | None:
    """What does not add up in a measurement, as the rest of a sentence; None where all does."""
    held = {category: size for category, size in measurement.categories.items() if category != "unused"}
    sums = [("its categories", sum(measurement.categories.values()), "its peak", measurement.peak_bytes)]
    sums += [("its categories without `unused`", sum(held.values()), "what it holds", measurement.held_bytes or 0)]
    sums = sums if measurement.categories else []
    for category in held if measurement.holdings else ():
        rows = sum(holding.bytes for holding in measurement.holdings if holding.category == category)
        sums.append((f"its holdings of {category}", rows, "that category", held[category]))
    for moment in measurement.moments:
        sums.append((f"its categories in {moment.phase}", sum(moment.categories.values()), "it", moment.held_bytes))
    if measurement.holdings:
        rows = sum(holding.bytes for holding in measurement.holdings)
        sums.append(("its holdings", rows, "what it holds", measurement.held_bytes or 0))
    return next((f"has {what} add up to {a}, and {of} is {b}" for what, a, of, b in sums if a != b), None)


def _is_asked(case: Case, name: str) -> bool:
    return bool(getattr(case, name) != _CASE_FIELDS[name])


def _key(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    """Lists as tuples, as records have them."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _in_order(categories: Mapping[Category, int]) -> dict[str, int]:
    return {category: categories[category] for category in CATEGORIES if category in categories}


def _to_rows(holdings: tuple[Holding, ...]) -> Iterator[list[Any]]:
    """`[count, bytes of each, category, modules, kind, dtype, op]`; modules that differ in numbers only share one.

    Empty words at the end are left out.
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
    count, each_bytes, category, spelled, kind, dtype, op = row + [""] * (_ROW - len(row))
    modules = expand_name(spelled) if spelled else [""]
    if len(modules) != count or category not in CATEGORIES or type(each_bytes) is not int:
        raise ValueError(f"the row of {spelled or category} tells of {count} modules")
    for module in modules:
        yield Holding(category=category, module=module, kind=kind, dtype=dtype, op=op, bytes=each_bytes)


def case_of(asked: Mapping[str, Any]) -> Case:
    """The case of an entry.

    Raises:
        KeyError, TypeError, ValueError: It was not written so.
    """
    values = _typed(asked, _CASE_FIELDS)
    if "keeps" in values:
        values["keeps"] = tuple(values["keeps"])
    return Case(**values)


def _measurement(content: Mapping[str, Any]) -> Measurement:
    values = _typed(content, _FIELDS)
    if values["kind"] not in ("predicted", "measured") or not set(values.get("categories", ())) <= {*CATEGORIES}:
        raise ValueError("its kind or a category is unknown")
    values["micro_batches"] = tuple(size for count, size in values["micro_batches"] for _ in range(count))
    values["runs"] = tuple(values.get("runs", ()))
    values["settings"] = {name: _frozen(value) for name, value in values.get("settings", {}).items()}
    values["holdings"] = in_order(each for row in values.get("holdings", ()) for each in _from_row(row))
    moments = values.get("moments", ())
    values["moments"] = tuple(Moment(phase=phase, held_bytes=held, categories=each) for phase, held, each in moments)
    return Measurement(**values)


def _typed(record: Mapping[str, Any], known: Any) -> dict[str, Any]:
    """The fields that are in a record, each of its own type."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = key.replace("-", "_")
        if name not in known or type(value) is not _TYPES.get(name, str):
            raise ValueError(f"{key} is {value!r}")
        found[name] = value
    return found
