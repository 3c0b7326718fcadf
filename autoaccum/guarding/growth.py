"""Attribute the growth between two measurements to categories and modules, and describe what changed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.guarding.growth_by_module import PERSISTENT, Difference, Share, attribute_to_modules
from autoaccum.guarding.guard_result import Growth, Measurement

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KERNELS: Final = {
    "_flash_attention": "flash attention",
    "_efficient_attention": "efficient attention",
    "_cudnn_attention": "cuDNN attention",
}

_UNOWNED: Final[tuple[Category, ...]] = ("averages", "workspace")
_COPIES = {"", "aten._to_copy"}
"""Operators that copy to the card what a model was built with."""


def find_growths(before: Measurement, now: Measurement, *, more: bool | None = None) -> tuple[Growth, ...]:
    """Return what grew and shrank; all of it adds up to the growth of the peak.

    Where the peak has moved to another phase, it is compared with what that phase held before: the growth there is why
    it moved. `unused` is then the change of the unused part of the peak. A module with another name is another module.

    What grew comes first if `more`, else what shrank (None: as the peak did). The result is empty where either was
    measured on a device, since its memory is not categorised.
    """
    if before.held_bytes is None or now.held_bytes is None:
        return ()
    there = (moment for moment in before.moments if before.phase != now.phase == moment.phase)
    then: Moment | Measurement = next(there, before)
    was = then.holdings or before.holdings  # A lock has those of the peak only.
    rows = _differences(was, now.holdings)
    found: list[Growth] = []
    for category in CATEGORIES[:-1]:
        growths = [
            Growth(category=category, module=share.module, bytes=share.bytes, change=what_changed(share))
            for share in attribute_to_modules([row for row in rows if row.category == category])
        ]
        grown = now.categories.get(category, 0) - then.categories.get(category, 0)
        found += _cut(growths, category, grown)
    unused = (now.peak_bytes - now.held_bytes) - (before.peak_bytes - (then.held_bytes or 0))
    found.append(Growth(category="unused", module="", bytes=unused))
    more = now.peak_bytes >= before.peak_bytes if more is None else more
    sign = 1 if more else -1
    return tuple(sorted((growth for growth in found if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _differences(before: Iterable[Holding], now: Iterable[Holding]) -> list[Difference]:
    """Pair what is held before and now by category and module; the model itself and no module apart."""
    sides: dict[tuple[Category, str, bool], tuple[list[Holding], list[Holding]]] = {}
    for side, holdings in enumerate((before, now)):
        for holding in holdings:
            key = holding.category, holding.module, not holding.module and bool(holding.kind)
            sides.setdefault(key, ([], []))[side].append(holding)
    return [Difference(*key[:2], tuple(was), tuple(is_now)) for key, (was, is_now) in sides.items()]


def _cut(found: list[Growth], category: Category, grown: int) -> list[Growth]:
    """Limit growths by module to the growth of the whole category in the compared phase.

    For phases other than that of the peak, a lock has only categories, no modules.
    """
    if sum(growth.bytes for growth in found) == grown:
        return found
    alike = sorted((growth for growth in found if growth.bytes * grown > 0), key=lambda growth: -abs(growth.bytes))
    kept, left = [], grown
    for growth in alike:
        part = min(growth.bytes, left) if grown > 0 else max(growth.bytes, left)
        kept.append(dataclasses.replace(growth, bytes=part))
        left -= part
    return [*kept, Growth(category=category, module="", bytes=left)]


def what_changed(share: Share) -> str:
    """Describe a change as a phrase: `bf16 -> fp32`, `flash attention -> math`, `new, aten.cat in fp32`.

    Empty where only the size changed.
    """
    before = [holding for difference in share.differences for holding in difference.before]
    now = [holding for difference in share.differences for holding in difference.now]
    return ", ".join(filter(None, (_difference(before, now, share.module), _owner((*before, *now)))))


def _owner(holdings: Sequence[Holding]) -> str:
    """Name the owner of memory without a path: the model itself, or no module (such as a loss)."""
    if any(holding.module or holding.category in _UNOWNED for holding in holdings):
        return ""
    return "in the model itself" if holdings[0].kind else "in no module"


def _difference(before: Sequence[Holding], now: Sequence[Holding], module: str) -> str:
    """Describe the difference by the operators and dtypes that grew and shrank most."""
    if not now:
        return "gone"
    were, change = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for holding in before:
        were[holding.op, holding.dtype] += holding.bytes
    for holding in now:
        change[holding.op, holding.dtype] += holding.bytes
    change.subtract(were)
    (op, dtype), grown = max(change.items(), key=lambda item: item[1])
    made, category = f"{op} in {_SHORT.get(dtype, dtype)}" if dtype else op, now[0].category
    is_kept = category == "parameters" and grown > 0 and (before or not module)
    if is_kept and op not in {holding.op for holding in before} | _COPIES:
        return f"kept from update to update: {made}"
    if not before:
        return "new" if category in PERSISTENT or not op else f"new, {made}"
    if category in PERSISTENT:
        return _dtypes(change)
    if not any(holding.module for holding in now):
        return made if grown > 0 else ""
    kernels, dtypes = _kernels(before, now), _dtypes(change)
    # Another fused kernel follows from another dtype, so the dtype is named first; a fallback to math comes before.
    named = kernels if kernels.endswith("math") else dtypes or kernels or ("" if module else "in several modules")
    is_new = 0 < change.total() < 2 * grown and were[op, dtype] * 8 < grown
    return named or (made if is_new else "")


def _kernels(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    """Name the attention kernels where there is another one now; `math` stores a score for each pair of positions."""
    was, is_now = (
        next((name for holding in held for part, name in _KERNELS.items() if part in holding.op), "")
        for held in (before, now)
    )
    if was and not is_now and any("_softmax" in holding.op for holding in now):
        is_now = "math"
    return f"{was} -> {is_now}" if was and is_now and was != is_now else ""


def _dtypes(change: Mapping[tuple[str, str], int]) -> str:
    """Name the dtype that shrank most and the one that grew most, where memory moved from one to the other."""
    by_dtype = Counter[str]()
    for (_, dtype), size in change.items():
        by_dtype[dtype] += size
    grown, shrunk = max(by_dtype, key=by_dtype.__getitem__), min(by_dtype, key=by_dtype.__getitem__)
    moved = min(by_dtype[grown], -by_dtype[shrunk])
    is_much = moved * 8 >= max(by_dtype[grown], -by_dtype[shrunk])
    names = " -> ".join(_SHORT.get(dtype, dtype) for dtype in (shrunk, grown))
    return names if moved > 0 and is_much and grown and shrunk else ""
