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
import subprocess
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

VIEWS = ("Active Memory Timeline", "Allocator State History", "Active Cached Segment Timeline", "Allocator Settings")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--window-size=1500,900"),
    "--virtual-time-budget=20000",
)
PAGE = """<!DOCTYPE html><meta charset="utf-8"><body><script>
window.onerror = (text, file, line) => { document.title += `${text} (line ${line})\\n`; };
</script><script src="d3.min.js"></script><script type="module">
import {add_local_files} from "./viewer.js";
add_local_files([{name: "step", base64: "SNAPSHOT"}], VIEW);
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # What the viewer loads from the network is all part of d3.
        pattern = re.compile(r'import (\* as d3|(\{[^}]*\})) from "[^"]*";')
        (folder / "viewer.js").write_text(pattern.sub(_take_from_d3, asked.viewer.read_text()))
        (folder / "d3.min.js").write_bytes(asked.d3.read_bytes())
        data = base64.b64encode(asked.snapshot.read_bytes()).decode()
        for number, view in enumerate(VIEWS):
            page = PAGE.replace("SNAPSHOT", data).replace("VIEW", json.dumps(view))
            (folder / f"{number}.html").write_text(page)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=name))
        Thread(target=server.serve_forever, daemon=True).start()
        for number, view in enumerate(VIEWS):
            picture = asked.output / f"{view.lower().replace(' ', '_')}.png"
            flags = (*FLAGS, f"--user-data-dir={name}/profile{number}", f"--screenshot={picture}", "--dump-dom")
            words = ["chromium", *flags, f"http://127.0.0.1:{server.server_port}/{number}.html"]
            dom = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
            errors = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
            drawn = len(re.findall(r"<(?:rect|polygon)\b", dom))
            print(f"{view}: {errors[1].strip() if errors else 'no error'}, {drawn} shapes, {picture}")
        server.shutdown()


def _take_from_d3(found: re.Match[str]) -> str:
    return "" if found[2] is None else f"const {found[2]} = d3;"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    main()
