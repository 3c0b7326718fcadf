"""Pictures of plans: what is written in them, and that all of it can be seen."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from pictured_plans import extremes, plan, trial, usual

from autoaccum.devices.explanation import MemoryReport
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.figures.colours import DARK, LIGHT, label
from autoaccum.reporting.figures.memory_figure import draw_memory, memory_figure
from autoaccum.reporting.figures.style import picture_settings
from autoaccum.units import GIB, format_bytes

CASES = extremes()
NAMES = list(CASES)
Case = tuple[Plan, MemoryReport | None]


@cache
def picture(name: str) -> bytes:
    return draw_memory(*CASES[name], "svg")


def texts(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def drawn(case: Case) -> Figure:
    with picture_settings():
        figure = memory_figure(*case)
        figure.canvas.draw()
    return figure


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_shows(name: str) -> None:
    planned, known = CASES[name]
    said = texts(picture(name))
    assert sum(text.endswith(f": {format_bytes(planned.limit_bytes)}") for text in said) >= 1
    assert f"micro-batch {planned.micro_batch}" in said
    if planned.peak_bytes is not None:
        assert f"peak: {format_bytes(planned.peak_bytes)}" in said
        assert any(text.startswith("headroom") for text in said) == (planned.peak_bytes < planned.limit_bytes)
    if known is not None:
        for category, held in known.explanation.categories.items():
            if held >= 0.002 * known.explanation.peak_bytes:
                assert f"{label(category)}: {format_bytes(held)}" in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("usual", "GPT2 on rtx3090 (simulated), 12 of 256 samples at a time"),
        ("usual", "most is held in backward, at aten.mm of blocks.*.mlp"),
        ("usual", "fits"),
        ("usual", "does not fit"),
        ("limit below the peak", "allocator packs it closer"),
        ("measured on a CPU", "ran"),
        ("measured on a CPU", "did not fit"),
        ("measured on a CPU", "Sequential on cpu, 100 of 200 samples at a time"),
        ("no peak measured", "peaks were not measured"),
        ("a single trial", "Sequential on cpu, 1 sample"),
        ("a tight size", "tight"),
    ],
)
def test_says_how_it_is(name: str, text: str) -> None:
    assert text in texts(picture(name))


def test_what_a_person_wrote_is_no_markup() -> None:
    said = texts(picture("odd names"))
    assert any(text.startswith("Net$x_1$ \u6a21\u578b  on card card") and text.endswith("...") for text in said), said


def test_a_simulation_next_to_measured_trials_is_called_one() -> None:
    planned, known = usual()
    measured = replace(planned, kind="measured", band_bytes=None, least_bytes=None)
    said = texts(draw_memory(measured, known, "svg"))
    assert "simulated: most is held in backward, at aten.mm of blocks.*.mlp" in said


def marks(figure: Figure) -> list[tuple[Any, float, float]]:
    """Return the marks of trials: mark, size and height."""
    lines = [line for line in figure.axes[-1].lines if line.get_marker() in ("o", "x")]
    return [(line.get_marker(), *point) for line in lines for point in np.asarray(line.get_xydata()).tolist()]


def test_trials_of_other_budgets_and_far_sizes_are_left_out() -> None:
    far = (trial(12, "ok", 9 * GIB), trial(256, "oom", 90 * GIB), trial(12, "oom", 9 * GIB, limit_bytes=8 * GIB))
    shown = drawn((plan(12, 256, 10 * GIB, 9 * GIB, far), None))
    assert shown.axes[0].get_xlim()[1] < 20
    assert [(kind, size) for kind, size, _ in marks(shown)] == [("o", 12)]


def test_what_did_not_run_lies_above_the_limit() -> None:
    """A trial that ran out of memory has held less than the limit: its peak would look as if it fitted."""
    planned, _ = CASES["measured on a CPU"]
    shown = drawn((planned, None))
    heights = [height for kind, _, height in marks(shown) if kind == "x"]
    assert len(heights) == 5
    assert all(planned.limit_bytes < height <= shown.axes[0].get_ylim()[1] for height in heights)


def test_a_far_limit_does_not_press_the_rest_into_a_strip() -> None:
    planned, known = CASES["limit far above"]
    shown = drawn((planned, known))
    assert all(axes.get_ylim()[1] < planned.limit_bytes / 2 for axes in shown.axes)
    assert any(text.startswith("limit, far above") for text in texts(picture("limit far above")))


# --- colours --------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


STYLED = re.compile(r"(?:fill|stroke): (#[0-9a-f]{6})")


@pytest.mark.parametrize("name", NAMES)
def test_every_colour_is_seen_on_both_panels(name: str) -> None:
    """Text 4.5, graphics 3 (WCAG 2.2, 1.4.3 and 1.4.11): here all of it can be read, for areas bear text."""
    svg = picture(name).decode()
    style, drawing = svg.split("@media (prefers-color-scheme: dark) {")[1].split("</style>", 1)
    used = set(STYLED.findall(drawing))
    assert len(used) > 4
    assert used <= set(LIGHT.values())
    for light in used - {LIGHT["panel"]}:
        (role,) = (role for role, value in LIGHT.items() if value == light)
        assert contrast(light, LIGHT["panel"]) >= 4.5, role
        assert contrast(DARK[role], DARK["panel"]) >= 4.5, role
    for light in used:
        (role,) = (role for role, value in LIGHT.items() if value == light)
        assert f'[style*="fill: {light}"] {{ fill: {DARK[role]} !important }}' in style
        assert f'[style*="stroke: {light}"] {{ stroke: {DARK[role]} !important }}' in style


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_process_gives_the_same_bytes() -> None:
    code = (
        "import sys; from pictured_plans import usual; "
        "from autoaccum.reporting.figures.memory_figure import draw_memory; "
        "sys.stdout.buffer.write(draw_memory(*usual(), 'svg')); assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        check=True,
        timeout=240,
    )
    assert done.stdout == draw_memory(*usual(), "svg")
