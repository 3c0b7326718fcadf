"""Time a guard, and the cost of its pytest plugin where no test uses it.

Run it with `python tests/benchmarks/guard_time.py`.

The whole `autoaccum guard` of the small GPT (examples/docstring_gpt.py), from a shell's point of view, beside a Python
that does nothing but import torch: they alternate, so that the machine's moods meet both. The aim is 6 s on two cores.
Then pytest of one test that does nothing, with the fixture's plugin and without: the aim is 50 ms.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring import ROOT, environment, seconds_of, take_turns

GUARD = ["-m", "autoaccum", "guard", "-q"]
CASE = ["docstring_gpt.py", "--gpu", "rtx3090", "--target-batch", "256"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


def run_python(words: Sequence[str], folder: Path) -> float:
    """Wall time of a Python with `words`."""
    command = [sys.executable, *words]
    return seconds_of(
        lambda: subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, check=True)
    )


def compare_seconds(one: Sequence[str], other: Sequence[str], folder: Path, times: int) -> list[float]:
    """Median wall times of two commands that alternate."""
    taken = take_turns(lambda: run_python(one, folder), lambda: run_python(other, folder), times=times)
    return [statistics.median(seconds) for seconds in taken]


def without_plugin() -> tuple[list[str], list[str]]:
    """The options that load the pytest plugin, and that disable it."""
    names = {point.name for point in importlib.metadata.entry_points(group="pytest11")}
    return ([], ["-p", "no:autoaccum"]) if "autoaccum" in names else (["-p", "autoaccum.pytest_plugin"], [])


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="runs of each (default: 7)")
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        empty = folder / "empty"
        empty.mkdir()
        (empty / "test_nothing.py").write_text("def test_nothing(): ...\n")
        shutil.copy(ROOT / "examples" / "docstring_gpt.py", folder)
        update = run_python([*GUARD, *CASE, "--update"], folder)
        guard, torch = compare_seconds(GUARD, ["-c", "import torch"], folder, times)
        print(f"guard {guard:.2f} s, import torch {torch:.2f} s, medians of {times}; the first --update {update:.2f} s")
        taken, left_out = without_plugin()
        used, unused = compare_seconds([*PYTEST, *taken], [*PYTEST, *left_out], empty, 3 * times)
        print(f"pytest {used * 1e3:.0f} ms with the plugin, {unused * 1e3:.0f} ms without, medians of {3 * times}")


if __name__ == "__main__":
    main()
