"""Loss over the learning rate: what was tried, the best, and what cannot be told from it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autoaccum.reporting.pictures.theme import colour
from autoaccum.reporting.pictures.tuning_marks import Batches, draw_trial, loss_scale, trial_marks
from autoaccum.reporting.pictures.tuning_page import make_panel, name_axes, point_down, scale_losses, scale_rates
from autoaccum.reporting.tune_words import batch_words, budget_words, format_rate
from autoaccum.tuning.records import Bracket, Tuning

_ROOM = 1.15
"""Left and right of the rates that were searched."""


def rates_title(tuning: Tuning) -> str:
    """What the picture is called."""
    batches = batch_words(tuning.space.target_batches)
    return f"Loss of {tuning.workload.get('name')} over the learning rate, in updates of {batches} samples"


def rates_figure(tuning: Tuning) -> Figure:
    """The picture as matplotlib has it."""
    losses, batches = loss_scale(tuning), Batches(tuning.space.target_batches)
    rows = [row for row in tuning.rows if row.setting is not None and not row.lost]
    figure, axes = make_panel(rates_title(tuning), list(trial_marks(rows, losses, batches)), _below(tuning), names=2)
    tried = [row.setting.learning_rate for row in rows if row.setting is not None]
    span = tuning.space.learning_rates
    scale_rates(axes, min([span.low, *tried]) / _ROOM, max([span.high, *tried]) * _ROOM)
    scale_losses(axes, losses)
    name_axes(axes, "learning rate", f"held-out loss after {budget_words(tuning.budget)}")
    if tuning.bracket is not None:
        _shade(axes, tuning.bracket)
    for row in rows:
        if row.setting is not None:
            draw_trial(axes, row.setting.learning_rate, row, losses, batches)
    _point(axes, tuning)
    return figure


def _shade(axes: Axes, bracket: Bracket) -> None:
    if bracket.low is None and bracket.high is None:
        return
    left, right = axes.get_xlim()
    low, high = bracket.low or left, bracket.high or right
    axes.axvspan(low, high, facecolor=colour("room"), alpha=0.12, linewidth=0, zorder=0)


def _point(axes: Axes, tuning: Tuning) -> None:
    """Lines at the best rate and at the workload's own, their names away from each other."""
    own = tuning.space.own_rate
    best = None if tuning.best is None else tuning.best.setting.learning_rate
    if best is not None:
        name = "best, the workload's own" if best == own else "best"
        point_down(axes, best, f"{name} {format_rate(best)}", "room", before=best < own)
    left, right = axes.get_xlim()
    if left <= own <= right and best != own:
        point_down(axes, own, f"own {format_rate(own)}", before=best is None or own < best, row=1)


def _below(tuning: Tuning) -> list[str]:
    bracket = tuning.bracket
    if bracket is None:
        return []
    if bracket.low is None and bracket.high is None:
        return ["no rate that was tried is clearly worse than the best"]
    batch = "" if tuning.space.target_batches.single else f" for batch {_best_batch(tuning)}"
    beyond = "" if bracket.noise is None else "; at its ends, losses are worse by more than chance"
    return [f"green: where the best rate{batch} lies{beyond}", "this takes it that the loss has one valley"]


def _best_batch(tuning: Tuning) -> int | None:
    return None if tuning.best is None else tuning.best.setting.target_batch
