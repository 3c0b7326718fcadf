"""What grew between two measurements, by purpose and module, and what is different about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.guarding.growth.deepest_modules import Share, push_down
from autoaccum.guarding.growth.differences import differences, is_rest
from autoaccum.guarding.growth.renaming import under_new_names
from autoaccum.guarding.growth.what_changed import what_changed
from autoaccum.guarding.judgements import Growth
from autoaccum.guarding.locks.folding import fold, group_of
from autoaccum.guarding.records import Measurement

_LITTLE = 0.1


def growths(before: Measurement, now: Measurement, *, more: bool | None = None) -> tuple[Growth, ...]:
    """What grew and shrank; all of it adds up to the growth of the peak.

    Where the peak has moved to another phase, it is compared with what that phase held before: what grew there is why
    it moved. `unused` is then by how much less of the peak is unused at that time.

    Args:
        before: A prediction, with its holdings as a lock keeps them or complete.
        now: Another, of the same schedule, complete.
        more: Whether what grew is to be told first, or what shrank; None: as the peak did.

    Returns:
        What grew or shrank most first. Nothing where either was measured, since nobody
        knows what memory of a real process is for.
    """
    if before.held_bytes is None or now.held_bytes is None:
        return ()
    moment = moment_compared(before, now)
    complete = now.holdings
    held, now = _alike(moment.holdings or before.holdings, now)
    rows = differences(held, now.holdings)
    modules = {holding.module for holding in (*held, *complete) if holding.module}
    found: list[Growth] = []
    for category in CATEGORIES:
        shares = push_down([row for row in rows if row.category == category], modules)
        grown = now.categories.get(category, 0) - moment.categories.get(category, 0)
        if category != "unused":
            hidden = partial(_hidden_bytes, category=category, before=held, now=now.holdings)
            found += _cut(_joined(category, shares, hidden), category, grown)
    unused = (now.peak_bytes - (now.held_bytes or 0)) - (before.peak_bytes - moment.held_bytes)
    found.append(Growth(category="unused", module="", bytes=unused))
    more = now.peak_bytes >= before.peak_bytes if more is None else more
    sign = 1 if more else -1
    return tuple(sorted((growth for growth in found if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _alike(held: Sequence[Holding], now: Measurement) -> tuple[Sequence[Holding], Measurement]:
    """What was held under the names of now, and what is held now told in as much detail."""
    if not any(map(is_rest, held)):
        return under_new_names(held, now.holdings), now
    held = under_new_names(held, fold(now, frozenset(map(group_of, held))).holdings, now.holdings)
    return held, fold(now, frozenset(map(group_of, held)))


def moment_compared(before: Measurement, now: Measurement) -> Moment:
    """When `before` held what `now` is compared with: at its peak, or in the phase that has the peak now."""
    if before.phase != now.phase:
        for moment in before.moments:
            if moment.phase == now.phase:
                return moment
    held: dict[Category, int] = {
        category: count for category, count in before.categories.items() if category != "unused"
    }
    return Moment(
        phase=cast("Phase", before.phase),
        held_bytes=before.held_bytes or 0,
        categories=held,
        holdings=before.holdings,
    )


def _hidden_bytes(share: Share, *, category: Category, before: Sequence[Holding], now: Sequence[Holding]) -> int:
    """What of a share may have been there before, among what is not told by module; nothing of a module that is new.

    A module is if none of its parameters were there, and they are more than what of such may have been hidden.
    """
    modules = {difference.module for difference in share.differences} - {""}
    were, are = (
        sum(each.bytes for each in held if each.category == "parameters" and each.module in modules)
        for held in (before, now)
    )
    if not were and are > _less_untold("parameters", before, now):
        return 0
    return _less_untold(category, before, now)


def _less_untold(category: Category, before: Sequence[Holding], now: Sequence[Holding]) -> int:
    """By how much less is not told by module."""
    were, are = (
        sum(each.bytes for each in held if each.category == category and is_rest(each)) for held in (before, now)
    )
    return max(0, were - are)


def _joined(category: Category, shares: Sequence[Share], hidden: Callable[[Share], int]) -> list[Growth]:
    """A growth for each share; those that are little beside another of the same module are told with it."""
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
    """Growths that were told of another time, as far as the whole of the category grew too.

    A lock tells of the phases beside that of the peak what they hold for each purpose, and not by module.
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
