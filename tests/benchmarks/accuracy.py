"""Predictions against measurements that others made on real cards.

    pip install -e ".[accuracy]"
    python tests/benchmarks/accuracy.py TRUTH_FOLDER

TRUTH_FOLDER holds tables (CSV) of measured runs; those that are missing are skipped. Each row is traced and replayed on
the simulated card it was measured on, as the loop that was measured ran, and compared:

- right: nothing that was measured speaks against the prediction. A size that trained, or a cap it trained under, is
  predicted to fit, and one that did not, not to. Rows with one of the two are judged by that one; `both sides` are the
  others.
- would crash: something is predicted to fit that did not. Too timid: the other way round.
- error: of the predicted peak, relative to the measured one, without its sign; bias has it.

What fits is judged on the card's whole memory less what the process is taken to hold outside of PyTorch's allocator,
without the headroom that a plan keeps.

Exit code 3: no row was scored, so nothing is known. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from truths.scores import Case, Scored, format_misses, format_scores
from truths.tables import TABLES, Table
from truths.workers import score_apart

from autoaccum.reporting.console import make_console

VERSIONS = ("torch", "timm", "torchvision", "transformers")


def main() -> int:
    """Predict, score and print; the exit code."""
    options = parse_options()
    done: list[Scored] = []
    for name in options.tables:
        path = options.folder / f"{name}.csv"
        if not path.exists():
            print(f"{path} is missing: skipped", file=sys.stderr)
            continue
        with path.open(encoding="utf-8", newline="") as lines:
            cases = TABLES[name].read(list(csv.DictReader(lines)))
        scored = score_table(TABLES[name], cases, options.processes)
        done += scored
        if scored:
            print(format_scores(TABLES[name].about, scored), *format_misses(scored), sep="\n", end="\n\n", flush=True)
    print(f"`{shlex.join(['python', *sys.argv])}`, {describe_versions()}")
    if any(one.verdict is not None for one in done):
        return 0
    lack = f"none of {len(done)} rows could be predicted" if done else "there are no such tables or rows"
    print(f"nothing was scored: {lack}", file=sys.stderr)
    return 3


def parse_options() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="TRUTH_FOLDER")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="these only")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at a time (default: 2)")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder: give the one that holds the tables")
    return options


def score_table(table: Table, cases: Sequence[Case], processes: int) -> list[Scored]:
    """Predict and judge every case, in the order of the table."""
    scored: dict[str, Scored] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=make_console(stderr=True)) as progress:
        task = progress.add_task(table.name, total=len(cases), last="")
        for one in score_apart(cases, processes):
            scored[one.case.label] = one
            progress.update(task, advance=1, last=one.case.model)
    return [scored[case.label] for case in cases]


def describe_versions() -> str:
    """Return the versions that the scores are valid for."""
    found = []
    for package in VERSIONS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return f"{', '.join(found)}, Python {platform.python_version()}, {datetime.now(timezone.utc):%Y-%m-%d}"


if __name__ == "__main__":
    sys.exit(main())
