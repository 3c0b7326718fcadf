"""Pages in headless Chromium: no error, no request, and nothing wider than a phone, in both schemes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chromium import run_page
from sample_pages import pages

SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}
LOOK = """
const pages = JSON.parse(document.getElementById("pages").textContent), seen = [];
async function look(name, width) {
  const element = Object.assign(document.createElement("iframe"), { width, height: 900, srcdoc: pages[name] });
  const loaded = new Promise((done) => element.addEventListener("load", done));
  document.body.append(element);
  await loaded;
  const frame = element.contentWindow, root = element.contentDocument.documentElement;
  const style = (tag) => frame.getComputedStyle(root.querySelector(tag));
  seen.push({
    name, width, overflow: root.scrollWidth - root.clientWidth,
    loads: frame.performance.getEntriesByType("resource").length,
    colours: [style("body").backgroundColor, style("section").backgroundColor, style("h2").color],
    ink: [...root.querySelectorAll("figure svg text")].map((text) => frame.getComputedStyle(text).fill),
  });
  element.remove();
}
(async () => {
  for (const name in pages) for (const width of [1100, 390]) await look(name, width);
  document.body.replaceChildren(
    Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
})();
"""


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_work(scheme: str, tmp_path: Path) -> None:
    files = json.dumps({name: page.render() for name, page in pages().items()}).replace("<", "\\u003c")
    harness = tmp_path / "harness.html"
    script = f'<script id="pages" type="application/json">{files}</script><script>{LOOK}</script>'
    harness.write_text(f"<!doctype html><meta charset=utf-8><body>{script}</body>", encoding="utf-8")
    done = run_page(harness, SCHEMES[scheme])
    assert "CONSOLE" not in done.stderr, done.stderr
    text = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout)
    assert text is not None, done.stderr
    seen = json.loads(text[1])
    assert len(seen) == 10
    assert any(page["ink"] for page in seen)
    for page in seen:
        where = (page["name"], page["width"])
        assert page["loads"] == 0, where
        assert page["overflow"] <= 0, where
        is_light = [brightness(colour) > 380 for colour in page["colours"]]
        assert is_light == ([True, True, False] if scheme == "light" else [False, False, True])
        assert all((brightness(colour) > 380) == (scheme == "dark") for colour in page["ink"]), where
