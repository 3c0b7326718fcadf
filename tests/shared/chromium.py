"""Headless Chromium: runs a page and returns its document, with a profile of its own and without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr"
)


def find_chromium() -> str | None:
    """Return the program, if one is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def run_page(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a page for at most ten seconds of its own time; stdout is its document, stderr has the console."""
    program = find_chromium()
    assert program is not None, "tests with Chromium are marked `browser`"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run(
        [program, *FLAGS.split(), profile, *flags, "--virtual-time-budget=10000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
