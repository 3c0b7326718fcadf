"""Training scripts that run in a process of their own on a simulated card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoaccum.devices.command import settings as records
from autoaccum.devices.command.settings import SETTINGS, ProcessReport, WatchSettings, read_report, write_record
from autoaccum.simulation.cards import find_card

_HOOK = Path(records.__file__).parent / "hook"


class WatchedScript:
    """A script that runs on a simulated RTX 3090 until its last update.

    Args:
        folder: A folder of its own.
        lines: The script.
        words: The words that follow it in its command.
        start_process: `subprocess.Popen`, or what starts a warm copy.
        settings: As of `WatchSettings`.
    """

    def __init__(
        self,
        folder: Path,
        lines: str,
        words: Sequence[Any] = (),
        start_process: Callable[..., Any] = subprocess.Popen,
        **settings: Any,
    ) -> None:
        folder.mkdir()
        self._settings = WatchSettings(folder=str(folder / "run"), **{"card": find_card("rtx3090"), **settings})
        told, script, self._output = folder / "run/settings.json", folder / "train.py", folder / "output.txt"
        write_record(told, self._settings)
        script.write_text(lines)
        environment = {**os.environ, "PYTHONPATH": f"{_HOOK}{os.pathsep}{Path.cwd()}", SETTINGS: str(told)}
        with self._output.open("wb") as output:
            self._process = start_process(
                [sys.executable, str(script), *map(str, words)],
                cwd=folder,
                env=environment,
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def report(self) -> ProcessReport:
        """Wait for its report, and end it."""
        deadline = time.monotonic() + 120
        reports: list[Path] = []
        while not reports and time.monotonic() < deadline:
            has_ended = self._process.poll() is not None
            reports = list(self._settings.reports.glob("*.json"))
            if has_ended:
                break
            time.sleep(0.02)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        assert reports, self.output
        return read_report(reports[0])

    @property
    def output(self) -> str:
        return self._output.read_text()
