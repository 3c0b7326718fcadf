"""Predictions against measurements that others made on real cards, and the pages that publish them.

    pip install -e ".[accuracy]"
    python tests/benchmarks/accuracy.py TRUTH_FOLDER          # predict, compare, print
    python tests/benchmarks/accuracy.py TRUTH_FOLDER --write  # the same, and keep the scores and write the pages
    python tests/benchmarks/accuracy.py                       # write the pages from the scores that are kept

TRUTH_FOLDER holds tables (CSV) of measured runs; those that are missing are skipped. Each row is traced and replayed on
the simulated card it was measured on, as the loop that was measured ran, and compared. How a prediction is judged is
said in `examples/docs/concepts/accuracy.md`.

What fits is judged on the card's whole memory less what the process is taken to hold outside of PyTorch's allocator,
without the headroom that a plan keeps.

Exit code 3: no row was scored, so nothing is known. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.progress import track
from truths.documents import SCORES, format_table, write_pages
from truths.measured_runs import find_runs
from truths.models import make_torchvision_importable
from truths.scores import NotBuilt, Score, Scores, save
from truths.tables import MEASURED, TABLES, Case, Row

from autoaccum.reporting.console import make_console

VERSIONS = (
    *("torch", "timm", "torchvision", "transformers", "peft", "bitsandbytes", "diffusers"),
    *("accelerate", "fitcheck-llm"),
)
CASES_EACH = 40
"""Then processes are replaced: what a simulation keeps would grow with every model."""


def main() -> int:
    """Predict, score and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="TRUTH_FOLDER")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="these only")
    parser.add_argument("--match", type=re.compile, metavar="PATTERN", help="rows alone whose model and run match this")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at a time (default: 2)")
    parser.add_argument(
        "--run-scripts", action="store_true", help="run the commands of measured runs, and the scripts in them"
    )
    parser.add_argument("--write", action="store_true", help="keep the scores of whole tables, and write the pages")
    options = parser.parse_args()
    if options.write and options.match:
        parser.error("--write keeps whole tables: leave --match out")
    if options.folder is None:
        write_pages()
        return 0
    known = False
    for name in options.tables:
        rows = read_rows(options.folder, name, run_scripts=options.run_scripts)
        if not rows:
            continue
        cases = TABLES[name].read(rows)
        cases = [case for case in cases if not options.match or options.match.search(f"{case.model} {case.run}")]
        done = score_apart(cases, options.processes)
        lines_of = dict(track(done, name, len(cases), console=make_console(stderr=True)))
        scores = Scores(describe_origin(name), [score for case in cases for score in lines_of[case.key]])
        print(format_table(TABLES[name].about, scores), end="\n\n", flush=True)
        known |= any(score.quantity for score in scores.lines)
        if options.write:
            save(SCORES / f"{name}.csv", scores)
            write_pages()
    if not known:
        print("nothing was scored", file=sys.stderr)
    return 0 if known else 3


def read_rows(folder: Path, name: str, *, run_scripts: bool) -> list[Row]:
    """The rows of a table; none where it is missing or cannot be read, which is said."""
    if name == MEASURED.name:
        return list(find_runs(folder, run_scripts=run_scripts))
    path = folder / f"{name}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))
    except FileNotFoundError:
        print(f"{path} is missing: skipped", file=sys.stderr)
    except UnicodeDecodeError as error:
        print(f"{path} is not text in UTF-8 ({error}): skipped", file=sys.stderr)
    return []


def score_apart(cases: Sequence[Case], processes: int) -> Iterator[tuple[int, list[Score]]]:
    """Predict and compare in processes of their own: simulating is process-wide, and a model may end its process.

    Where one dies, the rows it had are tried once more, each alone.
    """
    together = CASES_EACH * processes
    for start in range(0, len(cases), together):
        chunk, lost = cases[start : start + together], []
        with ProcessPoolExecutor(min(processes, len(chunk)), get_context("spawn"), _prepare) as pool:
            tasks = {pool.submit(score_case, case): case for case in chunk}
            for task in as_completed(tasks):
                if task.exception():
                    lost.append(tasks[task])
                else:
                    yield tasks[task].key, task.result()
        for case in lost:
            if len(chunk) > 1:
                yield from score_apart([case], 1)
            else:
                yield case.key, [replace(case.score(), note="the process that predicted it died")]


def score_case(case: Case) -> list[Score]:
    """Predict a row, and compare."""
    table = TABLES[case.table]
    try:
        return list(table.compare(case, [table.predict(case, batch) for batch in case.batches]))
    except NotBuilt as reason:
        return [replace(case.score(), note=str(reason))]
    except Exception as error:  # noqa: BLE001 - one row that fails must not end the run.
        return [replace(case.score(), note=" ".join(f"{type(error).__name__}: {error}".split())[:200])]
    finally:
        gc.collect()
        gc.freeze()  # Garbage is looked for between updates: not in what libraries made when they were imported.


def _prepare() -> None:
    """Discard what a model prints: stdout is for the scores."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    make_torchvision_importable()


def describe_origin(table: str) -> str:
    """Return the command, the versions and the date that the scores of a table are of."""
    found = []
    for package in VERSIONS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    command = shlex.join(["python", "tests/benchmarks/accuracy.py", "TRUTH_FOLDER", "--tables", table])
    return f"`{command}`: {', '.join(found)}, Python {platform.python_version()}, {datetime.now(timezone.utc):%Y-%m-%d}"


if __name__ == "__main__":
    sys.exit(main())
