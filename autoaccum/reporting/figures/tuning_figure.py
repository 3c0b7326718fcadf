"""The pictures of a study: Optuna's own of its trials, and the throughput by micro-batch."""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib
from matplotlib.figure import SubFigure
from matplotlib.text import Text

from autoaccum.planning.throughput import Throughput
from autoaccum.reporting.figures.style import HEIGHT, LIGHT, TEXT_POINTS, WIDTH, picture_bytes, picture_settings
from autoaccum.tuning.study import open_storage, storage_errors
from autoaccum.tuning.tuning_records import Tuning


def draw_tuning(tuning: Tuning) -> dict[str, bytes]:
    """Draw the pictures of a study, by the names of their files.

    Raises:
        StudyError: It cannot be read any more.
    """
    import optuna
    from optuna.visualization import matplotlib as of_optuna

    matplotlib.use("agg")
    loss = "held-out loss"
    with open_storage(tuning.storage) as opened, storage_errors(tuning.storage), picture_settings():
        study = optuna.load_study(storage=opened, study_name=tuning.study)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Attempting to set identical|No artists")  # At most one is complete.
            drawn = {
                "trials.svg": of_optuna.plot_optimization_history(study, target_name=loss),
                "rates.svg": of_optuna.plot_slice(study, target_name=loss),
                "courses.svg": of_optuna.plot_intermediate_values(study),
            }
        return {file: _to_svg(axes) for file, axes in drawn.items()}


def draw_throughput(figure: SubFigure, *, known: Throughput) -> None:
    """Draw samples per second over the micro-batch, with their quartiles or band and the knee."""
    axes = figure.subplots()
    timed = [speed for speed in known.speeds if speed.samples_per_second is not None]
    sizes, middles = [speed.micro_batch for speed in timed], [speed.samples_per_second or 0.0 for speed in timed]
    below = [middle - (speed.low or middle) for middle, speed in zip(middles, timed, strict=True)]
    above = [(speed.high or middle) - middle for middle, speed in zip(middles, timed, strict=True)]
    said = "estimate, and its band" if known.kind == "estimated" else "median, and the middle half"
    axes.errorbar(sizes, middles, yerr=[below, above], marker="o", capsize=4, color=LIGHT["ran"], label=said)
    axes.axvline(known.knee, color=LIGHT["room"], linestyle="--", label=f"knee at {known.knee}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="micro-batch, in samples", ylabel="samples per second")
    axes.set_title(f"on {known.device}, in updates of {known.target_batch} samples", parse_math=False)
    figure.legend(loc="outside lower left", ncols=3)


def _to_svg(drawn: Any) -> bytes:
    """Write the figure of axes that Optuna drew, in our colours."""
    from matplotlib import pyplot

    axes = drawn.flat[0] if hasattr(drawn, "flat") else drawn
    figure = axes.figure
    for part in figure.axes:
        part.set_facecolor("none")
        part.grid(color=LIGHT["unused"], alpha=0.3)
        part.tick_params(which="both", colors=LIGHT["muted"])
    for text in figure.findobj(Text):
        text.set(color=LIGHT["ink"], fontsize=TEXT_POINTS)
    figure.set_size_inches(WIDTH, HEIGHT)
    with matplotlib.rc_context({"savefig.bbox": "tight"}):
        svg = picture_bytes(figure)
    pyplot.close(figure)
    return svg
