"""Pages and what notebooks show hold what the records hold, load nothing, and take no name for markup."""

from __future__ import annotations

import dataclasses
import re
from base64 import b64decode
from collections.abc import Mapping
from functools import cache
from html.parser import HTMLParser

import pytest
from pictured_plans import extremes, usual

from autoaccum import Comparison
from autoaccum.devices.explanation import Change, ModuleShare
from autoaccum.messages import Message
from autoaccum.planning.comparison_record import ComparisonRow
from autoaccum.reporting.page import plan_sections, render_page
from autoaccum.simulation.trace_records import Category
from autoaccum.spec import DeviceFacts
from autoaccum.units import GIB, MIB, format_bytes

EVIL = "<script>alert(1)</script>"
REMARKS = (Message("not_verified"), Message("compares_samples"), Message("random_memory"))
HELD: Mapping[Category, int] = {"activations": 5 * GIB, "gradients": 200 * MIB}
PICTURE = "data:image/svg+xml;base64,"
LOADING = ("src", "href", "srcset", "data", "poster", "action", "xlink:href")


@cache
def pages() -> dict[str, str]:
    """Pages of a simulated card, with odd names, and of a CPU."""
    plan, memory = usual()
    modules = (
        ModuleShare(name=EVIL, kind="Linear", count=12, bytes=2 * GIB, categories=HELD),
        ModuleShare(name="", kind="", count=1, bytes=GIB, categories={"temporaries": GIB}),
    )
    changes = (
        Change(name="checkpoint", what=f"run {EVIL} again in backward", peak_bytes=6 * GIB, saved_bytes=3 * GIB),
        Change(name="bf16", what="compute in bf16", message="no kernel"),
    )
    explanation = dataclasses.replace(memory.explanation, modules=modules, changes=changes, module=EVIL)
    memory = dataclasses.replace(memory, explanation=explanation, notes=REMARKS[:1])
    plan = dataclasses.replace(plan, warnings=REMARKS[1:2], notes=REMARKS[2:])
    measured = dataclasses.replace(extremes()["measured on a CPU"][0], device=DeviceFacts(name="cpu", kind="cpu"))
    sections = {"card": plan_sections(plan, memory, 12.5), "cpu": plan_sections(measured, None)}
    return {name: render_page("plan", name, parts, f"autoaccum plan {EVIL}") for name, parts in sections.items()}


class Parsed(HTMLParser):
    """What a browser would find in a page: addresses, names of pictures and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self._in = tag
        self.pictures += [value or "" for name, value in attrs if tag == "img" and name == "alt"]
        self.addresses += [value or "" for name, value in attrs if name in LOADING]

    def handle_data(self, data: str) -> None:
        if self._in != "style":
            self.text += data + " "


@pytest.mark.parametrize("name", ["card", "cpu"])
def test_a_page_loads_nothing_and_takes_no_name_for_markup(name: str) -> None:
    page, parsed = pages()[name], Parsed(pages()[name])
    assert [one for one in parsed.addresses if not one.startswith(("#", "data:,", PICTURE))] == []
    pictures = [b64decode(one.removeprefix(PICTURE)).decode() for one in parsed.addresses if one.startswith(PICTURE)]
    assert len(pictures) == (2 if name == "card" else 1)
    for text in (page, *pictures):
        assert not re.search(r"<script|@import|url\([^#]", text)
    assert EVIL not in page
    assert parsed.text.count(EVIL) == (4 if name == "card" else 1)
    assert len(page) < 200_000


def test_it_holds_what_the_plan_and_its_report_hold() -> None:
    plan, report = usual()
    parsed = Parsed(pages()["card"])
    for said in (*map(str, (plan.micro_batch, *REMARKS)), "iter_size", format_bytes(plan.limit_bytes), "(no module)",
                 "-3.00 GiB", "not simulated (no kernel)", "planning took 12.5 s",
                 "Memory over one update"):  # fmt: skip
        assert said in parsed.text, said
    for category, held in report.explanation.categories.items():
        assert not held or f" {category.replace('_', ' ')} {format_bytes(held)} " in parsed.text
    assert parsed.pictures == ["the memory of an update over time, by purpose", "the peak over the micro-batch"]


def test_a_cpu_says_why_there_is_no_memory_over_time() -> None:
    text = Parsed(pages()["cpu"]).text
    assert "where memory goes is known only for simulated cards: --gpu NAME" in text
    assert "Memory over one update" not in text


def test_a_notebook_shows_a_record_and_a_program_prints_one_line() -> None:
    plan = dataclasses.replace(usual()[0], warnings=(Message("compares_samples"),))
    fits = ComparisonRow(card="t4", plan=plan, limit_bytes=plan.limit_bytes, warnings=plan.warnings)
    rows = (fits, ComparisonRow(card=EVIL, limit_bytes=GIB, message="no room"))
    for record, line, shown in (
        (plan, "target_batch 256, micro_batch 12, iter_size 22, predicted on ", ["headroom", "Trials"]),
        (Comparison(rows, None), "2 rows, of which 1 fits", [EVIL, "iter_size"]),
    ):
        assert line in repr(record)
        assert len(repr(record)) < 120
        fragment = record._repr_html_() or ""
        assert not re.search(r"<script|@import|url\(|<h\d| id=", fragment)
        assert len(fragment) < 50_000
        parsed = Parsed(fragment)
        assert parsed.pictures == (["the peak over the micro-batch"] if record is plan else [])
        assert [text for text in (*shown, str(plan.warnings[0])) if text not in parsed.text] == []
