"""Pages hold what the records hold, load nothing, and take no name for markup."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from html import unescape
from html.parser import HTMLParser

import pytest
from guard_reports import ALL
from pictured_plans import trial, usual
from sample_pages import EVIL, pages, study

from autoaccum.reporting.figures.style import label
from autoaccum.reporting.guard_report import report_text
from autoaccum.reporting.plan_page import plan_page
from autoaccum.reporting.tune_report import tune_page
from autoaccum.units import format_bytes

KINDS = ("plan", "plan on a CPU", "verify", "guard", "tune")
_LOADING = ("src", "href", "srcset", "data", "poster", "action", "xlink:href")


class Parsed(HTMLParser):
    """What a browser would find in a page: addresses, names of pictures and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in.append(tag)
        assert tag != "script"
        self.pictures += [value or "" for name, value in attrs if tag == "figure" and name == "aria-label"]
        self.addresses += [value or "" for name, value in attrs if name in _LOADING]

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._in[-1:] != ["style"]:
            self.text += data + " "


@cache
def rendered(kind: str) -> str:
    return pages()[kind].render("autoaccum plan model.py")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_nothing_and_takes_no_name_for_markup(kind: str) -> None:
    page = rendered(kind)
    parsed = Parsed(page)
    assert [one for one in parsed.addresses if not one.startswith(("#", "data:,"))] == []
    assert not re.search(r"@import|url\([^#]", page)
    assert EVIL not in page
    assert (EVIL in parsed.text) == (kind in ("plan", "verify"))
    assert len(page) < 200_000


def test_a_plan_page_holds_what_the_plan_and_its_report_hold() -> None:
    plan, report = usual()
    text = Parsed(rendered("plan")).text
    for said in (str(plan.micro_batch), "iter_size", format_bytes(plan.limit_bytes), "BatchNorm normalises",
                 "keep the rate", "a note of the report", "12 x Linear", "(no module)",
                 "-3.00 GiB", "not simulated (no kernel)", "of 12.5 s in all", "autoaccum plan model.py"):  # fmt: skip
        assert said in text, said
    for category, held in report.explanation.categories.items():
        assert not held or f"{label(category)}: {format_bytes(held)}" in text
    assert Parsed(rendered("plan")).pictures == [
        "the memory of an update over time, by purpose",
        "the peak over the micro-batch",
    ]


def test_a_cpu_says_why_there_is_no_memory_over_time() -> None:
    text = Parsed(rendered("plan on a CPU")).text
    assert "note: where memory goes is known for cards: --gpu NAME simulates one" in text
    assert "Memory over one update" not in text
    assert "Memory over one update" in Parsed(rendered("plan")).text


def test_a_schedule_of_ranks_has_a_bar_for_each_kind() -> None:
    plan, _ = usual()
    uneven = dataclasses.replace(
        plan, world_size=3, target_batch=7, micro_batch=2, iter_size=2, micro_batches=(2, 1), largest_fit=2,
        ranks=((2, 1), (1, 1), (1, 1)), trials=(trial(2, "ok", plan.peak_bytes),),
    )  # fmt: skip
    text = " ".join(Parsed(plan_page(uneven, None).render()).text.split())
    assert "1 rank 2 + 1 3 samples each of 2 ranks 1 + 1 2 samples" in text


def test_a_page_of_a_report_holds_what_the_terminal_shows() -> None:
    assert report_text(ALL).strip() in unescape(rendered("guard"))


def test_a_study_page_has_its_trials_and_pictures() -> None:
    parsed = Parsed(tune_page(study(), dict.fromkeys(("rates.svg", "trials.svg", "courses.svg"), b"<svg/>")).render())
    assert parsed.pictures[:3] == [
        "the loss over the learning rate",
        "the loss over the trials",
        "the losses within each trial",
    ]
    assert "the plan's for all trials" in parsed.text
    assert "diverged" in parsed.text
    lost = dataclasses.replace(study(1), rows=(), best=None, own=None, plan=None)
    parsed = Parsed(tune_page(lost, {}).render())
    assert parsed.pictures == ["samples per second over the micro-batch"]
    assert "no trial finished its budget with a finite loss" in parsed.text
