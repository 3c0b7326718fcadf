"""A plan as a picture: where the memory of an update is, and what peaks to expect of other sizes."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from autoaccum.devices.base import Outcome
from autoaccum.devices.explanation import Account
from autoaccum.planning.records import Plan
from autoaccum.reporting.pictures.curve_panel import draw_curve, tried_points
from autoaccum.reporting.pictures.formats import Format
from autoaccum.reporting.pictures.margin import WIDTH_INCHES
from autoaccum.reporting.pictures.page import EDGE, picture_bytes, write_line
from autoaccum.reporting.pictures.theme import TEXT_POINTS, TITLE_POINTS, colour
from autoaccum.reporting.pictures.timeline_panel import draw_timeline

_WORDS = {2: "two", 3: "three"}
_WIDTH = 8.0
_LEFT, _RIGHT = 0.75, WIDTH_INCHES + EDGE
_TITLE, _HEADING = 0.4, 0.45
_TIMELINE, _CURVE = 3.2, 2.5
_BELOW_TIMELINE, _BELOW_CURVE = 0.85, 0.6


def draw_memory(plan: Plan, account: Account | None, form: Format) -> bytes:
    """The picture of a plan as a file: the same plan gives the same bytes.

    Args:
        plan: The plan.
        account: Where its memory goes; None where only sizes and peaks are known.
        form: `svg` or `png`.
    """
    return picture_bytes(lambda: memory_figure(plan, account), _title(plan), form)


def memory_figure(plan: Plan, account: Account | None) -> Figure:
    """The picture as matplotlib has it; to be called and drawn within its settings."""
    panels = _CURVE + _HEADING + _BELOW_CURVE
    if account is not None:
        panels += _TIMELINE + _HEADING + _BELOW_TIMELINE
    figure = Figure(figsize=(_WIDTH, _TITLE + panels), facecolor=colour("panel"))
    FigureCanvasAgg(figure)
    write_line(figure, _title(plan), _LEFT, 0.3, size=TITLE_POINTS, weight="bold")
    at = _TITLE
    if account is not None:
        at = _heading(figure, _stretch(account), _moment(plan, account), at)
        draw_timeline(_axes(figure, at, _TIMELINE), account, plan.limit_bytes)
        at += _TIMELINE + _BELOW_TIMELINE
    at = _heading(figure, "Over the micro-batch", _tried(plan), at)
    draw_curve(_axes(figure, at, _CURVE), plan, () if account is None else account.curve)
    return figure


def _title(plan: Plan) -> str:
    model = str(plan.workload.get("model") or plan.workload.get("name") or "Memory")
    card = str(plan.device.get("name", "this device"))
    sizes = f"{plan.micro_batch} of {plan.target_batch} samples at a time"
    if plan.iter_size == 1 and plan.world_size == 1:
        sizes = "1 sample" if plan.micro_batch == 1 else f"{plan.micro_batch} samples at once"
    return f"{model} on {card}, {sizes}"


def _stretch(account: Account) -> str:
    updates = [phase for _, phase in account.timeline.phases if phase == "update"]
    if len(updates) <= 1:
        return "Over one update"
    return f"Over {_WORDS.get(len(updates), len(updates))} updates"


def _moment(plan: Plan, account: Account) -> list[tuple[str, str]]:
    explanation = account.explanation
    where = f" of {explanation.module}" if explanation.module else ""
    known = "" if plan.kind == "predicted" else "simulated: "
    return [(f"{known}most is held in {explanation.phase}, at {explanation.op}{where}", "muted")]


def _tried(plan: Plan) -> list[tuple[str, str]]:
    """What the marks mean, each in its own colour, as far as there are any."""
    ran, failed = ("ran", "did not fit") if plan.kind == "measured" else ("fits", "does not fit")
    marks: dict[Outcome, tuple[str, str]] = {
        "ok": (f"\N{BLACK CIRCLE} {ran}", "ran"),
        "tight": ("\N{WHITE CIRCLE} tight", "ran"),
        "oom": (f"\N{MULTIPLICATION SIGN} {failed}", "limit"),
    }
    outcomes = {point.outcome for point in tried_points(plan)}
    found = [mark for outcome, mark in marks.items() if outcome in outcomes]
    if plan.peak_bytes is None:
        found.append(("peaks were not measured", "muted"))
    elif plan.peak_bytes > plan.limit_bytes:
        found.append(("within the limit, the allocator packs it closer", "muted"))
    return found


def _heading(figure: Figure, title: str, remarks: list[tuple[str, str]], at: float) -> float:
    """A title and remarks beside it, at most `_HEADING` high; returns where that ends, in inches from the top."""
    x = write_line(figure, title, _LEFT, at + 0.28, size=TEXT_POINTS + 1, weight="bold") + 0.25
    for text, role in remarks:
        x = write_line(figure, text, x, at + 0.28, role=role) + 0.2
    return at + _HEADING


def _axes(figure: Figure, at: float, height: float) -> Axes:
    whole = float(figure.get_size_inches()[1])
    box = (_LEFT / _WIDTH, 1 - (at + height) / whole, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, height / whole)
    return figure.add_axes(box, facecolor="none")
