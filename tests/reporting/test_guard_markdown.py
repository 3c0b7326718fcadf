"""A guard's report as markdown: what a reader sees of it is what it says, whatever a module is called."""

from __future__ import annotations

import dataclasses
import re
from html import unescape

import pytest
from guard_reports import ALL, CASE, LOCKED, REGRESSED, UNCHANGED, report
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from autoaccum.guarding.judgements import Growth, Judgement
from autoaccum.reporting.guard_markdown import code, escape, report_markdown


def rendered(markdown: str) -> str:
    """Its HTML, by the parser that rich brings along."""
    return str(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))


def seen(markdown: str) -> str:
    """What a reader sees of it."""
    without = re.sub(r"<!-- -->|</?(?:p|code)>", "", rendered(markdown))
    return unescape(without).strip()


def test_the_table_has_a_row_for_each_case() -> None:
    lines = report_markdown(ALL).splitlines()
    assert lines[0] == "### autoaccum guard: 1 regressed, 1 not measured, 1 improved, 1 within tolerance, 1 unchanged"
    assert lines[2] == "Against autoaccum.lock, tolerance 1 %"
    assert lines[4] == "| case | outcome | peak | least budget | largest fit |"
    rows = [line for line in lines if line.startswith("| <code>")]
    assert rows[0] == (
        "| <code>train.py on a100-80gb, target 256, bf16</code> | unchanged | 14.00 GiB | 13.50 GiB | 32 |"
    )
    assert rows[3] == (
        "| <code>package.broken:model on rtx3090, target 256, bf16</code> | **not measured** | - | - | - |"
    )
    assert rows[4] == (
        "| <code>train.py on rtx3090, target 256, bf16</code> | **regressed** | 14.00 GiB → 15.25 GiB (+8.9 %) "
        "| 13.50 GiB → 14.50 GiB (+7.4 %) | 32 → 24 |"
    )
    assert all(line.count("|") == 6 for line in rows)


def test_details_are_open_where_it_is_not_well_and_none_where_nothing_is_to_be_said() -> None:
    text = report_markdown(ALL)
    assert text.count("<details open>") == 2
    assert text.count("<details>") == 2
    assert text.count("</details>") == 4
    assert "<details" not in report_markdown(report(UNCHANGED))
    assert "<details" not in report_markdown(report(LOCKED, updated="autoaccum.lock"))
    assert "<details" not in report_markdown(ALL, details=False)


def test_names_stay_names() -> None:
    html = rendered(report_markdown(report(REGRESSED)))
    assert "<td>optimizer state of head_|&lt;b&gt;`x</td>" in html
    assert "blocks.*.mlp" in html
    assert "<b>" not in html
    assert "<em>" not in html
    assert "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update</code></li>" in html


def test_a_traceback_cannot_leave_its_box() -> None:
    odd = Judgement(case=CASE, outcome="unmeasured", exit_code=2, traceback="a\n\n</pre>\n```\n| b |")
    html = rendered(report_markdown(report(odd)))
    assert "<pre>a<br><br>&#60;/pre>" in html
    assert html.count("</pre>") == 1
    assert "<table>" not in html.split("<pre>")[1]


def test_many_growths_are_cut() -> None:
    grown = tuple(Growth(category="activations", module=f"b{number}", bytes=2**20) for number in range(25))
    text = report_markdown(report(dataclasses.replace(REGRESSED, growths=grown)))
    assert text.count("| activations of b") == 20
    assert "| +5.0 MiB | 5 more | |" in text


@pytest.mark.parametrize(
    "text",
    [
        "- a",
        "+ a",
        "1. a",
        "12) a",
        "# a",
        "> a",
        "***",
        "---",
        "===",
        "a | b",
        "[a](b)",
        "~~a~~",
        "&amp;",
        "a\\_b",
        "+1",
    ],
)
def test_a_sentence_is_shown_as_it_is(text: str) -> None:
    assert seen(escape(text)) == text
    assert seen(f"- {escape(text)}") == f"<ul>\n<li>{text}</li>\n</ul>"


def test_nobody_is_called() -> None:
    assert escape("by @someone") == "by @<!-- -->someone"


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1).filter(str.strip))
def test_any_name_is_one_cell_of_code(name: str) -> None:
    html = rendered(f"| a | b |\n| --- | --- |\n| {code(name)} | c |")
    assert html.count("<td>") == 2
    (cell,) = re.findall(r"<td><code>(.*)</code></td>", html)
    assert unescape(str(cell)) == name
