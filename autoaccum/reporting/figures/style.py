"""The style of all pictures and pages: colours, file formats, matplotlib's settings, and writing the file.

matplotlib is imported only once a picture is drawn.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from autoaccum.errors import UsageError
from autoaccum.reporting.console import one_line
from autoaccum.simulation.trace_records import Category

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Format = Literal["svg", "png"]
Panel: TypeAlias = "Callable[[SubFigure], None]"
"""Draws one chart, within `picture_settings`."""

_ENDINGS: Final[dict[str, Format]] = {".svg": "svg", ".png": "png"}
_FONTS: Final = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")
"""The first comes with matplotlib; the others are hardly wider, for viewers of an SVG without it."""

WIDTH: Final = 7.2
HEIGHT: Final = 3.6
"""Of one chart, in inches."""

TEXT_POINTS: Final = 9.0
_TITLE_POINTS, _LONGEST_TITLE = 11.0, 70
_DPI = 200
_TAG, _DIGITS = re.compile(r"<[^>]+>"), re.compile(r"(\d+\.\d\d)\d+")

LIGHT: Final[Mapping[str, str]] = {
    "panel": "#ffffff",
    "ink": "#1f2328",
    "muted": "#59636e",
    "limit": "#cf222e",
    "ran": "#0b5cad",
    "room": "#1a7f37",
    "parameters": "#2270d8",
    "gradients": "#ad2c0a",
    "optimizer_state": "#6726c9",
    "averages": "#b0399f",
    "gathered_parameters": "#0f6f9c",
    "communication": "#7a5a00",
    "activations": "#2f6f64",
    "outputs": "#5f1118",
    "temporaries": "#8a7038",
    "workspace": "#1a3560",
    "unused": "#6e7781",
}
"""Colours by role or category: each has contrast to the panel (WCAG 4.5), and all differ, so they can be replaced."""

DARK: Final[Mapping[str, str]] = {
    "panel": "#0d1117",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "limit": "#ff7b72",
    "ran": "#79c0ff",
    "room": "#56d364",
    "parameters": "#64b0e8",
    "gradients": "#e67a22",
    "optimizer_state": "#9370f0",
    "averages": "#b56a9f",
    "gathered_parameters": "#3d8fb5",
    "communication": "#c9a227",
    "activations": "#4fd0a1",
    "outputs": "#e8505e",
    "temporaries": "#f0d22e",
    "workspace": "#bfe3f2",
    "unused": "#8b949e",
}
"""The same for a viewer that prefers dark."""


def label(category: Category) -> str:
    """Return the name of a category for people."""
    return category.replace("_", " ")


def picture_format(path: str) -> Format:
    """Return the format of the ending of `path`; raise UsageError for another one."""
    ending = PurePath(path).suffix
    if ending.lower() not in _ENDINGS:
        seen = f"ends in {ending}" if ending else "has no ending"
        raise UsageError(f"the picture {path} {seen}", hint="give a name that ends in .svg or .png")
    return _ENDINGS[ending.lower()]


def draw_panels(panels: Sequence[Panel], form: Format = "svg", *, title: str = "", height: float = HEIGHT) -> bytes:
    """Draw charts below each other, each of `height` inches, as a file; the same charts give the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with picture_settings():
        figure = Figure(figsize=(WIDTH, height * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(cut(title, _LONGEST_TITLE), size=_TITLE_POINTS, weight="bold", parse_math=False)
        for draw, part in zip(panels, figure.subfigures(len(panels), squeeze=False)[:, 0], strict=True):
            draw(part)
        return picture_bytes(figure, form, title)


def picture_bytes(figure: Figure, form: Format = "svg", title: str = "") -> bytes:
    """Return a figure as a file; call it within `picture_settings`.

    An SVG is light, or dark where the viewer prefers that; a PNG is light. Both have an opaque background, so that they
    can be read on any page.
    """
    file = io.BytesIO()
    figure.set_facecolor(LIGHT["panel"])
    if form == "png":
        figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
        return file.getvalue()
    about = {"Title": one_line(title)} if title else {}
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "autoaccum", **about})
    return _finish(file.getvalue().decode()).encode()


def _finish(svg: str) -> str:
    """Add the dark colours, and drop invisible digits of coordinates, which are half of the file."""
    exchanged = [
        f'  [style*="{what}: {light}"] {{ {what}: {DARK[role]} !important }}'
        for role, light in LIGHT.items()
        for what in ("fill", "stroke")
    ]
    rules = "\n".join(["@media screen and (prefers-color-scheme: dark) {", *exchanged, "}"])
    styled = svg.replace("</defs>", f'<style type="text/css">\n{rules}\n</style>\n</defs>', 1)
    return _TAG.sub(lambda tag: _DIGITS.sub(r"\1", tag[0]), styled)


@contextmanager
def picture_settings() -> Iterator[None]:
    """Use matplotlib's defaults with our settings, whatever the user has set; restore everything afterwards."""
    import matplotlib.style

    ours = {
        "font.family": "sans-serif",
        "font.sans-serif": _FONTS,
        "font.size": TEXT_POINTS,
        "axes.titlesize": TEXT_POINTS,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["ink"]),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["muted"]),
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.8,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "autoaccum",
    }
    with matplotlib.style.context(ours, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # Of a name; the viewer may have it.
        yield


def pointing() -> dict[str, Any]:
    """Return the style of lines that point to a mark or a number."""
    return {"color": LIGHT["ink"], "linewidth": 1.0, "linestyle": (0, (3, 2))}


def cut(text: str, longest: int) -> str:
    """Return a text on one line, cut to a length."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
