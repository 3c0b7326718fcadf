"""Pictures of studies: what is written in them, that no text lies over another, and where marks are."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from small_tunings import SEARCHED, THROUGHPUT, row, speed, tuning, usual_rows, valley

from autoaccum.reporting.pictures.page import picture_bytes, picture_settings
from autoaccum.reporting.pictures.theme import LIGHT
from autoaccum.reporting.pictures.tuning_files import BATCHES, FILES, RATES, TRIALS
from autoaccum.reporting.pictures.tuning_files import THROUGHPUT as SPEEDS
from autoaccum.reporting.pictures.tuning_marks import Batches
from autoaccum.reporting.pictures.tuning_pictures import FIGURES, draw_tuning
from autoaccum.reporting.pictures.tuning_scale import choose_losses
from autoaccum.reporting.pictures.tuning_trials import best_so_far
from autoaccum.tuning.judging.scaling import LINEAR
from autoaccum.tuning.records import Bracket, Row, Tuning
from autoaccum.tuning.settings import BatchSpan
from autoaccum.tuning.studies.halving import describe_pruner
from autoaccum.tuning.studies.samplers import describe_sampler


def many(count: int) -> tuple[Row, ...]:
    """Trials over rates and batches, of which the best rate grows with the batch."""
    draws = random.Random(1)
    rows = [row(0, 0.1, valley(0.1), own=True)]
    for number in range(1, count):
        batch, rate = round(64 * 16 ** draws.random()), 10 ** draws.uniform(-3, 1)
        best = 0.5 * (batch / 256) ** 0.8
        loss = valley(rate, best) * draws.uniform(0.98, 1.02)
        if rate > 5 * best:
            rows.append(row(number, rate, draws.choice((None, 1e12 * loss)), target_batch=batch))
        else:
            state = "pruned" if loss > 0.7 else "complete"
            rows.append(row(number, rate, loss, state=state, target_batch=batch))
    return tuple(rows)


CASES = {
    "usual": tuning(),
    "one trial": tuning((row(0, 0.1, 0.5, own=True),), confirmed=False, bracket=None),
    "no trial": tuning(()),
    "all diverged": tuning(tuple(row(number, 0.1 * 2**number, None, own=number == 0) for number in range(5))),
    "200 trials over batches": tuning(many(200), space=SEARCHED),
    "huge losses": tuning(tuple(row(number, 0.001 * 1.5**number, 1e12 * 1.7**number) for number in range(20))),
    "best at the left end": tuning((row(0, 0.1, 0.5, own=True), row(1, 0.001, 0.4))),
    "best at the right end": tuning((row(0, 0.1, 0.5, own=True), row(1, 10.0, 0.4))),
    "best beside the own": tuning((row(0, 0.1, 0.5, own=True), row(1, 0.101, 0.4))),
    "odd names": tuning(workload={"name": "Net$x_1$ \u6a21\u578b " + "long " * 30}, study="a_$b$" * 40),
    "one size": tuning(throughput=replace(THROUGHPUT, speeds=(speed(1, 9.5),), fastest=1, knee=1)),
    "sizes out of memory": tuning(
        throughput=replace(
            THROUGHPUT,
            speeds=(speed(8, 9.5), *(speed(size, None, "out_of_memory") for size in (16, 32))),
            fastest=8,
            knee=8,
        )
    ),
}


def drawn(found: Tuning, name: str) -> Figure:
    with picture_settings():
        figure = FIGURES[name][1](found)
        figure.canvas.draw()
    return figure


def written(figure: Figure) -> Iterator[Text]:
    for axes in figure.axes:
        for axis, (low, high), at in ((axes.xaxis, axes.get_xlim(), 0), (axes.yaxis, axes.get_ylim(), 1)):
            for text in axis.get_ticklabels():
                if low <= text.get_position()[at] <= high and axes.axison:
                    yield text
            if axes.axison:
                yield axis.label
        yield from axes.texts
    yield from figure.texts


def texts(found: Tuning, name: str) -> list[str]:
    root = ElementTree.fromstring(picture_bytes(lambda: FIGURES[name][1](found), name, "svg"))
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def marks(axes: Axes, role: str, marker: str = "o") -> list[tuple[float, float]]:
    """Where marks of a colour are."""
    alike = [line for line in axes.lines if line.get_marker() == marker]
    lines = [line for line in alike if to_hex(str(line.get_color())) == LIGHT[role]]
    return [(float(x), float(y)) for line in lines for x, y in np.asarray(line.get_xydata())]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("case", CASES)
def test_no_text_lies_over_another_or_outside(case: str, name: str) -> None:
    figure = drawn(CASES[case], name)
    boxes = [(text.get_text(), text.get_window_extent()) for text in written(figure) if text.get_text()]
    for one, box in boxes:
        assert box.x0 >= 0, one
        assert box.y0 >= 0, one
        assert box.x1 <= figure.bbox.x1, one
        assert box.y1 <= figure.bbox.y1, one
    for (one, box), (other, beside) in combinations(boxes, 2):
        apart = box.x1 <= beside.x0 or beside.x1 <= box.x0 or box.y1 <= beside.y0 or beside.y1 <= box.y0
        assert apart, (one, other)


@pytest.mark.parametrize(
    ("case", "name", "text"),
    [
        ("usual", SPEEDS, "micro-batch 64, 1,478 samples/s: the knee"),
        ("usual", SPEEDS, "green: within 2 % of the fastest, 128; not measured: 1 to 8, far slower"),
        ("usual", SPEEDS, "Throughput of digits on cpu, in updates of 256 samples"),
        ("sizes out of memory", SPEEDS, "\N{MULTIPLICATION SIGN} out of memory"),
        ("usual", RATES, "best 0.68"),
        ("usual", RATES, "own 0.1"),
        ("usual", RATES, "\N{MULTIPLICATION SIGN} diverged"),
        ("usual", RATES, "\N{BULLET} with other seeds"),
        ("usual", RATES, "held-out loss after 1,617 samples"),
        ("one trial", RATES, "best, the workload's own 0.1"),
        ("200 trials over batches", RATES, "\N{BLACK CIRCLE} batch 128 to 256"),
        ("200 trials over batches", RATES, "\N{BLACK UP-POINTING TRIANGLE} off the scale"),
        ("usual", TRIALS, "TPE behind 10 random trials, seed 0"),
        ("usual", BATCHES, f"linear rule: {LINEAR.source}"),
        ("usual", BATCHES, "0.68 at 256"),
        ("200 trials over batches", BATCHES, "\N{BLACK CIRCLE} the best third of the others"),
        ("all diverged", BATCHES, "no trial came to a finite loss"),
    ],
    ids=range(17),
)
def test_says_how_it_is(case: str, name: str, text: str) -> None:
    assert text in texts(CASES[case], name)


def test_a_search_is_named_in_full() -> None:
    sampler, pruner = describe_sampler("tpe", 2**31 - 1), describe_pruner("halving")
    assert {sampler, pruner} <= set(texts(tuning(sampler=sampler, pruner=pruner), TRIALS))


def test_what_there_is_none_of_is_not_explained() -> None:
    assert "\N{EM DASH} best so far" not in texts(CASES["all diverged"], TRIALS)
    assert not any("pruned" in text for text in texts(CASES["one trial"], RATES))


def test_the_knee_is_where_the_line_is_and_medians_are_drawn() -> None:
    axes = drawn(CASES["usual"], SPEEDS).axes[0]
    assert marks(axes, "ran") == [(16, 1201), (32, 1390), (64, 1478), (128, 1500), (256, 1490)]
    (vertical,) = [line for line in axes.lines if list(np.asarray(line.get_xdata())) == [64, 64] and line.is_dashed()]
    assert to_hex(str(vertical.get_color())) == LIGHT["room"]
    assert axes.get_ylim()[0] == 0, "speeds are compared by their heights"


def test_the_bracket_is_shaded_up_to_the_edge_where_it_has_no_end() -> None:
    axes = drawn(CASES["usual"], RATES).axes[0]
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == pytest.approx((0.12, 2.1))  # type: ignore[attr-defined]
    best = replace(CASES["usual"], bracket=Bracket(low=None, best=0.68, high=2.1, noise=None))
    axes = drawn(best, RATES).axes[0]
    (shade,) = axes.patches
    assert shade.get_x() == pytest.approx(axes.get_xlim()[0])  # type: ignore[attr-defined]
    unknown = replace(CASES["usual"], bracket=Bracket(low=None, best=0.68, high=None, noise=0.1))
    assert not drawn(unknown, RATES).axes[0].patches


def test_every_trial_is_drawn_once_and_running_ones_are_not() -> None:
    rows = (*usual_rows(), row(12, 0.3, None, state="running"))
    axes = drawn(tuning(rows, confirmed=False), TRIALS).axes[0]
    looks = [(role, marker) for role in ("ran", "muted", "limit") for marker in ("o", "^", "x")]
    found = [x for look in looks for x, _ in marks(axes, *look)]
    assert sorted(found) == list(range(12))
    assert [x for x, _ in marks(axes, "limit", "x")] == [8]


def test_the_best_so_far_is_of_complete_trials() -> None:
    rows = [row(2, 0.1, 0.4), row(0, 0.1, 0.5), row(1, 0.1, 0.1, state="pruned"), row(3, 0.1, 0.45), row(4, 0.1, 0.3)]
    assert best_so_far(rows) == [(0, 0.5), (2, 0.4), (4, 0.3)]


def test_rules_go_through_what_was_found() -> None:
    axes = drawn(CASES["usual"], BATCHES).axes[0]
    found = CASES["usual"].best
    assert found is not None
    rate = found.setting.learning_rate
    ends = sorted(float(line.get_ydata()[1]) for line in axes.lines if len(line.get_xdata()) == 2 and line.is_dashed())  # type: ignore[arg-type,index]
    assert ends == pytest.approx([2 * rate, 4 * rate])


@given(st.integers(1, 100), st.integers(2, 5000), st.data())
def test_every_batch_has_a_colour_that_is_named(low: int, width: int, data: st.DataObject) -> None:
    batches = Batches(BatchSpan(low, low + width))
    batch = data.draw(st.integers(low, low + width))
    assert batches.role(batch) in [role for _, role in batches.marks()]


LOSSES = st.lists(st.floats(-1e6, 1e30) | st.just(math.inf), max_size=30)


@given(LOSSES)
def test_a_scale_shows_the_best_and_is_never_empty(told: list[float]) -> None:
    losses = choose_losses(told)
    assert losses.low < losses.high < math.inf
    finite = [loss for loss in told if math.isfinite(loss)]
    assert losses.known == bool(finite)
    assert all(losses.low <= loss for loss in finite)


def test_one_that_is_huge_does_not_press_the_others_into_a_line() -> None:
    losses = choose_losses([1.0, 1.1, 1.2, 1.3, 1e9])
    assert losses.high == 1.3
    assert not losses.logarithmic


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_same_study_gives_the_same_bytes(form: Any) -> None:
    assert draw_tuning(tuning(), form) == draw_tuning(tuning(), form)


@pytest.mark.parametrize("case", ["usual", "200 trials over batches"])
def test_every_colour_has_one_for_dark_panels(case: str) -> None:
    for svg in draw_tuning(CASES[case]).values():
        drawing = svg.decode().split("@media (prefers-color-scheme: dark) {")[1].split("</style>", 1)[1]
        used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing))
        assert len(used) > 3
        assert used <= set(LIGHT.values())


def test_an_svg_is_for_light_and_dark_and_has_a_title() -> None:
    for svg in draw_tuning(CASES["200 trials over batches"]).values():
        text = svg.decode()
        assert "@media (prefers-color-scheme: dark)" in text
        assert "<title>" in text
        assert len(text) < 250_000


def test_a_lost_trial_is_not_drawn() -> None:
    lost = replace(row(1, 0.2, None, state="failed"), lost=True)
    rows = (row(0, 0.1, 0.5, own=True), row(2, 0.2, 0.4, repeats=1))
    for name in (RATES, TRIALS):
        assert draw_tuning(tuning((rows[0], lost, rows[1])))[name] == draw_tuning(tuning(rows))[name]
