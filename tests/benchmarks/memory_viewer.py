"""Open a snapshot in PyTorch's memory viewer in headless Chromium: it must draw each view without an error.

`python tests/benchmarks/memory_viewer.py step.pickle --viewer MemoryViz.js --d3 d3.min.js -o FOLDER` writes a picture
of each view. The viewer is torch/utils/viz/MemoryViz.js of PyTorch's sources, which its wheels leave out; d3.min.js is
in dist/ of `npm pack d3@5`.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from chromium import run_page

VIEWS = ("Active Memory Timeline", "Allocator State History", "Active Cached Segment Timeline", "Allocator Settings")
PAGE = """<!DOCTYPE html><meta charset="utf-8"><body><script>
window.onerror = (text, file, line) => { document.title += `${text} (line ${line})\\n`; };
</script>SOURCES
add_local_files([{name: "step", base64: "DATA"}], VIEW);
</script></body>"""


def main() -> None:
    """Draw all views, and say what each holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("snapshot", type=Path)
    for name in ("--viewer", "--d3"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path())
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    # What the viewer loads from the network is all part of d3.
    viewer = re.sub(r'import (\* as d3|(\{[^}]*\})) from "[^"]*";', _take_from_d3, asked.viewer.read_text())
    data = base64.b64encode(asked.snapshot.read_bytes()).decode()
    sources = f'<script>{asked.d3.read_text()}</script><script type="module">{viewer}'
    with tempfile.TemporaryDirectory() as folder:
        for view in VIEWS:
            page = Path(folder) / "page.html"
            page.write_text(PAGE.replace("VIEW", json.dumps(view)).replace("DATA", data).replace("SOURCES", sources))
            picture = asked.output / f"{view.lower().replace(' ', '_')}.png"
            done = run_page(page, "--hide-scrollbars", "--window-size=1500,900", f"--screenshot={picture}")
            errors = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
            drawn = len(re.findall(r"<(?:rect|polygon)\b", done.stdout))
            print(f"{view}: {errors[1].strip() if errors else 'no error'}, {drawn} shapes, {picture}")


def _take_from_d3(found: re.Match[str]) -> str:
    return "" if found[2] is None else f"const {found[2]} = d3;"


if __name__ == "__main__":
    main()
