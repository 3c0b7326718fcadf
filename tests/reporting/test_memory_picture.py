"""Pictures of plans: what is written in them, that nothing lies over anything else, and that all of it can be seen."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from pictured_plans import USUAL, account, extremes, plan, trial, usual

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Account
from autoaccum.planning.records import Plan
from autoaccum.reporting.pictures.memory_picture import draw_memory, memory_figure
from autoaccum.reporting.pictures.page import picture_settings
from autoaccum.reporting.pictures.theme import DARK, LIGHT, label
from autoaccum.units import GIB, format_bytes

CASES = extremes()
NAMES = list(CASES)
Case = tuple[Plan, Account | None]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def texts(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def drawn(case: Case) -> Figure:
    with picture_settings():
        figure = memory_figure(*case)
        figure.canvas.draw()
    return figure


def written(figure: Figure) -> Iterator[Text]:
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for text in axes.get_yticklabels():
            if low <= text.get_position()[1] <= high:
                yield text
        low, high = axes.get_xlim()
        for text in axes.get_xticklabels():
            if axes.xaxis.get_visible() and low <= text.get_position()[0] <= high:
                yield text
        yield from axes.texts
        if axes.xaxis.get_visible():
            yield axes.xaxis.label
    yield from figure.texts


def marks(axes: Axes) -> list[tuple[Any, float, float]]:
    """What was tried: the mark, the size and the height."""
    lines = [line for line in axes.lines if line.get_marker() in ("o", "x")]
    return [(line.get_marker(), *np.asarray(line.get_xydata())[0].tolist()) for line in lines]


def test_no_text_lies_over_another_or_is_cut_off(case: Case) -> None:
    figure = drawn(case)
    with picture_settings():
        boxes = {text: text.get_window_extent() for text in written(figure) if text.get_text()}
    assert len(boxes) > 8
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, box), (other, another) in combinations(boxes.items(), 2):
        touch = min(box.x1, another.x1) > max(box.x0, another.x0) and min(box.y1, another.y1) > max(box.y0, another.y0)
        assert not touch, (one, other)


def test_every_text_is_large_enough(case: Case) -> None:
    assert min(float(text.get_fontsize()) for text in written(drawn(case))) >= 9


def test_says_what_it_shows(case: Case) -> None:
    planned, known = case
    said = texts(draw_memory(planned, known, "svg"))
    assert said.count(format_bytes(planned.limit_bytes)) >= 1 + (known is not None)
    assert f"micro-batch {planned.micro_batch}" in said
    if planned.peak_bytes is not None:
        assert format_bytes(planned.peak_bytes) in said
        assert (format_bytes(planned.limit_bytes - planned.peak_bytes) in said) == (
            planned.peak_bytes < planned.limit_bytes
        )
    if known is not None:
        peak_bytes = known.explanation.peak_bytes
        assert format_bytes(peak_bytes) in said
        for category, held in known.explanation.categories.items():
            if held >= 0.002 * peak_bytes:
                assert label(category) in said
                assert format_bytes(held) in said
            assert held or label(category) not in said


def test_names_the_phases_and_areas_with_room() -> None:
    said = texts(draw_memory(*usual(), "svg"))
    assert said.count("forward") == said.count("backward") == 2
    assert said.count("update") == 1
    assert "micro-batch 1, 12 samples" in said
    assert "micro-batch 2, 12 samples" in said
    assert said.count("activations") == 2, "in its area, and in the margin"
    assert said.count("workspace") == 1, "too thin"
    assert "batch" not in said
    assert "clip" not in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("usual", "GPT2 on rtx3090 (simulated), 12 of 256 samples at a time"),
        ("usual", "most is held in backward, at aten.mm of blocks.*.mlp"),
        ("usual", "\N{BLACK CIRCLE} fits"),
        ("usual", "\N{MULTIPLICATION SIGN} does not fit"),
        ("usual", "least budget"),
        ("limit below the peak", "within the limit, the allocator packs it closer"),
        ("limit far above", "limit, far above"),
        ("measured on a CPU", "\N{BLACK CIRCLE} ran"),
        ("measured on a CPU", "\N{MULTIPLICATION SIGN} did not fit"),
        ("measured on a CPU", "Sequential on cpu, 100 of 200 samples at a time"),
        ("no peak measured", "peaks were not measured"),
        ("a single trial", "Sequential on cpu, 1 sample"),
        ("all are thick", "fwd"),
        ("usual", "Over one update"),
        ("all are thick", "Over two updates"),
        ("a tight size", "\N{WHITE CIRCLE} tight"),
    ],
)
def test_says_how_it_is(name: str, text: str) -> None:
    assert text in texts(draw_memory(*CASES[name], "svg"))


THREE_UPDATES: tuple[tuple[int, Phase], ...] = (
    (0, "model"), (15, "forward"), (30, "backward"), (45, "update"), (60, "evaluation"), (75, "forward"),
    (90, "backward"), (105, "update"), (120, "forward"), (135, "backward"), (150, "forward"), (165, "backward"),
    (180, "clip"), (181, "update"),
)  # fmt: skip


def test_every_bracket_of_three_updates_has_its_name() -> None:
    said = texts(draw_memory(usual()[0], account(phases=THREE_UPDATES), "svg"))
    assert "Over three updates" in said
    assert (said.count("fwd"), said.count("upd"), said.count("eval"), said.count("prep")) == (4, 3, 1, 1)
    assert (said.count("micro"), said.count("micro 1"), said.count("micro 2")) == (2, 1, 1)


def test_samples_stand_beside_all_micro_batches_or_none() -> None:
    phases: tuple[tuple[int, Phase], ...] = (
        (0, "forward"), (15, "backward"), (50, "forward"), (110, "backward"), (190, "update")
    )  # fmt: skip
    said = texts(draw_memory(usual()[0], account(phases=phases), "svg"))
    assert {"micro-batch 1", "micro-batch 2"} <= set(said)
    assert not any("12 samples" in text and "micro" in text for text in said)


def test_what_a_person_wrote_is_no_markup() -> None:
    said = texts(draw_memory(*CASES["odd names"], "svg"))
    assert any(text.startswith("Net$x_1$ \u6a21\u578b  on card card") and text.endswith("...") for text in said), said


def test_a_simulation_beside_measured_trials_is_called_one() -> None:
    planned, known = usual()
    measured = replace(planned, kind="measured", band_bytes=None, least_bytes=None)
    said = texts(draw_memory(measured, known, "svg"))
    assert "simulated: most is held in backward, at aten.mm of blocks.*.mlp" in said


def test_trials_of_other_budgets_and_far_sizes_are_left_out() -> None:
    far = (trial(12, "ok", 9 * GIB), trial(256, "oom", 90 * GIB), trial(12, "oom", 9 * GIB, limit_bytes=8 * GIB))
    shown = drawn((plan(12, 256, 10 * GIB, 9 * GIB, far), None)).axes[0]
    assert shown.get_xlim()[1] < 20
    assert [(kind, size) for kind, size, _ in marks(shown)] == [("o", 12)]


def test_what_did_not_run_lies_above_the_limit() -> None:
    """A trial that ran out of memory has held less than the limit: its peak would look as if it fitted."""
    planned, _ = CASES["measured on a CPU"]
    axes = drawn((planned, None)).axes[0]
    heights = [height for kind, _, height in marks(axes) if kind == "x"]
    assert len(heights) == 5
    assert all(planned.limit_bytes < height <= axes.get_ylim()[1] for height in heights)


def test_areas_add_up_to_the_peak() -> None:
    planned, known = usual()
    assert known is not None
    bar = [patch for patch in drawn((planned, known)).axes[0].patches if hasattr(patch, "get_height")]
    assert sum(patch.get_height() for patch in bar) == known.explanation.peak_bytes
    colours = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in bar if patch.get_height()]
    assert colours[:-1] == [LIGHT[category] for category in USUAL]


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


def test_every_colour_is_seen_on_both_panels(case: Case) -> None:
    """Text 4.5, graphics 3 (WCAG 2.2, 1.4.3 and 1.4.11): here all of it can be read, for areas bear text."""
    svg = draw_memory(*case, "svg").decode()
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


def test_no_colour_stands_for_two_things() -> None:
    assert len(set(LIGHT.values())) == len(set(DARK.values())) == len(LIGHT)
    assert LIGHT.keys() == DARK.keys()


SEEN_BY = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""How linear RGB looks to whom (Machado, Oliveira and Fernandes 2009, severity 1)."""
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> np.ndarray:
    """CIE L*a*b* of `#rrggbb`."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(seen) @ linear, 0, 1) / np.array(WHITE)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN_BY)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_areas_are_told_apart_by_everybody(theme: Mapping[str, str], seen: str) -> None:
    """A difference of 2.3 is just noticed; areas also have their names beside them, and seams between them."""
    found = {category: lab(theme[category], SEEN_BY[seen]) for category in CATEGORIES if category != "unused"}
    for one, other in combinations(found, 2):
        assert np.linalg.norm(found[one] - found[other]) > 12, (one, other)


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_panel_is_opaque_and_fills_the_picture() -> None:
    svg = ElementTree.fromstring(draw_memory(*usual(), "svg"))
    path = next(element for element in svg.iter() if element.tag.endswith("path"))
    assert path.attrib["style"] == f"fill: {LIGHT['panel']}"
    _, _, width, height = svg.attrib["viewBox"].split()
    assert f"L {width} {height}" in " ".join(path.attrib["d"].split())


def test_a_png_has_twice_the_points_of_a_screen() -> None:
    png = draw_memory(*usual(), "png")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1600
    assert height == round(200 * memory_height(usual()))
    pixels = matplotlib.image.imread(io.BytesIO(png))
    assert pixels[..., 3].min() == 1.0, "opaque"


def memory_height(case: Case) -> float:
    return float(drawn(case).get_size_inches()[1])


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_same_plan_gives_the_same_bytes(form: str) -> None:
    planned, known = usual()
    assert draw_memory(planned, known, form) == draw_memory(planned, known, form)  # type: ignore[arg-type]


def test_another_process_gives_the_same_bytes() -> None:
    code = (
        "import sys; from pictured_plans import usual; "
        "from autoaccum.reporting.pictures.memory_picture import draw_memory; "
        "sys.stdout.buffer.write(draw_memory(*usual(), 'svg')); assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == draw_memory(*usual(), "svg")


def test_what_a_user_set_neither_matters_nor_is_lost() -> None:
    before = draw_memory(*usual(), "svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        settings = dict(matplotlib.rcParams)
        assert draw_memory(*usual(), "svg") == before
        assert dict(matplotlib.rcParams) == settings
    filters = list(warnings.filters)
    draw_memory(*CASES["odd names"], "png")
    assert list(warnings.filters) == filters


def test_an_svg_has_a_title_and_a_font_wherever_it_is_seen() -> None:
    svg = draw_memory(*usual(), "svg").decode()
    assert "<title>GPT2 on rtx3090 (simulated), 12 of 256 samples at a time</title>" in svg
    named = svg.count("'DejaVu Sans', 'Verdana', 'Geneva', sans-serif")
    assert named == svg.count("<text ") > 10


def test_an_svg_is_small_and_dated_by_nobody() -> None:
    svg = draw_memory(*usual(), "svg")
    assert len(svg) < 120_000
    assert b"dc:date" not in svg


def test_a_figure_is_drawn_without_a_screen() -> None:
    assert isinstance(drawn(usual()).canvas, FigureCanvasAgg)


def test_an_account_of_nothing_at_all_is_drawn() -> None:
    planned, _ = usual()
    assert texts(draw_memory(planned, account({"parameters": lambda at: 1}, unused=0), "svg"))
