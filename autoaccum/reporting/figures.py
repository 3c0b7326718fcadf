"""The pictures of plans: the memory of an update over time, and the peaks of other sizes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, Final, Literal, TypeAlias

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from autoaccum.devices.base import Trial
from autoaccum.devices.child.failures import Outcome
from autoaccum.devices.explanation import CurvePoint, MemoryReport, Timeline
from autoaccum.errors import UsageError
from autoaccum.planning.comparison_record import Comparison, ComparisonRow
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.comparison_table import row_line, shown_rows
from autoaccum.reporting.console import one_line
from autoaccum.sentences import name_memory
from autoaccum.simulation.trace_records import CATEGORIES
from autoaccum.units import format_bytes

Format = Literal["svg", "png"]
Panel: TypeAlias = "Callable[[SubFigure], None]"
"""Draws one chart, within `picture_settings`."""

_ENDINGS: Final[dict[str, Format]] = {".svg": "svg", ".png": "png"}
_FONTS: Final = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")
"""The first comes with matplotlib; the others are hardly wider, for viewers of an SVG without it."""

_WIDTH, _HEIGHT = 7.2, 3.6
"""Of one chart, in inches."""

_TEXT_POINTS, _TITLE_POINTS = 9.0, 11.0
_LONGEST_TITLE, _LONGEST_REMARK, _LONGEST_NAME = 70, 90, 40
_DPI = 200
_TAG, _DIGITS = re.compile(r"<[^>]+>"), re.compile(r"(\d+\.\d\d)\d+")
_LEAST_SHARE = 0.002
"""Categories with a smaller share of the peak are not in the legend."""
_FURTHEST = 2.0
"""Sizes beyond this multiple of the largest that fits are not drawn."""
_FAR = 3.0
"""A limit beyond this multiple of all else is only named, since it would flatten the rest."""
_NARROWEST = 0.05
"""The least share of the width for a phase to be named."""

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "panel": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "limit": ("#cf222e", "#ff7b72"),
    "ran": ("#0b5cad", "#79c0ff"),
    "room": ("#1a7f37", "#56d364"),
    "parameters": ("#2270d8", "#64b0e8"),
    "gradients": ("#ad2c0a", "#e67a22"),
    "optimizer_state": ("#6726c9", "#9370f0"),
    "averages": ("#b0399f", "#b56a9f"),
    "gathered_parameters": ("#0f6f9c", "#3d8fb5"),
    "communication": ("#7a5a00", "#c9a227"),
    "activations": ("#2f6f64", "#4fd0a1"),
    "outputs": ("#5f1118", "#e8505e"),
    "temporaries": ("#8a7038", "#f0d22e"),
    "workspace": ("#1a3560", "#bfe3f2"),
    "unused": ("#6e7781", "#8b949e"),
}
"""By role or category, for a light and for a dark panel.

