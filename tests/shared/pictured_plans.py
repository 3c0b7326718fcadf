"""Plans and memory reports made by hand, as pictures find them at their worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from factories import make_plan

from autoaccum.devices.base import Trial
from autoaccum.devices.child.failures import Outcome
from autoaccum.devices.explanation import CurvePoint, Explanation, MemoryReport, Timeline
from autoaccum.planning.plan_record import Plan
from autoaccum.simulation.trace_records import CATEGORIES, Category, Phase
from autoaccum.spec import DeviceFacts
from autoaccum.units import GIB, MIB

POINTS = 200
PHASES: tuple[tuple[int, Phase], ...] = (
    (0, "batch"), (1, "forward"), (25, "backward"), (80, "batch"), (81, "forward"), (105, "backward"), (190, "clip"),
    (191, "update"),
)  # fmt: skip
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


def memory_report(held: Held = USUAL, *, curve: tuple[CurvePoint, ...] = (), **changes: Any) -> MemoryReport:
    """A report of two micro-batches of 12 samples; `changes` are of its explanation."""
    categories = {category: tuple(map(of, range(POINTS))) for category, of in held.items()}
    total = [sum(column) for column in zip(*categories.values(), strict=True)]
    peak_at = max(range(POINTS), key=total.__getitem__)
    peak_bytes = total[peak_at] + GIB
    at_peak = {category: categories[category][peak_at] if category in held else 0 for category in CATEGORIES}
    facts: dict[str, Any] = {"phase": "backward", "op": "aten.mm", "module": "blocks.{0..11}.mlp", **changes}
    return MemoryReport(
        explanation=Explanation(
            card="rtx3090 (simulated)",
            parts=(12, 12),
            peak_bytes=peak_bytes,
            categories={**at_peak, "unused": GIB},
            context_bytes=300 * MIB,
            **facts,
        ),
        timeline=Timeline(categories=categories, reserved_bytes=(peak_bytes,) * POINTS, phases=PHASES, peak_at=peak_at),
        curve=curve,
    )


def trial(size: int, outcome: Outcome = "ok", peak_bytes: int | None = None, **changes: Any) -> Trial:
    """Return a trial of two parts."""
    return Trial(parts=(size, size), outcome=outcome, peak_reserved_bytes=peak_bytes, **changes)


def plan(
    size: int, target: int, limit_bytes: int, peak_bytes: int | None, trials: tuple[Trial, ...], **changes: Any
) -> Plan:
    """A predicted plan of micro-batches of `size`; the first of `trials` is of it."""
    fields: dict[str, Any] = {
        "kind": "predicted",
        "limit_bytes": limit_bytes,
        "peak_bytes": peak_bytes,
        "min_budget_bytes": min(limit_bytes, int(0.9 * (peak_bytes or limit_bytes))),
        "uncertainty_bytes": 40 * MIB,
        "device": DeviceFacts(name="rtx3090 (simulated)"),
        "workload": {"model": "GPT2"},
        "trials": trials,
    }
    return make_plan(target, size, **fields | changes)


MEASURED: dict[str, Any] = {
    "kind": "measured",
    "uncertainty_bytes": None,
    "min_budget_bytes": None,
    "device": DeviceFacts(name="cpu"),
    "workload": {"model": "Sequential"},
}


def usual(limit_share: float = 1.05) -> tuple[Plan, MemoryReport]:
    """As most plans are: two sizes tried, and a limit somewhat above the peak."""
    peak = memory_report().explanation.peak_bytes
    points = {at: int(peak * (0.2 + 0.8 * at / 12)) for at in (2, 6, 12, 14)}
    curve = tuple(CurvePoint(at, peak_bytes) for at, peak_bytes in points.items())
    trials = (trial(12, "ok", peak), trial(13, "oom", int(1.066 * peak)))
    return plan(12, 256, int(limit_share * peak), peak, trials), memory_report(curve=curve)


def extremes() -> dict[str, tuple[Plan, MemoryReport | None]]:
    """By name, what pictures must cope with."""
    thick = memory_report({category: lambda at: GIB for category in CATEGORIES if category != "unused"}, module="")
    peak = thick.explanation.peak_bytes
    sizes = (1, 2, 4, 120, 100, 110, 105, 102, 101)
    at = {size: 300 * MIB + size * 16 * MIB for size in sizes}
    ran = tuple(trial(size, "ok" if size <= 100 else "oom", min(at[size], 2 * GIB)) for size in sizes)
    blind = tuple(trial(size, "ok" if size <= 100 else "oom") for size in sizes)
    odd = {"workload": {"model": "Net$x_1$ \u6a21\u578b\n"}, "device": DeviceFacts(name=30 * "card ")}
    tried = (trial(12, "ok", 9 * GIB), trial(13, "tight", 11 * GIB), trial(14, "oom", 12 * GIB))
    return {
        "a tight size": (plan(12, 256, 10 * GIB, 9 * GIB, tried), None),
        "usual": usual(),
        "limit below the peak": usual(0.93),
        "limit far above": usual(6.0),
        "odd names": (plan(1, 1, 10 * GIB, peak, (trial(1, "ok", peak),), **odd), thick),
        "measured on a CPU": (plan(100, 200, 2 * GIB, at[100], ran, **MEASURED), None),
        "no peak measured": (plan(100, 200, 2 * GIB, None, blind, **MEASURED), None),
    }
