"""A study as pictures, each a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from matplotlib.figure import Figure

from autoaccum.reporting.pictures.formats import Format
from autoaccum.reporting.pictures.page import picture_bytes
from autoaccum.reporting.pictures.tuning_batches import batches_figure, batches_title
from autoaccum.reporting.pictures.tuning_files import BATCHES, RATES, THROUGHPUT, TRIALS
from autoaccum.reporting.pictures.tuning_rates import rates_figure, rates_title
from autoaccum.reporting.pictures.tuning_throughput import throughput_figure, throughput_title
from autoaccum.reporting.pictures.tuning_trials import trials_figure, trials_title
from autoaccum.tuning.records import Tuning

FIGURES: Final[dict[str, tuple[Callable[[Tuning], str], Callable[[Tuning], Figure]]]] = {
    THROUGHPUT: (throughput_title, throughput_figure),
    RATES: (rates_title, rates_figure),
    TRIALS: (trials_title, trials_figure),
    BATCHES: (batches_title, batches_figure),
}
"""Title and figure of each picture by the name of its file; a figure is made within `picture_settings`."""


def draw_tuning(tuning: Tuning, form: Format = "svg") -> dict[str, bytes]:
    """The pictures of a study by the names of their files: the same study gives the same bytes."""
    return {
        name: picture_bytes(partial(figure, tuning), title(tuning), form) for name, (title, figure) in FIGURES.items()
    }
