"""Plans and accounts made by hand, as pictures find them at their worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Outcome, Phase, Trial
from autoaccum.devices.explanation import CATEGORIES, Category, CurvePoint, Explanation, MemoryReport, Timeline
from autoaccum.planning.plan_record import Plan
from autoaccum.units import GIB, MIB

POINTS = 200
PHASES: tuple[tuple[int, Phase], ...] = (
    (0, "batch"),
    (1, "forward"),
    (25, "backward"),
    (80, "batch"),
    (81, "forward"),
    (105, "backward"),
    (190, "clip"),
    (191, "update"),
)
Held = Mapping[Category, Callable[[int], int]]


def rises_and_falls(most: int) -> Callable[[int], int]:
    """The bytes that forward adds and backward frees, in both micro-batches of `PHASES`."""
    return lambda at: int(most * max(0, 1 - abs((at % 80) - 25) / (25 if at % 80 < 25 else 55))) if at < 160 else 0


USUAL: Held = {
    "parameters": lambda at: GIB // 2,
    "gradients": lambda at: GIB // 2 if at > 80 else at * GIB // 160,
    "optimizer_state": lambda at: GIB,
    "activations": rises_and_falls(7 * GIB),
    "temporaries": lambda at: GIB // 2 if 81 <= at < 190 else 0,
    "workspace": lambda at: 64 * MIB if at == 105 else 0,
}


def account(
    held: Held = USUAL,
    *,
    unused: int = GIB,
    phases: tuple[tuple[int, Phase], ...] = PHASES,
    curve: tuple[CurvePoint, ...] = (),
    module: str = "blocks.*.mlp",
) -> MemoryReport:
    """An account of two micro-batches of 12 samples."""
    categories = {category: tuple(map(of, range(POINTS))) for category, of in held.items()}
    total = [sum(column) for column in zip(*categories.values(), strict=True)]
    peak_at = max(range(POINTS), key=total.__getitem__)
    peak_bytes = total[peak_at] + unused
    at_peak = {category: categories[category][peak_at] if category in held else 0 for category in CATEGORIES}
    return MemoryReport(
        explanation=Explanation(
            card="rtx3090 (simulated)",
            parts=(12, 12),
            peak_bytes=peak_bytes,
            categories={**at_peak, "unused": unused},
            context_bytes=300 * MIB,
            phase="backward",
            op="aten.mm",
            module=module,
        ),
        timeline=Timeline(categories=categories, reserved_bytes=(peak_bytes,) * POINTS, phases=phases, peak_at=peak_at),
        curve=curve,
    )


def curve_through(size: int, peak_bytes: int, last: int) -> tuple[CurvePoint, ...]:
    """Return a curve that reaches a peak at `size`, and continues to `last`."""
    peaks = {at: int(peak_bytes * (0.2 + 0.8 * at / size)) for at in (2, size // 2, size, last) if at >= 2}
    return tuple(CurvePoint(at, peak, int(0.9 * peak)) for at, peak in sorted(peaks.items()))


def trial(size: int, outcome: Outcome = "ok", peak_bytes: int | None = None, **changes: Any) -> Trial:
    """Return a trial of two parts."""
    return Trial(parts=(size, size), outcome=outcome, peak_reserved_bytes=peak_bytes, **changes)


def plan(
    size: int, target: int, limit_bytes: int, peak_bytes: int | None, trials: tuple[Trial, ...], **changes: Any
) -> Plan:
    """A predicted plan of micro-batches of `size`; the first of `trials` is of it."""
    schedule = make_schedule(target, size)
    return Plan(
        **{
            "kind": "predicted",
            "target_batch": target,
            "micro_batch": schedule.micro_batch,
            "iter_size": schedule.iter_size,
            "micro_batches": schedule.micro_batches,
            "world_size": 1,
            "largest_fit": size,
            "capped": False,
            "limit_bytes": limit_bytes,
            "peak_bytes": peak_bytes,
            "least_bytes": min(limit_bytes, int(0.9 * (peak_bytes or limit_bytes))),
            "band_bytes": 40 * MIB,
            "device": {"name": "rtx3090 (simulated)"},
            "environment": {},
            "workload": {"model": "GPT2"},
            "trials": trials,
            **changes,
        }
    )


MEASURED: dict[str, Any] = {
    "kind": "measured",
    "band_bytes": None,
    "least_bytes": None,
    "device": {"name": "cpu"},
    "workload": {"model": "Sequential"},
}


def usual(limit_share: float = 1.05) -> tuple[Plan, MemoryReport]:
    """As most plans are: two sizes tried, and a limit somewhat above the peak."""
    made = account()
    peak = made.explanation.peak_bytes
    trials = (trial(12, "ok", peak), trial(13, "oom", int(1.066 * peak)))
    made = account(curve=curve_through(12, peak, 14))
    return plan(12, 256, int(limit_share * peak), peak, trials), made


def extremes() -> dict[str, tuple[Plan, MemoryReport | None]]:
    """By name, what pictures must cope with."""
    one = 40 * GIB
    small: Held = {category: lambda at: 90 * MIB for category in CATEGORIES if category not in ("unused", "parameters")}
    dwarfed = account({"parameters": lambda at: one, **small}, unused=200 * MIB, module="layers.*." + 40 * "long.")
    whole: tuple[tuple[int, Phase], ...] = (
        (0, "model"), (10, "forward"), (30, "backward"), (60, "update"), (80, "forward"), (100, "backward"),
        (120, "forward"), (140, "backward"), (160, "clip"), (161, "update"), (180, "forward"),
    )  # fmt: skip
    thick = account({c: lambda at: GIB for c in CATEGORIES if c != "unused"}, phases=whole, module="")
    dwarfed_peak, thick_peak = dwarfed.explanation.peak_bytes, thick.explanation.peak_bytes
    below, far = usual(0.93), usual(6.0)
    lone = plan(1, 8, int(1.01 * dwarfed_peak), dwarfed_peak, (trial(1, "ok", dwarfed_peak), trial(2, "oom")))
    sizes = (1, 2, 4, 120, 100, 110, 105, 102, 101)
    at = {size: 300 * MIB + size * 16 * MIB for size in sizes}
    ran = tuple(trial(size, "ok" if size <= 100 else "oom", min(at[size], 2 * GIB)) for size in sizes)
    blind = tuple(trial(size, "ok" if size <= 100 else "oom") for size in sizes)
    odd = {"workload": {"model": "Net$x_1$ \u6a21\u578b\n"}, "device": {"name": 30 * "card "}}
    tried = (trial(12, "ok", 9 * GIB), trial(13, "tight", 11 * GIB), trial(14, "oom", 12 * GIB))
    return {
        "a tight size": (plan(12, 256, 10 * GIB, 9 * GIB, tried), None),
        "usual": usual(),
        "limit below the peak": below,
        "limit far above": far,
        "one category dwarfs all": (lone, dwarfed),
        "all are thick": (plan(1, 8, 10 * GIB, thick_peak, (trial(1, "ok", thick_peak),)), thick),
        "a single phase": (
            plan(1, 8, 10 * GIB, thick_peak, (trial(1, "ok", thick_peak),)),
            account(phases=((0, "update"),)),
        ),
        "odd names": (plan(1, 1, 10 * GIB, thick_peak, (trial(1, "ok", thick_peak),), **odd), thick),
        "measured on a CPU": (plan(100, 200, 2 * GIB, at[100], ran, **MEASURED), None),
        "no peak measured": (plan(100, 200, 2 * GIB, None, blind, **MEASURED), None),
        "a single trial": (plan(1, 1, 2 * GIB, 50 * MIB, (trial(1, "ok", 50 * MIB),), capped=True, **MEASURED), None),
        "a curve of one point": (
            lone,
            account({"parameters": lambda at: one}, curve=(CurvePoint(2, one + 2 * GIB),)),
        ),
    }
