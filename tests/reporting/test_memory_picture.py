"""Pictures of plans: what is written in them, and that all of it can be seen."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from pictured_plans import extremes, plan, trial, usual

from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.figures import COLOURS, draw_curve, draw_memory, picture_format, picture_settings
from autoaccum.units import GIB, format_bytes

CASES = extremes()


@cache
def picture(name: str) -> bytes:
    return draw_memory(*CASES[name], "svg")


def texts(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def drawn_curve(planned: Plan) -> Axes:
    with picture_settings():
        figure = Figure().add_subfigure(GridSpec(1, 1)[0])
        draw_curve(figure, plan=planned, curve=())
    return figure.axes[0]


@pytest.mark.parametrize("name", CASES)
def test_says_what_it_shows(name: str) -> None:
    planned, report = CASES[name]
    said = texts(picture(name))
    assert any(text.endswith(f": {format_bytes(planned.limit_bytes)}") for text in said)
    assert f"micro-batch {planned.micro_batch}" in said
    if planned.peak_bytes is not None:
        assert f"peak: {format_bytes(planned.peak_bytes)}" in said
        assert any(text.startswith("headroom") for text in said) == (planned.peak_bytes < planned.limit_bytes)
    if report is not None:
        assert {"forward", "backward"} <= set(said)
        for category, held in report.explanation.categories.items():
            if held >= 0.002 * report.explanation.peak_bytes:
                assert f"{category.replace('_', ' ')}: {format_bytes(held)}" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("usual", ("GPT2 on rtx3090 (simulated), 12 of 256 samples at a time", "fits", "does not fit")),
        ("usual", ("most is held in backward, at aten.mm of blocks.{0..11}.mlp",)),
        ("limit below the peak", ("within the limit, the allocator packs it closer",)),
        ("measured on a CPU", ("ran", "did not fit", "Sequential on cpu, 100 of 200 samples at a time")),
        ("no peak measured", ("peaks were not measured",)),
        ("a tight size", ("tight",)),
    ],
)
def test_says_how_it_is(name: str, said: tuple[str, ...]) -> None:
    assert set(said) <= set(texts(picture(name)))


def test_a_simulation_next_to_measured_trials_is_called_one() -> None:
    planned, report = usual()
    measured = replace(planned, kind="measured", uncertainty_bytes=None, min_budget_bytes=None)
    said = texts(draw_memory(measured, report, "svg"))
    assert "simulated: most is held in backward, at aten.mm of blocks.{0..11}.mlp" in said


def marks(axes: Axes) -> list[tuple[str, float, float]]:
    """Return the marks of trials: mark, size and height."""
    lines = [line for line in axes.lines if line.get_marker() in ("o", "x")]
    return [(str(line.get_marker()), *point) for line in lines for point in np.asarray(line.get_xydata()).tolist()]


def test_trials_of_far_sizes_are_left_out() -> None:
    far = (trial(12, "ok", 9 * GIB), trial(256, "oom", 90 * GIB))
    axes = drawn_curve(plan(12, 256, 10 * GIB, 9 * GIB, far))
    assert axes.get_xlim()[1] < 20
    assert [(kind, size) for kind, size, _ in marks(axes)] == [("o", 12)]


def test_what_did_not_run_lies_above_the_limit() -> None:
    """A trial that ran out of memory has held less than the limit: its peak would look as if it fitted."""
    planned, _ = CASES["measured on a CPU"]
    axes = drawn_curve(planned)
    heights = [height for kind, _, height in marks(axes) if kind == "x"]
    assert len(heights) == 5
    assert all(planned.limit_bytes < height <= axes.get_ylim()[1] for height in heights)


def test_a_far_limit_does_not_press_the_rest_into_a_strip() -> None:
    planned, _ = CASES["limit far above"]
    assert drawn_curve(planned).get_ylim()[1] < planned.limit_bytes / 2
    assert any(text.startswith("limit, far above") for text in texts(picture("limit far above")))


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", CASES)
def test_every_colour_is_seen_on_both_panels(name: str) -> None:
    """Text 4.5, graphics 3 (WCAG 2.2, 1.4.3 and 1.4.11): here all of it can be read, for areas bear text."""
    style, drawing = (
        picture(name).decode().split("@media screen and (prefers-color-scheme: dark) {")[1].split("</style>", 1)
    )
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing))
    assert len(used) > 4
    others = {light: dark for light, dark in COLOURS.values()}
    assert used <= set(others)
    for light in used - {COLOURS["panel"][0]}:
        for colour, panel in zip((light, others[light]), COLOURS["panel"], strict=True):
            assert contrast(colour, panel) >= 4.5, colour
        for what in ("fill", "stroke"):
            assert f'[style*="{what}: {light}"] {{ {what}: {others[light]} !important }}' in style


def test_the_ending_decides_the_format() -> None:
    assert (picture_format("a.b/memory.PNG"), picture_format("x.png.svg")) == ("png", "svg")
