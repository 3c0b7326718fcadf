"""Figures of a study: Optuna's own of its trials, and the throughput by micro-batch."""

from __future__ import annotations

import io
import warnings
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from autoaccum.planning.throughput import Throughput
from autoaccum.tuning.study import open_storage, parse_storage_address, storage_errors
from autoaccum.tuning.tuning_result import Tuning


def draw_tuning(tuning: Tuning, storage: str | None) -> dict[str, bytes]:
    """Draw the pictures of a study in `storage` (as `tune` was given it), by the names of their files.

    Raises:
        StudyError: It cannot be read any more.
    """
    import optuna
    from optuna.visualization import matplotlib as of_optuna

    matplotlib.use("agg")
    address, loss = parse_storage_address(storage), "held-out loss"
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoaccum"}),
        open_storage(address) as opened,
        storage_errors(address),
    ):
        study = optuna.load_study(storage=opened, study_name=tuning.study)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Attempting to set identical")  # One trial is complete.
            figures = {
                "throughput.svg": throughput_figure(tuning.throughput),
                "trials.svg": of_optuna.plot_optimization_history(study, target_name=loss),
                "rates.svg": of_optuna.plot_slice(study, target_name=loss),
                "courses.svg": of_optuna.plot_intermediate_values(study),
            }
        return {file: _to_svg(drawn) for file, drawn in figures.items()}


def throughput_figure(known: Throughput) -> Figure:
    """Draw medians and quartiles of samples per second over the micro-batch, the knee marked."""
    timed = [speed for speed in known.speeds if speed.samples_per_second is not None]
    sizes, medians = [speed.micro_batch for speed in timed], [speed.samples_per_second or 0.0 for speed in timed]
    below = [median - (speed.low or median) for median, speed in zip(medians, timed, strict=True)]
    above = [(speed.high or median) - median for median, speed in zip(medians, timed, strict=True)]
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(sizes, medians, yerr=[below, above], marker="o", capsize=4, label="median, and the middle half")
    axes.axvline(known.knee, color="green", linestyle="--", label=f"knee at {known.knee}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="micro-batch, in samples", ylabel="samples per second")
    axes.set_title(f"Throughput on {known.device}, in updates of {known.target_batch} samples", parse_math=False)
    axes.legend()
    return figure


def _to_svg(drawn: Any) -> bytes:
    """Write a figure, or that of the axes which Optuna drew."""
    from matplotlib import pyplot

    axes = drawn.flat[0] if hasattr(drawn, "flat") else drawn
    figure = drawn if isinstance(drawn, Figure) else axes.figure
    file = io.BytesIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "autoaccum"})
    pyplot.close(figure)
    return file.getvalue()
