"""What grew, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoaccum.devices.explanation import CATEGORIES
from autoaccum.guarding.growth.differences import LASTING
from autoaccum.guarding.judgements import Growth
from autoaccum.guarding.records import Case, Measurement
from autoaccum.units import percent, precise_bytes, signed_bytes

_MOST = 3
_LITTLE = 0.1


def explain(
    case: Case, before: Measurement, now: Measurement, growths: Sequence[Growth], *, more: bool | None = None
) -> str:
    """Say by how much the peak grew, for what, and what fits now; empty where nothing changed.

    Args:
        case: What was measured: it names the card as it was asked for.
        before: What it took.
        now: What it takes.
        growths: All that grew and shrank, the most first.
        more: Whether what grew is to be told, or what shrank; None: as the peak did, or what is held of it.
    """
    grown, held = now.peak_bytes - before.peak_bytes, (now.held_bytes or 0) - (before.held_bytes or 0)
    sign = (-1 if (grown or held) < 0 else 1) if more is None else 1 if more else -1
    causes = list(_causes(before, now, growths, sign))
    fits = _fits(case, before, now)
    if not (grown or causes or held):
        return fits
    told = _change(grown, before.peak_bytes) if grown else "the peak is as high as it was"
    if sign * held > 0 >= sign * grown:
        told = f"{_change(held, before.held_bytes or 0)} of {_peak(grown)} are held"
    return "; ".join(part for part in (f"{told}: {', '.join(causes)}" if causes else told, fits) if part)


@dataclass
class _Cause:
    """Growths that are told in one: what lasts of a module is often made, and gone, at the same time."""

    growths: list[Growth]

    @property
    def bytes(self) -> int:
        return sum(growth.bytes for growth in self.growths)

    def __str__(self) -> str:
        first = self.growths[0]
        of = f" of {first.module}" if first.module else ""
        change = f" ({first.change})" if first.change else ""
        named = sorted({growth.category for growth in self.growths}, key=CATEGORIES.index)
        return f"{_listed([name.replace('_', ' ') for name in named])}{of} {signed_bytes(self.bytes)}{change}"


def _causes(before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int) -> Iterator[str]:
    moved = bool(before.phase and now.phase and before.phase != now.phase)
    told = [growth for growth in growths if growth.category != "unused" or not moved]
    causes = sorted(_joined(told), key=lambda cause: -sign * cause.bytes)
    most = max((sign * cause.bytes for cause in causes), default=0)
    shown = [cause for cause in causes if sign * cause.bytes >= max(_LITTLE * most, 1)][:_MOST]
    against = [cause for cause in causes if -sign * cause.bytes >= max(0.5 * most, 1) and not _is_unused(cause)]
    yield from map(str, sorted([*shown, *against[:1]], key=_is_unused))
    if moved:
        yield f"the peak moved from {before.phase} to {now.phase}"
    yield from _settings(before, now)
    had_state = before.categories.get("optimizer_state", 0)
    if (
        any(not _is_unused(cause) for cause in shown)
        and had_state
        and had_state == now.categories.get("optimizer_state", 0)
    ):
        yield "optimizer unchanged"


def _joined(growths: Sequence[Growth]) -> list[_Cause]:
    causes: dict[tuple[str, ...], _Cause] = {}
    for growth in growths:
        lasts = growth.category in LASTING and growth.module
        key = (growth.module, growth.change) if lasts else (growth.module, growth.change, growth.category)
        if key in causes and causes[key].bytes * growth.bytes >= 0:
            causes[key].growths.append(growth)
        elif key not in causes:
            causes[key] = _Cause([growth])
        else:
            causes[(*key, growth.category)] = _Cause([growth])
    return list(causes.values())


def _is_unused(cause: _Cause) -> bool:
    return cause.growths[0].category == "unused"


def _settings(before: Measurement, now: Measurement) -> Iterator[str]:
    for name in ("precision", "optimizer", "batchnorm"):
        was, is_now = getattr(before, name), getattr(now, name)
        if was != is_now:
            yield f"{name} {was} -> {is_now}"
    if before.parameters != now.parameters:
        yield f"parameters {before.parameters:,} -> {now.parameters:,}"


def _change(grown: int, before: int) -> str:
    return f"{signed_bytes(grown)} ({percent(grown, before, sign=True)})"


def _peak(grown: int) -> str:
    return (
        f"a peak that is {precise_bytes(abs(grown))} {'lower' if grown < 0 else 'higher'}" if grown else "the same peak"
    )


def _fits(case: Case, before: Measurement, now: Measurement) -> str:
    if before.largest == now.largest:
        return ""
    return f"{case.gpu or case.device} now holds {now.largest or 'none'} instead of {before.largest}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
