"""Attribute the growth between two measurements to categories and modules, and describe what changed."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.guarding.guard_result import Growth, Measurement
from autoaccum.workload.module_names import common_name, compact_names, mask_numbers

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KERNELS: Final = {
    "_flash_attention": "flash attention",
    "_efficient_attention": "efficient attention",
    "_cudnn_attention": "cuDNN attention",
}

_UNOWNED: Final[tuple[Category, ...]] = ("averages", "workspace")
_COPIES = {"", "aten._to_copy"}
"""Operators that copy to the card what a model was built with."""

_PERSISTENT: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")

_LITTLE = 0.1
"""A module with no more than this share of the changes in its parent is counted with the parent."""

_MOST = 3
"""More modules than this are named by the module that contains them."""

_NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Difference:
    """The holdings of one module in one category, before and now; the path of the model itself is empty."""

    category: Category
    module: str
    before: tuple[Holding, ...] = ()
    now: tuple[Holding, ...] = ()

    @property
    def parts(self) -> list[str]:
        """The parts of its path."""
        return self.module.split(".") if self.module else []

    @property
    def before_bytes(self) -> int:
        """The bytes held before."""
        return sum(holding.bytes for holding in self.before)

    @property
    def bytes(self) -> int:
        """The growth in bytes."""
        return sum(holding.bytes for holding in self.now) - self.before_bytes


@dataclass(frozen=True)
class Share:
    """A part of a growth.

    Attributes:
        module: The module, with all modules in it, named as in `ModuleShare.name`.
        differences: All differences in these modules, with those that are 0.
    """

    module: str
    differences: tuple[Difference, ...]

    @property
    def bytes(self) -> int:
        """The growth in bytes."""
        return _net(self.differences)


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
            for share in _attribute_to_modules([row for row in rows if row.category == category])
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
        return "new" if category in _PERSISTENT or not op else f"new, {made}"
    if category in _PERSISTENT:
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


def _attribute_to_modules(differences: Sequence[Difference]) -> list[Share]:
    """Split the growth of one category among the deepest modules that explain it.

    Modules that differ only in numbers are treated as one. A growth stays with the containing module if all in it grew
    alike, if both it and its children have a part, or if too many children do. What belongs to no module is a share of
    its own. There is one difference per module, also where nothing changed.
    """
    outside = [Share("", (row,)) for row in differences if not row.module and row.bytes]
    inside = [row for row in differences if row.module]
    paths = {".".join(row.parts[:depth]) for row in inside for depth in range(1, len(row.parts) + 1)}
    return [*outside, *_split(inside, 0, paths)]


def _split(rows: Sequence[Difference], depth: int, paths: Set[str]) -> list[Share]:
    """Split what grew in a module, or in several that differ only in numbers."""
    changed = [row for row in rows if row.bytes]
    children: dict[str, list[Difference]] = defaultdict(list)
    for row in rows:
        children[mask_numbers(row.parts[depth]) if len(row.parts) > depth else ""].append(row)
    own = abs(_net(children.pop("", [])))
    nets = {name: abs(_net(child)) for name, child in children.items()}
    little = _LITTLE * (sum(nets.values()) + own)
    large = [child for name, child in children.items() if nets[name] > little]
    together = own > little or not 0 < len(large) <= _MOST or (len(large) > 1 and _is_even(rows, deep=depth > 0))
    if not changed or together:
        return [Share(_name(changed, depth, paths), tuple(rows))] if changed else []
    shares = []
    for child in large:
        numbered = {row.parts[depth] for row in child if row.bytes}
        shares += _split([row for row in child if row.parts[depth] in numbered], depth + 1, paths)
    if sum(abs(share.bytes) > little for share in shares) > _MOST:
        shares = [Share(_name(child, depth + 1, paths), tuple(child)) for child in large]
    taken = {id(row) for child in large for row in child}
    rest = tuple(row for row in changed if id(row) not in taken)
    return [*shares, *([Share(_name(rest, depth, paths), rest)] if rest else [])]


def _is_even(rows: Sequence[Difference], *, deep: bool) -> bool:
    """Return whether nearly all grew by about the same factor, or all is new (in a module, or persistent memory)."""
    grown, before = _net(rows), sum(row.before_bytes for row in rows)
    if not before:
        return deep or rows[0].category in _PERSISTENT
    if not grown:
        return False
    # The growth factor of each, relative to the growth factor of all.
    factors = [(row, row.bytes / row.before_bytes * before / grown) for row in rows if row.before_bytes]
    alike = [row for row, factor in factors if 0.5 <= factor <= 2]
    return _net(alike) / grown >= _NEARLY_ALL and sum(row.before_bytes for row in alike) >= _NEARLY_ALL * before


def _name(rows: Iterable[Difference], depth: int, paths: Set[str]) -> str:
    """Name the modules of this depth that contain these differences, with `*` for numbers that stand for all of them.

    Several that have no common name are named by the module around them, as are numbered layers of several classes; the
    name of the whole model is empty.
    """
    inside = [row for row in rows if row.bytes]
    kinds = {holding.kind for row in inside if len(row.parts) == depth for holding in (*row.before, *row.now)}
    depth -= depth > 1 and len(kinds) > 1 and inside[0].parts[depth - 1].isdecimal()
    names = list(dict.fromkeys(".".join(row.parts[:depth]) for row in inside))
    if len({mask_numbers(name) for name in names}) > 1:  # The remainder of several modules.
        return ""
    starred = common_name(names)
    alike = re.compile(r"\d+".join(map(re.escape, starred.split("*"))))
    if not any(alike.fullmatch(path) for path in paths - set(names)):
        return starred if starred.strip("*.") else ""
    patterns = compact_names(names)
    around = os.path.commonprefix([name.split(".") for name in names])
    return patterns[0][0] if len(patterns) == 1 else ".".join(around)


def _net(rows: Iterable[Difference]) -> int:
    return sum(row.bytes for row in rows)
