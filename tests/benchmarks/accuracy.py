"""Predictions against measurements that others made on real cards.

    pip install -e ".[accuracy]"
    python tests/benchmarks/accuracy.py TRUTH_FOLDER

TRUTH_FOLDER holds tables (CSV) of measured runs; those that are missing are skipped. Each row is traced and replayed on
the simulated card it was measured on, as the loop that was measured ran, and compared:

- right: nothing that was measured speaks against the prediction. A size that trained, or a cap it trained under, is
  predicted to fit, and one that did not, not to. Rows with one of the two are judged by that one; `right of both sides`
  counts the others.
- would crash: something is predicted to fit that did not. Too timid: the other way round.
- error: of the predicted peak, relative to the measured one, without its sign.

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
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.progress import track
from truths.models import make_torchvision_importable
from truths.scores import Case, Scored, UnknownModel, format_scores
from truths.tables import TABLES

from autoaccum.reporting.console import make_console

VERSIONS = ("torch", "timm", "torchvision", "transformers", "peft", "bitsandbytes")
CASES_EACH = 40
"""Then processes are replaced: what a simulation keeps would grow with every model."""


def main() -> int:
    """Predict, score and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="TRUTH_FOLDER")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="these only")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at a time (default: 2)")
    options = parser.parse_args()
    known = False
    for name in options.tables:
        path = options.folder / f"{name}.csv"
        if not path.exists():
            print(f"{path} is missing: skipped", file=sys.stderr)
            continue
        with path.open(encoding="utf-8", newline="") as lines:
            cases = TABLES[name].read(list(csv.DictReader(lines)))
        scores = score_apart(cases, options.processes)
        scored = list(track(scores, name, len(cases), console=make_console(stderr=True)))
        print(format_scores(TABLES[name].about, scored), end="\n\n", flush=True)
        known |= any(one.verdict is not None for one in scored)
    print(f"`{shlex.join(['python', *sys.argv])}`, {describe_versions()}")
    if not known:
        print("nothing was scored", file=sys.stderr)
    return 0 if known else 3


def score_apart(cases: Sequence[Case], processes: int) -> Iterator[Scored]:
    """Predict and judge in processes of their own: simulating is process-wide, and a model may end its process.

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
                    yield task.result()
        for case in lost:
            if len(chunk) > 1:
                yield from score_apart([case], 1)
            else:
                yield Scored(case=case, failure="the process that predicted it died")


def score_case(case: Case) -> Scored:
    """Predict a row, and compare."""
    table = TABLES[case.table]
    try:
        predicted = tuple(table.predict(case, batch) for batch in case.batches)
    except UnknownModel:
        return Scored(case=case, unknown=True)
    except Exception as error:  # noqa: BLE001 - one row that fails must not end the run.
        return Scored(case=case, failure=f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        gc.freeze()  # Garbage is looked for between updates: not in what libraries made when they were imported.
    return Scored(case=case, predicted=predicted, verdict=table.judge(case, predicted))


def _prepare() -> None:
    """Discard what a model prints: stdout is for the scores."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    make_torchvision_importable()


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
