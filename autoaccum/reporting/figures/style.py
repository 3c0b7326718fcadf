"""The style of all figures: matplotlib's settings, and writing the file."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib.style
from matplotlib.figure import Figure

from autoaccum.reporting.console import one_line
from autoaccum.reporting.figures.colours import DARK, LIGHT
from autoaccum.reporting.figures.file_format import Format

FONTS: Final = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")
"""The first comes with matplotlib; the others are hardly wider, for viewers of an SVG without it."""

TITLE_POINTS: Final = 12.0
TEXT_POINTS: Final = 9.0

_DPI = 200
_TAG, _DIGITS = re.compile(r"<[^>]+>"), re.compile(r"(\d+\.\d\d)\d+")


def picture_bytes(draw: Callable[[], Figure], title: str, form: Format) -> bytes:
    """Return a figure as a file; the same figure gives the same bytes.

    An SVG is light, or dark where the viewer prefers that; a PNG is light. Both have an opaque background, so that they
    can be read on any page.

    Args:
        draw: Makes the figure, within `picture_settings`.
        title: The title of an SVG.
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
    """Add the dark colours, and drop invisible digits of coordinates, which are half of the file."""
    exchanged = [
        f'  [style*="{what}: {light}"] {{ {what}: {DARK[role]} !important }}'
        for role, light in LIGHT.items()
        for what in ("fill", "stroke")
    ]
    rules = "\n".join(["@media (prefers-color-scheme: dark) {", *exchanged, "}"])
    styled = svg.replace("</defs>", f'<style type="text/css">\n{rules}\n</style>\n</defs>', 1)
    return _TAG.sub(lambda tag: _DIGITS.sub(r"\1", tag[0]), styled)


@contextmanager
def picture_settings() -> Iterator[None]:
    """Use matplotlib's defaults with our settings, whatever the user has set; restore everything afterwards."""
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


def colour(role: str) -> str:
    """Return the light colour of a role; a viewer that prefers dark replaces it."""
    return LIGHT[role]


def pointing() -> dict[str, Any]:
    """Return the style of lines that point to a mark or a number."""
    return {"color": colour("ink"), "linewidth": 1.0, "linestyle": (0, (3, 2))}
