"""Samples per second over the micro-batch, and the smallest that is as fast as any."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autoaccum.reporting.pictures.theme import colour
from autoaccum.reporting.pictures.tuning_page import make_panel, name_axes, point_down, scale_sizes
from autoaccum.reporting.tune_words import format_speed
from autoaccum.tuning.judging.knee import KNEE_SHARE
from autoaccum.tuning.records import Throughput, Tuning


def throughput_title(tuning: Tuning) -> str:
    """What the picture is called."""
    known = tuning.throughput
    return f"Throughput of {tuning.workload.get('name')} on {known.device}, in updates of {known.target_batch} samples"


def throughput_figure(tuning: Tuning) -> Figure:
    """The picture as matplotlib has it."""
    known = tuning.throughput
    marks = [("\N{BLACK CIRCLE} median, between the quartiles of its updates", "ran")]
    if any(speed.state == "out_of_memory" for speed in known.speeds):
        marks.append(("\N{MULTIPLICATION SIGN} out of memory", "limit"))
    figure, axes = make_panel(throughput_title(tuning), marks, [_below(known)], names=1)
    scale_sizes(axes, [speed.micro_batch for speed in known.speeds if speed.state != "slower"] or [known.knee])
    most = max((speed.high or speed.samples_per_second or 0 for speed in known.speeds), default=0) or 1
    axes.set_ylim(0, 1.06 * most)
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    name_axes(axes, "micro-batch, in samples", "samples per second")
    _draw_speeds(axes, known)
    point_down(axes, known.knee, f"micro-batch {known.knee}{_knee_speed(known)}", "room")
    return figure


def _draw_speeds(axes: Axes, known: Throughput) -> None:
    timed = [speed for speed in known.speeds if speed.samples_per_second is not None]
    sizes = [speed.micro_batch for speed in timed]
    medians = [speed.samples_per_second or 0.0 for speed in timed]
    axes.plot(sizes, medians, color=colour("ran"), linewidth=1.4, zorder=3)
    for speed, size, median in zip(timed, sizes, medians, strict=True):
        low, high = speed.low or median, speed.high or median
        axes.plot([size, size], [low, high], "_-", color=colour("ran"), linewidth=1.4, markersize=11, zorder=3)
        axes.plot([size], [median], "o", color=colour("ran"), markersize=4.5, zorder=4)
    if medians:
        floor = (1 - KNEE_SHARE) * max(medians)
        axes.axhline(floor, color=colour("room"), linewidth=1.0, linestyle=(0, (4, 2)), zorder=2)
    for speed in known.speeds:
        if speed.state == "out_of_memory":
            style: dict[str, Any] = {"color": colour("limit"), "markersize": 6.5, "markeredgewidth": 1.8}
            axes.plot([speed.micro_batch], [0], "x", clip_on=False, zorder=4, **style)


def _knee_speed(known: Throughput) -> str:
    speed = next((one.samples_per_second for one in known.speeds if one.micro_batch == known.knee), None)
    return "" if speed is None else f", {format_speed(speed)} samples/s: the knee"


def _below(known: Throughput) -> str:
    left_out = [speed.micro_batch for speed in known.speeds if speed.state == "slower"]
    text = f"green: within {100 * KNEE_SHARE:g} % of the fastest, {known.fastest}"
    return f"{text}; not measured: {min(left_out)} to {max(left_out)}, far slower" if left_out else text
