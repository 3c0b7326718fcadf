"""Trials in the order they were drawn, and the best loss so far."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autoaccum.reporting.pictures.theme import colour
from autoaccum.reporting.pictures.tuning_marks import Batches, draw_trial, loss_scale, trial_marks
from autoaccum.reporting.pictures.tuning_page import make_panel, name_axes, scale_losses
from autoaccum.reporting.tune_lines import pruner_words
from autoaccum.reporting.tune_words import budget_words
from autoaccum.tuning.records import Row, Tuning


def trials_title(tuning: Tuning) -> str:
    """What the picture is called."""
    return f"Trials of {tuning.study}"


def trials_figure(tuning: Tuning) -> Figure:
    """The picture as matplotlib has it."""
    losses, batches = loss_scale(tuning), Batches(tuning.space.target_batches)
    rows = [row for row in tuning.rows if row.confirms is None and not row.lost]
    found = best_so_far(rows)
    marks = [*trial_marks(rows, losses, batches)] + [("\N{EM DASH} best so far", "room")] * bool(found)
    figure, axes = make_panel(trials_title(tuning), marks, [tuning.sampler, pruner_words(tuning.pruner)])
    last = max((row.number for row in rows), default=0)
    axes.set_xlim(-0.5 - 0.01 * last, last + 0.5 + 0.01 * last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    scale_losses(axes, losses)
    name_axes(axes, "trial", f"held-out loss after {budget_words(tuning.budget)}")
    for row in rows:
        draw_trial(axes, row.number, row, losses, batches)
    if found:
        at, heights = [number for number, _ in found], [losses.place(loss) for _, loss in found]
        style: dict[str, Any] = {"color": colour("room"), "linewidth": 1.6, "zorder": 3}
        axes.step([*at, last + 0.5], [*heights, heights[-1]], where="post", **style)
    return figure


def best_so_far(rows: list[Row]) -> list[tuple[int, float]]:
    """The trials that were better than all before them, and their losses."""
    found: list[tuple[int, float]] = []
    for row in sorted(rows, key=lambda one: one.number):
        if row.state != "complete" or row.loss is None or not math.isfinite(row.loss):
            continue
        if not found or row.loss < found[-1][1]:
            found.append((row.number, row.loss))
    return found
