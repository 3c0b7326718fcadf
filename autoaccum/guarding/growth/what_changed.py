"""What is different about memory that grew or shrank: its dtype, the operator that made it, whether it is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from autoaccum.devices.explanation import Category, Holding
from autoaccum.guarding.growth.deepest_modules import Share
from autoaccum.guarding.growth.differences import LASTING, is_rest

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KERNELS: Final = {
    "_flash_attention": "flash attention",
    "_efficient_attention": "efficient attention",
    "_cudnn_attention": "cuDNN attention",
}
_MATH: Final = "math"
"""Attention by products and a softmax, with a score for each two positions."""

_MOST = 0.5
_PART = 8
_NOBODYS: Final[tuple[Category, ...]] = ("averages", "workspace")
_MOVED = {"", "aten._to_copy"}
"""Operators that bring to the card what a model was built with."""


def what_changed(share: Share, hidden_bytes: int) -> str:
    """What is different, as a phrase: `bf16 -> fp32`, `flash attention -> math`, `new, aten.cat in fp32`.

    Args:
        share: What grew or shrank.
        hidden_bytes: What of it may have been there before, among what a lock does not tell by module.

    Returns:
        The phrase; empty where only the size is different.
    """
    changed = [holding for each in share.differences if each.bytes for holding in (*each.before, *each.now)]
    return ", ".join(filter(None, (_difference(share, hidden_bytes), _whose(changed))))


def _whose(changed: Sequence[Holding]) -> str:
    """Whose it is, where no path tells: many modules', that of the model itself, or no module's, such as the loss."""
    if not changed or any(holding.module or holding.category in _NOBODYS for holding in changed):
        return ""
    if all(map(is_rest, changed)):
        return "in small modules"
    if all(holding.kind for holding in changed):
        return "in the model itself"
    return "in no module" if not any(holding.kind or is_rest(holding) for holding in changed) else ""


def _difference(share: Share, hidden_bytes: int) -> str:
    before = [holding for difference in share.differences for holding in difference.before]
    now = [holding for difference in share.differences for holding in difference.now]
    if not now:
        return "" if all(map(is_rest, before)) else "gone"
    is_new = not before and not hidden_bytes
    if now[0].category == "parameters" and not any(
        holding.module or holding.kind or is_rest(holding) for holding in now
    ):
        return ": ".join(filter(None, ("kept from update to update", _made(now, before))))
    if now[0].category in LASTING:
        kept = "" if is_new and share.module else _kept(before, now)
        return kept or _dtypes(before, now) or ("new" if is_new else "")
    if not before:
        return ", ".join(filter(None, ("new" if is_new else "", _made(now, ()))))
    if not any(holding.module for holding in now):
        return _made(now, before)
    kernels, dtypes = _kernels(before, now), _dtypes(before, now)
    # Another fused kernel is what follows from another dtype; score matrices are no one's intention.
    first = kernels if kernels.endswith(_MATH) else dtypes
    throughout = "" if share.module else "in other modules" if share.is_rest else "throughout the model"
    return first or kernels or throughout or _new_operator(before, now, share)


def _kernels(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    was, is_now = _attention(before), _attention(now)
    if was and not is_now and any("_softmax" in holding.op for holding in now):
        is_now = _MATH
    return f"{was} -> {is_now}" if was and is_now and was != is_now else ""


def _attention(holdings: Iterable[Holding]) -> str:
    """How attention was computed, where that shows."""
    return next((name for holding in holdings for part, name in _KERNELS.items() if part in holding.op), "")


def _dtypes(before: Sequence[Holding], now: Sequence[Holding]) -> str:
    """From the dtype that shrank most to the one that grew most, where memory went from one to the other."""
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
    """What a module keeps from update to update, beside what it was built with."""
    made = {holding.op for holding in now} - {holding.op for holding in before} - _MOVED
    kept = [holding for holding in now if holding.op in made and holding.category == "parameters"]
    return f"kept from update to update: {_made(kept, ())}" if kept else ""


def _new_operator(before: Sequence[Holding], now: Sequence[Holding], share: Share) -> str:
    """What made most of the growth, and in which dtype, where it made none of that before."""
    known = {(holding.op, holding.dtype) for holding in before}
    made = [holding for holding in now if known and (holding.op, holding.dtype) not in known]
    return _made(made, ()) if sum(holding.bytes for holding in made) > _MOST * share.bytes > 0 else ""


def _made(now: Iterable[Holding], before: Iterable[Holding]) -> str:
    """The operator whose memory grew most, and its dtype."""
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
