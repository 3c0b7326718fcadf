"""Pages in headless Chromium: no error, no request, hover, zoom, and nothing wider than a phone, in both schemes."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chromium import run_page
from sample_pages import pages

SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}
CHECKS = Path(__file__).parents[1] / "shared" / "page_checks.js"


@pytest.fixture(scope="module", params=SCHEMES)
def looked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any], str]:
    """The scheme, what was seen of each page at each width, and what the browser told on its console."""
    files = json.dumps({name: page.render() for name, page in pages().items()}).replace("<", "\\u003c")
    harness = tmp_path_factory.mktemp("pages") / "harness.html"
    script = f'<script id="pages" type="application/json">{files}</script><script>{CHECKS.read_text()}</script>'
    harness.write_text(f"<!doctype html><meta charset=utf-8><body>{script}</body>", encoding="utf-8")
    done = run_page(harness, SCHEMES[request.param])
    seen = re.search(r'<pre id="seen">([\w+/=]+)</pre>', done.stdout)
    assert seen is not None, done.stderr
    return request.param, json.loads(base64.b64decode(seen[1])), done.stderr


@pytest.mark.slow
@pytest.mark.browser
def test_pages_work(looked: tuple[str, list[Any], str]) -> None:
    scheme, seen, told = looked
    assert "CONSOLE" not in told, told
    assert len(seen) == 10
    for page in seen:
        where = (page["name"], page["width"])
        assert page["loads"] == [], where
        assert page["overflow"] <= 0, where
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in page["colours"]]
        assert [one > 380 for one in brightness] == ([True, True, False] if scheme == "light" else [False, False, True])
        for chart in page["charts"]:
            at = (*where, chart["name"])
            assert chart["drawn"] > 0, at
            assert chart["inside"], at
            assert chart["tipInside"], at
            assert ": " in chart["tip"], at
            assert ": " in chart["tipByKey"], at
            assert ": " in chart["tipByTap"], at
            assert chart["tipLeft"], at
            assert chart["button"] == "show all", at
            assert chart["zoomed"] != chart["before"] == chart["after"], at


@pytest.mark.browser
def test_a_hover_tells_what_is_held_and_a_zoom_narrows_the_axis(looked: tuple[str, list[Any], str]) -> None:
    _, seen, _ = looked
    memory, peaks = next(page for page in seen if page["name"] == "plan" and page["width"] == 1100)["charts"]
    assert re.match(r"(forward|backward)\n", memory["tip"]), memory["tip"]
    assert re.search(r"\nactivations: \d+(\.\d+)? [GM]iB(\n|$)", memory["tip"]), memory["tip"]
    assert "reserved: " in memory["tip"]
    sizes = [float(text) for text, _ in peaks["zoomed"] if re.fullmatch(r"[\d.]+", text)]
    assert sizes
    assert all(4 < size < 11 for size in sizes), "of 0 to 15, from 0.4 to 0.7 of the width"