Each has contrast to its panel (WCAG 4.5), and all differ, so that they can be replaced.
"""

LIGHT: Final = {role: light for role, (light, _) in COLOURS.items()}


def draw_memory(plan: Plan, report: MemoryReport | None, form: Format) -> bytes:
    """Draw a plan, with its memory report if there is one, as a file: the same plan gives the same bytes."""
    curve = () if report is None else report.curve
    panels = [partial(draw_curve, plan=plan, curve=curve)]
    if report is not None:
        panels.insert(0, partial(draw_timeline, plan=plan, report=report))
    return draw_panels(panels, form, title=plan_title(plan))


def draw_comparison(comparison: Comparison, form: Format) -> bytes:
    """Draw a bar for each row of a table, its speed or else its micro-batch: the same rows give the same bytes."""
    rows = shown_rows(comparison.rows)
    return draw_panels(
        [partial(_draw_bars, rows=rows)], form, title="Plans compared", height=max(2.0, 0.35 * len(rows))
    )


def _draw_bars(figure: SubFigure, *, rows: Sequence[ComparisonRow]) -> None:
    axes, places = figure.subplots(), range(len(rows))
    sizes = [0 if row.plan is None else row.plan.micro_batch for row in rows]
    fastest = max((row.samples_per_second or 0.0 for row in rows), default=0.0)
    lengths = [(row.samples_per_second or 0.0) / fastest for row in rows] if fastest else sizes
    axes.barh(places, lengths, color=LIGHT["ran"])
    for place, size, length in zip(places, sizes, lengths, strict=True):
        said = f"micro-batch {size}" if size else "does not fit"
        axes.annotate(said, (length, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [_cut(row_line(row).rpartition(":")[0], _LONGEST_NAME) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max((*lengths, 0.01)))
    axes.set_xlabel("estimated speed (1: the fastest)" if fastest else "micro-batch")


def plan_title(plan: Plan) -> str:
    """Return the model, the device and the sizes in one line."""
    model = plan.workload.model or plan.workload.name or "Memory"
    sizes = f"{plan.micro_batch} of {plan.target_batch} samples at a time"
    if plan.iter_size == 1 and plan.world_size == 1:
        sizes = "1 sample" if plan.micro_batch == 1 else f"{plan.micro_batch} samples at once"
    return f"{model} on {plan.device.name or 'this device'}, {sizes}"


def draw_timeline(figure: SubFigure, *, plan: Plan, report: MemoryReport) -> None:
    """Draw the memory of an update over its events, by category, with the limit."""
    axes = figure.subplots()
    timeline, explanation = report.timeline, report.explanation
    reserved, at = timeline.reserved_bytes, range(len(timeline.reserved_bytes))
    held = {name: timeline.categories[name] for name in CATEGORIES if any(timeline.categories.get(name) or ())}
    used = list(map(sum, zip(*held.values(), strict=True))) or [0] * len(reserved)
    areas = axes.stackplot(at, *held.values(), colors=[LIGHT[name] for name in held], step="post", linewidth=0)
    cached: dict[str, Any] = {"facecolor": "none", "edgecolor": LIGHT["unused"], "hatch": "//", "linewidth": 0}
    top = list(map(max, used, reserved))
    areas.append(axes.fill_between(at, used, top, step="post", **cached))
    for category, area in zip([*held, "unused"], areas, strict=True):
        bytes_ = explanation.categories.get(category, 0)
        if bytes_ >= _LEAST_SHARE * explanation.peak_bytes:
            area.set_label(f"{name_memory(category)}: {format_bytes(bytes_)}")
    axes.step(at, reserved, where="post", color=LIGHT["ink"], linewidth=1.2)
    peak = f"peak: {format_bytes(explanation.peak_bytes)}"
    axes.plot(timeline.peak_at, explanation.peak_bytes, "v", color=LIGHT["ink"], label=peak)
    axes.set_xlim(0, max(len(reserved) - 1, 1))
    _name_phases(axes, timeline)
    _finish(axes, plan.limit_bytes, max(explanation.peak_bytes, *reserved))
    source = "" if plan.kind == "predicted" else "simulated: "
    where = f" of {explanation.module}" if explanation.module else ""
    axes.set_title(_cut(f"{source}most is held in {explanation.phase}, at {explanation.op}{where}", _LONGEST_REMARK))
    figure.legend(loc="outside lower left", ncols=3, reverse=True)


def _name_phases(axes: Axes, timeline: Timeline) -> None:
    """Name the phases under the axis, where there is room, with lines between them."""
    last = len(timeline.reserved_bytes) - 1
    starts = [start for start, _ in timeline.phases]
    spans = [(start, end, name) for (start, name), end in zip(timeline.phases, [*starts[1:], last], strict=True)]
    named = [((start + end) / 2, name) for start, end, name in spans if end - start >= _NARROWEST * last]
    for start in starts:
        axes.axvline(start, color=LIGHT["panel"], linewidth=0.8)
    axes.set_xticks([middle for middle, _ in named], [name for _, name in named])
    axes.tick_params("x", length=0)


def draw_curve(figure: SubFigure, *, plan: Plan, curve: Sequence[CurvePoint]) -> None:
    """Draw the peak over the micro-batch: the sizes tried, the chosen one, and the headroom below the limit."""
    axes = figure.subplots()
    tried, near = _tried_sizes(plan), [point for point in curve if point.size <= _FURTHEST * plan.largest_fit + 1]
    peaks = {size: peak for size, trial in tried.items() if trial.ran and (peak := trial.peak_reserved_bytes)}
    line = {point.size: point.peak_bytes for point in near} or peaks
    axes.plot(list(line), list(line.values()), color=LIGHT["ran"])
    top = _finish(axes, plan.limit_bytes, max([plan.peak_bytes or 0, *peaks.values()]))
    ran, failed = ("ran", "did not fit") if plan.kind == "measured" else ("fits", "does not fit")
    looks: dict[Outcome, dict[str, Any]] = {
        "ok": {"marker": "o", "color": LIGHT["ran"], "label": ran},
        "tight": {"marker": "o", "color": LIGHT["ran"], "markerfacecolor": LIGHT["panel"], "label": "tight"},
        "oom": {"marker": "x", "color": LIGHT["limit"], "label": failed, "markeredgewidth": 1.8},
    }
    for outcome, look in looks.items():
        sizes = [size for size, trial in tried.items() if trial.outcome == outcome]
        # A trial that ran out of memory held less than the limit, so its peak would look as if it fitted.
        failed_at = min(1.03 * plan.limit_bytes, top)
        at = [failed_at if outcome == "oom" else tried[size].peak_reserved_bytes or 0 for size in sizes]
        if sizes:
            axes.plot(sizes, at, linestyle="none", clip_on=False, zorder=4, **look)
    _mark_choice(axes, plan)
    axes.set_xlim(0, 1.05 * max([plan.micro_batch + 1, *tried, *line]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("micro-batch, in samples")
    figure.legend(loc="outside lower left", ncols=3)


def _tried_sizes(plan: Plan) -> dict[int, Trial]:
    """Return the last trial of each size that is to be drawn, ascending."""
    last = sorted({trial.micro_batch: trial for trial in plan.trials if trial.outcome != "error"}.items())
    return {size: trial for size, trial in last if size <= _FURTHEST * plan.largest_fit + 1}


def _mark_choice(axes: Axes, plan: Plan) -> None:
    """Mark the micro-batch with a line, and the headroom above its peak."""
    said = f"micro-batch {plan.micro_batch}"
    axes.axvline(plan.micro_batch, label=said, **_pointing())
    if plan.peak_bytes is None or plan.headroom_bytes is None:
        axes.plot([], [], " ", label="peaks were not measured")
        return
    axes.axhline(plan.peak_bytes, label=f"peak: {format_bytes(plan.peak_bytes)}", **_pointing())
    if plan.headroom_bytes > 0:
        room: dict[str, Any] = {"facecolor": "none", "edgecolor": LIGHT["room"], "hatch": "\\\\\\", "linewidth": 0}
        left = f"headroom: {format_bytes(plan.headroom_bytes)}"
        axes.fill_between([0, plan.micro_batch], plan.peak_bytes, plan.limit_bytes, label=left, **room)
    else:
        axes.plot([], [], " ", label="within the limit, the allocator packs it closer")


def _finish(axes: Axes, limit_bytes: int, most_bytes: int) -> float:
    """Set up the axis of bytes with the limit; return the end of the axis."""
    far = bool(most_bytes) and limit_bytes > _FAR * most_bytes
    top = 1.25 * most_bytes if far else 1.1 * max(limit_bytes, most_bytes)
    said = f"limit{', far above' if far else ''}: {format_bytes(limit_bytes)}"
    axes.axhline(limit_bytes, color=LIGHT["limit"], linewidth=1.6, label=said)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MultipleLocator(1 << (int(top) // 6).bit_length()))  # Three to six numbers.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
    return top


def picture_format(path: str) -> Format:
    """Return the format of the ending of `path`; raise UsageError for another one."""
    ending = PurePath(path).suffix
    if ending.lower() not in _ENDINGS:
        seen = f"ends in {ending}" if ending else "has no ending"
        raise UsageError(f"the picture {path} {seen}", hint="give a name that ends in .svg or .png")
    return _ENDINGS[ending.lower()]


def draw_panels(panels: Sequence[Panel], form: Format = "svg", *, title: str = "", height: float = _HEIGHT) -> bytes:
    """Draw charts below each other as a file; the same charts give the same bytes.

    An SVG is light, or dark where the viewer prefers that; a PNG is light. Both have an opaque background, so that they
    can be read on any page.
    """
    file = io.BytesIO()
    with picture_settings():
        figure = Figure(figsize=(_WIDTH, height * len(panels)), layout="constrained", facecolor=LIGHT["panel"])
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(_cut(title, _LONGEST_TITLE), size=_TITLE_POINTS, weight="bold", parse_math=False)
        for draw, part in zip(panels, figure.subfigures(len(panels), squeeze=False)[:, 0], strict=True):
            draw(part)
        if form == "png":
            figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
            return file.getvalue()
        about = {"Title": one_line(title)} if title else {}
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "autoaccum", **about})
    return _with_dark(file.getvalue().decode()).encode()


def _with_dark(svg: str) -> str:
    """Add the dark colours, and drop invisible digits of coordinates, which are half of the file."""
    exchanged = [
        f'  [style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in COLOURS.values()
        for what in ("fill", "stroke")
    ]
    rules = "\n".join(["@media screen and (prefers-color-scheme: dark) {", *exchanged, "}"])
    styled = svg.replace("</defs>", f'<style type="text/css">\n{rules}\n</style>\n</defs>', 1)
    return _TAG.sub(lambda tag: _DIGITS.sub(r"\1", tag[0]), styled)


@contextmanager
def picture_settings() -> Iterator[None]:
    """Use matplotlib's defaults with our settings, whatever the user has set; restore everything afterwards."""
    ours = {
        "font.family": "sans-serif",
        "font.sans-serif": _FONTS,
        "font.size": _TEXT_POINTS,
        "axes.titlesize": _TEXT_POINTS,
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


def _pointing() -> dict[str, Any]:
    """Return the style of lines that point to a mark or a number."""
    return {"color": LIGHT["ink"], "linewidth": 1.0, "linestyle": (0, (3, 2))}


def _cut(text: str, longest: int) -> str:
    """Return a text on one line, cut to a length."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
