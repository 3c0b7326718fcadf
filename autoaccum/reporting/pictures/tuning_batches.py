"""Learning rate over the effective batch: what was found, and beside it what two rules make of it."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autoaccum.reporting.pictures.theme import TEXT_POINTS, colour
from autoaccum.reporting.pictures.tuning_page import Remark, make_panel, name_axes, scale_rates, scale_sizes
from autoaccum.reporting.tune_words import format_rate
from autoaccum.tuning.judging.scaling import LINEAR, RULES, Rule
from autoaccum.tuning.records import Standing, Tuning

_ROOM = 1.6
_SHARE = 3
"""One of so many complete settings counts among the best."""


def batches_title(tuning: Tuning) -> str:
    """What the picture is called."""
    return f"Learning rates of {tuning.workload.get('name')} over the effective batch"


def batches_figure(tuning: Tuning) -> Figure:
    """The picture as matplotlib has it; without a best setting, an empty panel that says so."""
    best = tuning.best
    if best is None:
        figure, axes = make_panel(batches_title(tuning), [("no trial came to a finite loss", "muted")])
        axes.set_axis_off()
        return figure
    others = _others(tuning)
    figure, axes = make_panel(batches_title(tuning), _marks(others), _sources())
    batches = [best.setting.target_batch, *(one.target_batch for one in tuning.advice)]
    batches += [one.setting.target_batch for one in others]
    scale_sizes(axes, [best.setting.target_batch, *(one.target_batch for one in tuning.advice)])
    low, high = min(batches), max(batches)
    axes.set_xlim(low / 2**0.5, high * 2**0.9)
    rates = [rule.rate(best.setting, size) for rule in RULES for size in (low, high)]
    rates += [one.setting.learning_rate for one in others] + _bounds(tuning)
    scale_rates(axes, min(rates) / _ROOM, max(rates) * _ROOM, up=True)
    name_axes(axes, "effective batch, in samples", "learning rate")
    for rule in RULES:
        _draw_rule(axes, rule, best, low, high)
    _draw_found(axes, tuning, best, others)
    return figure


def _others(tuning: Tuning) -> list[Standing]:
    """The other settings that are complete, where effective batches were searched."""
    if tuning.space.target_batches.single or tuning.best is None:
        return []
    return [one for one in tuning.standings if one.trial != tuning.best.trial and one.mean is not None]


def _marks(others: list[Standing]) -> list[Remark]:
    marks = [("\N{BLACK CIRCLE} best found, and where it lies by what was tried", "room")]
    if others:
        marks.append(("\N{BLACK CIRCLE} the best third of the others", "ran"))
    if len(others) > 1:
        marks.append(("\N{WHITE CIRCLE} the rest", "muted"))
    return [*marks, ("- - advice, not tried", "ink")]


def _sources() -> list[str]:
    return [f"{rule.name} rule: {rule.source}" for rule in RULES]


def _bounds(tuning: Tuning) -> list[float]:
    bracket = tuning.bracket
    return [] if bracket is None else [rate for rate in (bracket.low, bracket.high) if rate is not None]


def _draw_rule(axes: Axes, rule: Rule, best: Standing, low: int, high: int) -> None:
    ends = [rule.rate(best.setting, low), rule.rate(best.setting, high)]
    style = (0, (5, 2)) if rule is LINEAR else (0, (1.5, 2))
    axes.plot([low, high], ends, color=colour("ink"), linewidth=1.2, linestyle=style, zorder=2)
    place: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "ha": "left"}
    axes.annotate(rule.name, (high, ends[1]), color=colour("ink"), size=TEXT_POINTS, **place)


def _draw_found(axes: Axes, tuning: Tuning, best: Standing, others: list[Standing]) -> None:
    for number, one in enumerate(others):
        good = number < len(others) / _SHARE
        style: dict[str, Any] = {"color": colour("ran" if good else "muted"), "markersize": 5.5, "zorder": 3}
        face = {} if good else {"markerfacecolor": colour("panel")}
        axes.plot([one.setting.target_batch], [one.setting.learning_rate], "o", clip_on=False, **style | face)
    at, rate = best.setting.target_batch, best.setting.learning_rate
    bounds = _bounds(tuning)
    axes.plot([at, at], [min([rate, *bounds]), max([rate, *bounds])], color=colour("room"), linewidth=3.5, alpha=0.4)
    axes.plot([at], [rate], "o", color=colour("room"), markersize=8, zorder=5)
    text = f"{format_rate(rate)} at {at}"
    place: dict[str, Any] = {"xytext": (8, -6), "textcoords": "offset points", "va": "top", "ha": "left", "zorder": 6}
    box: dict[str, Any] = {"facecolor": colour("panel"), "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate(text, (at, rate), color=colour("room"), weight="bold", size=TEXT_POINTS, bbox=box, **place)
