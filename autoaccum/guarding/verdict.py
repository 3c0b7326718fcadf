"""Judge one case: whether memory grew more than the tolerance, for what and in which modules, and what still fits."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from autoaccum.checks import join_words
from autoaccum.devices.explanation import Holding
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Growth, Measurement, Verdict
from autoaccum.messages import Message, message
from autoaccum.simulation.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.sources.module_names import compact_names, mask_numbers
from autoaccum.units import MemorySize

_Lines: TypeAlias = "Mapping[str, str] | None"
_ROUNDING: Final = 1e-9
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_PERSISTENT: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")
_LITTLE: Final = 0.1
"""A module with no more than this share of the changes is counted with the others."""
_MOST: Final = 3
"""More modules than this are named by the modules that contain them; and so many causes are named."""


def compare(
    case: Case, before: Measurement, now: Measurement, tolerance: MemorySize, *, command: str = "", lines: _Lines = None
) -> Verdict:
    """Compare what a case takes now with a lock or another revision, and return the verdict.

    `command` writes what was measured to the lock; empty where there is no lock. `lines` are those of `measure`.
    """
    verdict = Verdict(case=case, outcome="passed", before=before, now=now)
    if unlike := tuple(_other_conditions(before, now)):
        return dataclasses.replace(
            verdict,
            outcome="unmeasured",
            exit_code=NotMeasuredError.exit_code,
            reasons=unlike,
            hint=message("compare_or_lock_anew"),
            command=command,
        )
    reasons = tuple(_find_reasons(before, now, tolerance))
    changes = [size - before.sizes[name] for name, size in now.sizes.items()]
    sign = 1 if reasons or next(filter(None, changes), 0) >= 0 else -1
    growths = find_growths(before, now, sign, lines)
    explanation = tuple(_explain(case, before, now, growths, sign))
    verdict = dataclasses.replace(verdict, growths=growths, explanation=explanation)
    if not reasons:
        return verdict
    hint = message("lock_if_meant") if command else None
    return dataclasses.replace(verdict, outcome="regressed", exit_code=1, reasons=reasons, hint=hint, command=command)


def _other_conditions(before: Measurement, now: Measurement) -> Iterator[Message]:
    """Say why two measurements cannot be compared: another schedule, card, version or setting."""
    if before.micro_batches != now.micro_batches:
        yield message("other_schedule", before=list(before.micro_batches), now=list(now.micro_batches))
    if before.micro_tokens != now.micro_tokens:
        yield message("other_setting", name="micro_tokens", before=before.micro_tokens, now=now.micro_tokens)
    if before.card != now.card:
        yield message("other_card", before=before.card, now=now.card)
    for name in sorted({*before.environment, *now.environment}):
        was, is_now = (measured.environment.get(name) for measured in (before, now))
        if was != is_now:
            yield message("other_setting", name=name, before=was, now=is_now)


def _find_reasons(before: Measurement, now: Measurement, tolerance: MemorySize) -> Iterator[Message]:
    """Say what regressed, the most important first.

    The largest micro-batch may fall by the tolerance's share of it.
    """
    if before.fits and not now.fits:
        yield message(
            "fits_no_more",
            micro_batch=now.micro_batch,
            min_budget_bytes=now.min_budget_bytes,
            limit_bytes=now.limit_bytes,
        )
    share = tolerance.fraction
    if share is None:
        share = (tolerance.bytes or 0) / max(before.peak_bytes, 1)
    if now.largest < before.largest - math.floor(before.largest * min(share, 1.0) + _ROUNDING):
        yield message("largest_fell", before=before.largest, now=now.largest)
    if quantity := _find_regressed(before, now, tolerance):
        was = before.sizes[quantity]
        growth = now.sizes[quantity] - was
        yield message("memory_grew", quantity=quantity, bytes=growth, before_bytes=was, tolerance=str(tolerance))


def _find_regressed(before: Measurement, now: Measurement, tolerance: MemorySize) -> str | None:
    """Return which of a measurement's `sizes` regressed, if any.

    It is the peak if another one grew too or by a whole segment, else the smallest budget if what is held grew too,
    else the peak by tokens. What is held alone may grow, since what fits stays the same. Where both peaks are above the
    budget, the smallest budget counts in place of the peak.
    """
    growth = {name: now.sizes[name] - size for name, size in before.sizes.items()}
    exceeds = {name: growth[name] > tolerance.resolve(size) for name, size in before.sizes.items()}
    are_over = all(measured.peak_bytes > measured.limit_bytes for measured in (before, now))
    main = "min_budget" if are_over else "peak"
    if exceeds[main] and (growth[main] >= LARGE_SEGMENT_BYTES or exceeds["held"] or exceeds["min_budget"]):
        return main
    if exceeds["held"] and exceeds["min_budget"]:
        return "min_budget"
    return "tokens" if exceeds.get("tokens") else None


def _explain(
    case: Case, before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int
) -> Iterator[Message]:
    """Say what grew (by `sign` -1: shrank), for what, which settings of the update changed, and what fits now."""
    changes = [(name, now.sizes[name] - size) for name, size in before.sizes.items() if now.sizes[name] != size]
    if changes:  # One that changed in the direction of `sign`, else any.
        quantity, change = max(changes, key=lambda change: change[1] * sign > 0)
        yield message("memory_changed", quantity=quantity, bytes=change, before_bytes=before.sizes[quantity])
    most = max((sign * growth.bytes for growth in growths), default=0)
    large = [growth for growth in growths if sign * growth.bytes > _LITTLE * most]
    for growth in sorted(large, key=lambda growth: growth.category == "unused")[:_MOST]:
        yield message("module_changed", **{name: value for name, value in vars(growth).items() if name != "line"})
    if before.phase and now.phase and before.phase != now.phase:
        yield message("peak_moved", before=before.phase, now=now.phase)
    for name, value in now.update.items():
        if before.update.get(name) != value:
            yield message("setting_changed", name=name, before=before.update.get(name), now=value)
    if before.largest != now.largest:
        yield message("largest_changed", gpu=case.options.gpu, before=before.largest, now=now.largest)


_Changes = Sequence[tuple[Holding, int]]
"""What is held before, each with -1, and what is held now, each with 1."""


def find_growths(before: Measurement, now: Measurement, sign: int = 1, lines: _Lines = None) -> tuple[Growth, ...]:
    """Return what grew and shrank; all of it adds up to the growth of the peak.

    What grew comes first, or by a `sign` of -1 what shrank. A module with another name is another module.
    """
    changes = defaultdict[Category, list[tuple[Holding, int]]](list)
    for side, measured in ((-1, before), (1, now)):
        for holding in measured.holdings:
            changes[holding.category].append((holding, side))
    growths = [growth for category in CATEGORIES for growth in _by_module(changes[category], lines or {})]
    unused = (now.peak_bytes - now.held_bytes) - (before.peak_bytes - before.held_bytes)
    growths.append(Growth(category="unused", module="", bytes=unused))
    return tuple(sorted((growth for growth in growths if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _by_module(changes: _Changes, lines: Mapping[str, str]) -> Iterator[Growth]:
    """Name the growth of a category by modules, as deep as at most three of them have nearly all of it.

    Persistent memory is that of a single module, or of the model. Modules that differ only in numbers are one. What is
    left is one growth without a module.
    """
    modules = defaultdict[tuple[str, bool], list[tuple[Holding, int]]](list)
    for holding, side in changes:  # The model itself has an empty name and a kind; what is in no module has neither.
        modules[holding.module, not holding.module and bool(holding.kind)].append((holding, side))
    yield from (_growth("", group, lines) for (name, _), group in modules.items() if not name)
    inside = {name: group for (name, _), group in modules.items() if name and _net(group)}
    most = 1 if changes and changes[0][0].category in _PERSISTENT else _MOST
    for depth in range(max((name.count(".") + 1 for name in inside), default=0), 0, -1):
        groups = defaultdict[str, list[str]](list)
        for name in inside:
            groups[mask_numbers(_cut(name, depth))].append(name)
        sizes = {pattern: abs(sum(_net(inside[name]) for name in names)) for pattern, names in groups.items()}
        large = [pattern for pattern, size in sizes.items() if size > _LITTLE * sum(sizes.values())]
        if not 0 < len(large) <= most:
            continue
        for pattern in large:
            alike = dict.fromkeys(_cut(name, depth) for name in groups[pattern])
            is_named = len(alike) == 1 or bool(pattern.strip("*."))  # Several numbers alone name nothing.
            module = join_words(word for word, _ in compact_names(alike)) if is_named else ""
            yield _growth(module, [change for name in groups[pattern] for change in inside.pop(name)], lines)
        break
    if rest := [change for group in inside.values() for change in group]:
        yield _growth("", rest, lines)


def _cut(module: str, depth: int) -> str:
    """Return the module of this depth that a module lies in."""
    return ".".join(module.split(".")[:depth])


def _growth(module: str, changes: _Changes, lines: Mapping[str, str]) -> Growth:
    grown = Counter[str]()
    for holding, side in changes:
        grown[holding.module if holding.module or holding.kind else "(none)"] += side * holding.bytes
    return Growth(
        category=changes[0][0].category,
        module=module,
        bytes=_net(changes),
        change=_describe_change(module, changes),
        line=lines.get(max(grown, key=grown.__getitem__), ""),
    )


def _describe_change(module: str, changes: _Changes) -> str:
    """Describe a change as a phrase, `bf16 -> fp32` or `new, aten.cat in fp32`; empty where only the size changed."""
    before, now = ([holding for holding, side in changes if side == wanted] for wanted in (-1, 1))
    last = (now or before)[0]
    is_persistent = last.category in _PERSISTENT
    where = ""
    if not module and not is_persistent:
        is_several = any(holding.module for holding, _ in changes)
        where = "in several modules" if is_several else "in the model itself" if last.kind else "in no module"
    if not now:
        return ", ".join(filter(None, ("gone", where)))
    ops, dtypes = Counter[str](), Counter[str]()
    for holding, side in changes:
        ops[holding.op] += side * holding.bytes
        dtypes[_SHORT.get(holding.dtype, holding.dtype)] += side * holding.bytes
    what = _moved(dtypes) or ("" if is_persistent else _moved(ops))
    op, dtype = max(ops, key=ops.__getitem__), max(dtypes, key=dtypes.__getitem__)
    is_new_op = op not in {holding.op for holding in before} and not (is_persistent and not before)
    if is_new_op and not what and where != "in several modules":
        what = f"{op} in {dtype}" if dtype else op
    return ", ".join(filter(None, ("" if before else "new", what, where)))


def _moved(change: Mapping[str, int]) -> str:
    """Name what shrank most and what grew most, where memory moved from one to the other."""
    grown, shrunk = max(change, key=change.__getitem__), min(change, key=change.__getitem__)
    moved = min(change[grown], -change[shrunk])
    is_much = moved * 8 >= max(change[grown], -change[shrunk])
    return f"{shrunk} -> {grown}" if moved > 0 and is_much and grown and shrunk else ""


def _net(changes: _Changes) -> int:
    return sum(side * holding.bytes for holding, side in changes)
