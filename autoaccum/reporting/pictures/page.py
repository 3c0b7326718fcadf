"""What all pictures have in common: settings of matplotlib, lines of text, and the file they become."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from autoaccum.reporting.pictures.formats import Format
from autoaccum.reporting.pictures.theme import FONTS, TEXT_POINTS, colour, dark_rules
from autoaccum.reporting.plain_text import one_line

EDGE = 0.15
"""Inches that stay free at the right."""
_DPI = 200
_TAG, _DIGITS = re.compile(r"<[^>]+>"), re.compile(r"(\d+\.\d\d)\d+")


def picture_bytes(draw: Callable[[], Figure], title: str, form: Format) -> bytes:
    """A picture as a file: the same figure gives the same bytes.

    An SVG is light, and dark where the viewer prefers that; a PNG is light. Both have a panel of their own, so that
    they can be read on any page.

    Args:
        draw: Makes the figure, within `picture_settings`.
        title: What an SVG is called.
        form: `svg` or `png`.
    """
    file = io.BytesIO()
    with picture_settings():
        figure = draw()
        if form == "png":
            figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
            return file.getvalue()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "autoaccum", "Title": one_line(title)})
    return _finish(file.getvalue().decode()).encode()


def _finish(svg: str) -> str:
    """Add the dark colours, and leave out digits of places that nobody sees: they are half of the file."""
    rules = "\n".join(dark_rules())
    styled = svg.replace("</defs>", f'<style type="text/css">\n{rules}\n</style>\n</defs>', 1)
    return _TAG.sub(lambda tag: _DIGITS.sub(r"\1", tag[0]), styled)


def write_line(figure: Figure, text: str, x: float, y: float, role: str = "ink", **style: Any) -> float:
    """Write a line; all in inches from the upper left corner, and so is its end, which is returned."""
    width, height = figure.get_size_inches()
    drawn = figure.text(x / width, 1 - y / height, one_line(text), parse_math=False, color=colour(role), **style)
    room, taken = width - x - EDGE, drawn.get_window_extent().width / figure.dpi
    if taken > room:
        drawn.set_text(f"{drawn.get_text()[: int(len(text) * room / taken) - 3]}...")
    return x + float(min(taken, room))


@contextmanager
def picture_settings() -> Iterator[None]:
    """Matplotlib as it comes, whatever this user has set, with what pictures need; all is put back."""
    ours = {
        "font.family": "sans-serif",
        "font.sans-serif": FONTS,
        "font.size": TEXT_POINTS,
        "axes.titlesize": TEXT_POINTS,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), colour("ink")),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), colour("muted")),
        "axes.facecolor": "none",
        "hatch.linewidth": 0.8,
        "svg.fonttype": "none",
        "svg.hashsalt": "autoaccum",
    }
    with matplotlib.style.context(ours, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # Of a name; the viewer may have it.
        yield
