"""Attribute the growth between two measurements to categories and modules, and describe what changed."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, cast

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.guarding.growth_by_module import PERSISTENT, Difference, Share, attribute_to_modules, is_folded
from autoaccum.guarding.guard_result import Growth, Measurement
from autoaccum.guarding.lock import fold, group_of

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KERNELS: Final = {
    "_flash_attention": "flash attention",
    "_efficient_attention": "efficient attention",
    "_cudnn_attention": "cuDNN attention",
}
_MATH: Final = "math"
"""Attention by matrix products and a softmax, which stores a score for each pair of positions."""

_UNOWNED: Final[tuple[Category, ...]] = ("averages", "workspace")
_COPIES = {"", "aten._to_copy"}
"""Operators that copy to the card what a model was built with."""

_LITTLE, _MOST, _PART = 0.1, 0.5, 8


def find_growths(before: Measurement, now: Measurement, *, more: bool | None = None) -> tuple[Growth, ...]:
    """Return what grew and shrank; all of it adds up to the growth of the peak.

    Where the peak has moved to another phase, it is compared with what that phase held before: the growth there is why
    it moved. `unused` is then the change of the unused part of the peak.

    What grew comes first if `more`, else what shrank (None: as the peak did). Holdings of `before` may be folded, as a
    lock keeps them. The result is empty where either was measured on a device, since its memory is not categorised.
    """
    if before.held_bytes is None or now.held_bytes is None:
        return ()
    moment = _comparable_moment(before, now)
    complete = now.holdings
    was = _undo_wrapping(moment.holdings or before.holdings, complete)
    if any(map(is_folded, was)):  # From a lock: fold what is held now in the same way.
        now = fold(now, frozenset(map(group_of, was)))
    was = _match_moved(was, now.holdings)
    rows = _differences(was, now.holdings)
    modules = {holding.module for holding in (*was, *complete) if holding.module}
    found: list[Growth] = []
    for category in CATEGORIES[:-1]:
        shares = attribute_to_modules([row for row in rows if row.category == category], modules)
        grown = now.categories.get(category, 0) - moment.categories.get(category, 0)
        hidden = partial(_folded_bytes, category=category, before=was, now=now.holdings)
        found += _cut(_merge_small(category, shares, hidden), category, grown)
    unused = (now.peak_bytes - (now.held_bytes or 0)) - (before.peak_bytes - moment.held_bytes)
    found.append(Growth(category="unused", module="", bytes=unused))
    more = now.peak_bytes >= before.peak_bytes if more is None else more
    sign = 1 if more else -1
    return tuple(sorted((growth for growth in found if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _comparable_moment(before: Measurement, now: Measurement) -> Moment:
    """Return the moment of `before` to compare with: its peak, or the phase in which the peak is now."""
    if before.phase != now.phase:
        for moment in before.moments:
            if moment.phase == now.phase:
                return moment
    held: dict[Category, int] = {each: size for each, size in before.categories.items() if each != "unused"}
    return Moment(
        phase=cast("Phase", before.phase), held_bytes=before.held_bytes or 0, categories=held, holdings=before.holdings
    )


def _undo_wrapping(before: Sequence[Holding], now: Sequence[Holding]) -> list[Holding]:
    """Rename the modules of `before` if the model was wrapped or unwrapped since, which adds or removes a prefix."""
    olds, news = ({holding.module for holding in side if holding.module} for side in (before, now))
    best, old, new = len(olds & news), "", ""
    for wrapped, inner, outer in ((True, olds, news), (False, news, olds)):
        for prefix in {".".join(module.split(".")[:depth]) for module in outer for depth in (1, 2)}:
            alike = sum(f"{prefix}.{module}" in outer for module in inner)
            if alike > best:
                best, old, new = alike, *(("", prefix) if wrapped else (prefix, ""))

    def renamed(holding: Holding) -> Holding:
        if not (holding.module or holding.kind):  # It belongs to no module.
            return holding
        rest = f"{holding.module}.".removeprefix(f"{old}.").strip(".")
        return dataclasses.replace(holding, module=".".join(filter(None, (new, rest))))

    return list(map(renamed, before))


def _match_moved(before: Sequence[Holding], now: Sequence[Holding]) -> list[Holding]:
    """Rename the modules of `before` to those that hold exactly the same now: moving a module is no growth."""
    olds, news = ({holding.module for holding in side} for side in (before, now))
    trait = attrgetter("category", "dtype", "op", "bytes")
    waiting: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for holding in reversed(now):
        if holding.module not in olds:
            waiting[trait(holding)].append(holding.module)
    found = []
    for holding in before:
        others = waiting[trait(holding)]
        moved = bool(holding.module) and holding.module not in news and bool(others)
        found.append(dataclasses.replace(holding, module=others.pop()) if moved else holding)
    return found


def _differences(before: Iterable[Holding], now: Iterable[Holding]) -> list[Difference]:
    """Pair what is held before and now by category and module; the model itself, no module and folded ones apart."""
    sides: dict[tuple[Category, str, bool, bool], tuple[list[Holding], list[Holding]]] = {}
    for side, holdings in enumerate((before, now)):
        for holding in holdings:
            key = holding.category, holding.module, not holding.module and bool(holding.kind), is_folded(holding)
            sides.setdefault(key, ([], []))[side].append(holding)
    return [Difference(*key[:2], tuple(was), tuple(is_now)) for key, (was, is_now) in sides.items()]


def _folded_bytes(share: Share, *, category: Category, before: Sequence[Holding], now: Sequence[Holding]) -> int:
    """Return how many bytes of a share may have been among the folded holdings before; 0 for a new module.

    A module is new if none of its parameters were recorded, and they are more than what the folded holdings had.
    """
    modules = {difference.module for difference in share.differences} - {""}
    were, are = (
        sum(each.bytes for each in held if each.category == "parameters" and each.module in modules)
        for held in (before, now)
    )
    if not were and are > _folded_shrinkage("parameters", before, now):
        return 0
    return _folded_shrinkage(category, before, now)


def _folded_shrinkage(category: Category, before: Sequence[Holding], now: Sequence[Holding]) -> int:
    """Return by how much the folded holdings of a category shrank."""
    were, are = (
        sum(each.bytes for each in held if each.category == category and is_folded(each)) for held in (before, now)
    )
    return max(0, were - are)


def _merge_small(category: Category, shares: Sequence[Share], hidden: Callable[[Share], int]) -> list[Growth]:
    """Make a growth for each share; one that is small next to another of the same module is added to it."""
    found: list[Growth] = []
    for share in sorted(shares, key=lambda share: -abs(share.bytes)):
        first = next((at for at, growth in enumerate(found) if growth.module == share.module), None)
        if first is not None and abs(share.bytes) < _LITTLE * abs(found[first].bytes):
            found[first] = dataclasses.replace(found[first], bytes=found[first].bytes + share.bytes)
        else:
            change = what_changed(share, hidden(share))
            found.append(Growth(category=category, module=share.module, bytes=share.bytes, change=change))
    return found


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


def what_changed(share: Share, hidden_bytes: int) -> str:
    """Describe a change as a phrase: `bf16 -> fp32`, `flash attention -> math`, `new, aten.cat in fp32`.

    Empty where only the size changed. `hidden_bytes` of it may have been among the folded holdings of a lock.
    """
    changed = [holding for each in share.differences if each.bytes for holding in (*each.before, *each.now)]
    return ", ".join(filter(None, (_difference(share, hidden_bytes), _owner(changed))))


def _owner(changed: Sequence[Holding]) -> str:
    """Name the owner of memory without a path: many small modules, the model itself, or no module (such as a loss)."""
    if not changed or any(holding.module or holding.category in _UNOWNED for holding in changed):
        return ""
    if all(map(is_folded, changed)):
        return "in small modules"
    if all(holding.kind for holding in changed):
        return "in the model itself"
    return "in no module" if not any(holding.kind or is_folded(holding) for holding in changed) else ""


def _difference(share: Share, hidden_bytes: int) -> str:
    before = [holding for difference in share.differences for holding in difference.before]
    now = [holding for difference in share.differences for holding in difference.now]
    if not now:
        return "" if all(map(is_folded, before)) else "gone"
    is_new = not before and not hidden_bytes
    if now[0].category == "parameters" and not any(
        holding.module or holding.kind or is_folded(holding) for holding in now
    ):
        return ": ".join(filter(None, ("kept from update to update", _main_operator(now, before))))
    if now[0].category in PERSISTENT:
        kept = "" if is_new and share.module else _kept(before, now)
        return kept or _dtypes(before, now) or ("new" if is_new else "")
    if not before:
        return ", ".join(filter(None, ("new" if is_new else "", _main_operator(now, ()))))
    if not any(holding.module for holding in now):
        return _main_operator(now, before)
    kernels, dtypes = _kernels(before, now), _dtypes(before, now)
    # Another fused kernel follows from another dtype, so the dtype is named first; a fallback to math comes before.
    first = kernels if kernels.endswith(_MATH) else dtypes
    throughout = "" if share.module else "in other modules" if share.is_remainder else "throughout the model"
    return first or kernels or throughout or _new_operator(before, now, share)


def _kernels(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    was, is_now = _attention(before), _attention(now)
    if was and not is_now and any("_softmax" in holding.op for holding in now):
        is_now = _MATH
    return f"{was} -> {is_now}" if was and is_now and was != is_now else ""


def _attention(holdings: Iterable[Holding]) -> str:
    """Return the attention kernel that is named in the operators; empty where there is none."""
    return next((name for holding in holdings for part, name in _KERNELS.items() if part in holding.op), "")


def _dtypes(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    """Name the dtype that shrank most and the one that grew most, where memory moved from one to the other."""
    change = Counter({holding.dtype: 0 for holding in (*before, *now) if holding.dtype})
    for holding in now:
        change[holding.dtype] += holding.bytes
    for holding in before:
        change[holding.dtype] -= holding.bytes
    if len(change) < 2:
        return ""
    grown, shrunk = max(change, key=lambda dtype: change[dtype]), min(change, key=lambda dtype: change[dtype])
    most = max(change[grown], -change[shrunk])
    if min(change[grown], -change[shrunk]) * _PART < most or not (grown and shrunk):
        return ""
    if (_bits(grown) - _bits(shrunk)) * change.total() < 0:  # Something else outweighs it.
        return ""
    return f"{_short(shrunk)} -> {_short(grown)}"


def _kept(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    """Name what a module keeps from update to update, apart from what it was built with."""
    made = {holding.op for holding in now} - {holding.op for holding in before} - _COPIES
    kept = [holding for holding in now if holding.op in made and holding.category == "parameters"]
    return f"kept from update to update: {_main_operator(kept, ())}" if kept else ""


def _new_operator(before: Sequence[Holding], now: Sequence[Holding], share: Share) -> str:
    """Name the operator and dtype that made most of the growth, where they did not occur before."""
    known = {(holding.op, holding.dtype) for holding in before}
    made = [holding for holding in now if known and (holding.op, holding.dtype) not in known]
    return _main_operator(made, ()) if sum(holding.bytes for holding in made) > _MOST * share.bytes > 0 else ""


def _main_operator(now: Iterable[Holding], before: Iterable[Holding]) -> str:
    """Name the operator that grew most, and its dtype."""
    change = Counter[tuple[str, str]]()
    for holding in now:
        change[holding.op, holding.dtype] += holding.bytes
    for holding in before:
        change[holding.op, holding.dtype] -= holding.bytes
    (op, dtype), more = max(change.items(), key=lambda pair: pair[1], default=(("", ""), 0))
    if not op or more <= 0:
        return ""
    return f"{op} in {_short(dtype)}" if dtype else op


def _bits(dtype: str) -> int:
    return int("".join(filter(str.isdecimal, dtype)) or 8)


def _short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)
