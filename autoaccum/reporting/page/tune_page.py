"""The page of a study: the best setting, losses by learning rate and over the search, and the trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autoaccum.reporting.page.blocks import (
    Axis,
    Block,
    Chart,
    Facts,
    Grid,
    Look,
    Page,
    Rule,
    Section,
    Series,
    Tone,
)
from autoaccum.reporting.page.plan_page import plain_facts, plan_sections, throughput_blocks
from autoaccum.reporting.tune_report import NOTHING, format_loss, result_rows, row_cells, setting_words, trials_table
from autoaccum.tuning.tuning_result import Row, Tuning

_STEEP = 20.0
"""Losses that differ by this factor are drawn on a logarithmic axis."""


def tune_page(tuning: Tuning) -> Page:
    """Return the page of a study."""
    best, own = tuning.best, tuning.own
    tiles: list[tuple[str, str, Tone]] = [("trials", str(len(tuning.rows)), "")]
    if best is not None:
        loss = best.losses[0] if best.mean is None else best.mean
        rate = f"{best.setting.learning_rate:.3g}"
        tiles = [("best learning rate", rate, "good"), ("its loss", format_loss(loss), ""), *tiles]
    if own is not None:
        tiles += [("loss of the workload's own rate", format_loss(own.losses[0] if own.mean is None else own.mean), "")]
    return Page(
        kind="autoaccum tune",
        title=f"{tuning.study}: {NOTHING if best is None else setting_words(best.setting, tuning.space)}",
        tiles=tiles,
        sections=[
            Section("Result", (Facts.of(result_rows(tuning)),)),
            Section("Loss by learning rate", tuple(_by_rate(tuning))),
            Section("Course of the search", tuple(_by_number(tuning))),
            Section("Loss while training", tuple(_courses(tuning))),
            Section("Throughput", throughput_blocks(tuning.throughput)),
            Section("Trials", (Grid.of(trials_table(tuning)),) if tuning.rows else ()),
            *(_of_plan(tuning)),
            Section("Made with", (Facts.of(plain_facts(tuning.workload)),)),
        ],
    )


def _by_rate(tuning: Tuning) -> Iterator[Block]:
    rates = {row.number: row.setting.learning_rate for row in tuning.rows if row.setting is not None}
    series = tuple(_series(tuning, lambda row: rates.get(row.number)))
    if series:
        low, high = tuning.space.learning_rates.low, tuning.space.learning_rates.high
        default = tuning.space.default_learning_rate
        rule = Rule(name=f"the workload's own rate, {default:.3g}", role="muted", axis="x", value=default, dashed=True)
        x = Axis("learning rate", log=True)
        yield _chart("the loss over the learning rate", x, series, (low / 1.3, high * 1.3), (rule,))


def _by_number(tuning: Tuning) -> Iterator[Block]:
    series = tuple(_series(tuning, lambda row: row.number))
    done = sorted((row.number, row.loss) for row in tuning.rows if row.state == "complete" and row.loss is not None)
    if not series or not done:
        return
    lowest = [min(loss for _, loss in done[: place + 1]) for place in range(len(done))]
    numbers = tuple(number for number, _ in done)
    line = Series(name="lowest so far", role="room", look="line", x=numbers, y=tuple(lowest), step=True)
    last = max(row.number for row in tuning.rows)
    x = Axis("trial", whole=True)
    yield _chart("the loss over the number of the trial", x, (line, *series), (-0.5, last + 0.5))


def _courses(tuning: Tuning) -> Iterator[Block]:
    """Yield a line for each trial of the search that told of losses on its way."""
    best = None if tuning.best is None else tuning.best.trial
    rows = [row for row in tuning.rows if row.confirms is None and row.losses]
    series = []
    for place, row in enumerate(sorted(rows, key=lambda row: row.number == best)):
        ends = [(percent, loss) for percent, loss in row.losses if math.isfinite(loss)]
        if row.state == "complete" and row.loss is not None and ends and ends[-1][0] < 100:
            ends.append((100, row.loss))
        if not ends:
            continue
        is_best = row.number == best
        role, name = ("room", "the best") if is_best else ("muted", f"trial {row.number}")
        entry = name if is_best else "other trials" if place == 0 else ""
        x, y = tuple(float(percent) for percent, _ in ends), tuple(loss for _, loss in ends)
        series.append(Series(name=name, role=role, look="line", x=x, y=y, entry=entry))
    if series:
        yield _chart("the loss over the budget of a trial", Axis("percent of the budget"), tuple(series), (20, 102))


def _series(tuning: Tuning, place: Callable[[Row], float | None]) -> Iterator[Series]:
    """Yield the trials as points: complete ones, pruned ones at their last loss, repetitions, and the best."""
    best = None if tuning.best is None else tuning.best.trial
    looks: dict[str, tuple[str, Look]] = {
        "pruned, its last loss": ("muted", "ring"),
        "complete": ("ran", "dot"),
        "repeated with another seed": ("ran", "ring"),
        "the best": ("room", "dot"),
    }
    points: dict[str, list[tuple[float, float, str]]] = {name: [] for name in looks}
    for row in tuning.rows:
        x, loss = place(row), row.loss if row.loss is not None or not row.losses else row.losses[-1][1]
        if x is None or loss is None or not math.isfinite(loss) or row.state not in ("complete", "pruned"):
            continue
        name = "complete" if row.confirms is None else "repeated with another seed"
        name = "the best" if row.number == best else name if row.state == "complete" else "pruned, its last loss"
        number, _, shown, took, words = row_cells(row, tuning.space)
        points[name].append((x, loss, f"trial {number}, loss {shown}, {took}, {words}"))
    for name, (role, look) in looks.items():
        if points[name]:
            places, losses, texts = zip(*points[name], strict=True)
            yield Series(name=name, role=role, look=look, x=places, y=losses, texts=texts)


def _chart(
    name: str, x: Axis, series: tuple[Series, ...], range_: tuple[float, float], rules: tuple[Rule, ...] = ()
) -> Chart:
    losses = [loss for one in series for loss in one.y]
    steep = min(losses) > 0 and max(losses) > _STEEP * min(losses)
    return Chart(name=name, x=x, y=Axis("loss on held-out data", log=steep), series=series, range=range_, rules=rules)


def _of_plan(tuning: Tuning) -> list[Section]:
    """Return the sections of the best setting's plan that say how it runs."""
    if tuning.plan is None:
        return []
    named = {"Plan": "Plan of the best setting", "Schedule of one update": "Schedule of one update"}
    return [Section(named[one.title], one.blocks) for one in plan_sections(tuning.plan) if one.title in named]
