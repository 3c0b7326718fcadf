"""The page of a study: the best setting, losses by learning rate and over the search, and the trials."""

from __future__ import annotations

from collections.abc import Mapping

from autoaccum.reporting.page.blocks import Block, Facts, Grid, Page, Picture, Section, Tone, plain_facts
from autoaccum.reporting.page.plan_page import plan_sections, throughput_blocks
from autoaccum.reporting.tune_report import NOTHING, format_loss, result_rows, setting_words, trials_table
from autoaccum.tuning.tuning_records import Tuning


def tune_page(tuning: Tuning, pictures: Mapping[str, bytes]) -> Page:
    """Return the page of a study, with its pictures by `draw_tuning`."""
    best, own = tuning.best, tuning.own
    tiles: list[tuple[str, str, Tone]] = [("trials", str(len(tuning.rows)), "")]
    if best is not None and best.setting is not None:
        rate = f"{best.setting.learning_rate:.3g}"
        tiles = [("best learning rate", rate, "good"), ("its loss", format_loss(best.loss), ""), *tiles]
    if own is not None:
        tiles += [("loss of the workload's own rate", format_loss(own.loss), "")]
    return Page(
        kind="autoaccum tune",
        title=f"{tuning.study}: {NOTHING if best is None else setting_words(best, tuning.space)}",
        tiles=tiles,
        sections=[
            Section("Result", (Facts.of(result_rows(tuning)),)),
            Section("Loss by learning rate", _picture("the loss over the learning rate", pictures.get("rates.svg"))),
            Section("Course of the search", _picture("the loss over the trials", pictures.get("trials.svg"))),
            Section("Loss while training", _picture("the losses within each trial", pictures.get("courses.svg"))),
            *([] if tuning.throughput is None else [Section("Throughput", throughput_blocks(tuning.throughput))]),
            Section("Trials", (Grid.of(trials_table(tuning)),) if tuning.rows else ()),
            *(_of_plan(tuning)),
            Section("Made with", (Facts.of(plain_facts(tuning.workload)),)),
        ],
    )


def _picture(name: str, svg: bytes | None) -> tuple[Block, ...]:
    return () if svg is None else (Picture(name, svg),)


def _of_plan(tuning: Tuning) -> list[Section]:
    """Return the sections of the best setting's plan that say how it runs."""
    if tuning.plan is None:
        return []
    named = {"Plan": "Plan of the best setting", "Schedule of one update": "Schedule of one update"}
    return [Section(named[one.title], one.blocks) for one in plan_sections(tuning.plan) if one.title in named]
