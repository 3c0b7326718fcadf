"""The table that is measured, as a file: written after each row, so that what was cut short goes on from there.

`python -m tests.gpu.table FILE` says in a few lines what it holds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

SCHEMA = 1
SECTIONS = ("machine", "probes", "constants", "comparison")
DATA = Path(__file__).parent / "data"
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


class Table:
    """Rows by section and title.

    Args:
        path: Its file; one that is there is gone on with.

    Raises:
        ValueError: The file is of another form, or of another machine than `about` says.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        empty: dict[str, Any] = {"schema": SCHEMA, "about": dict(about), **{name: {} for name in SECTIONS}}
        self._record = read_table(path) if path.exists() else empty
        if _kind(self._record["about"]) != _kind(about):
            raise ValueError(f"{path} is of {self._record['about']}, and this is {dict(about)}: take another file")

    def has(self, section: str, title: str, *, again: bool = False) -> bool:
        """Return whether a row is there; with `again`, a failed one does not count."""
        row = self._record[section].get(title)
        return row is not None and not (again and "error" in row)

    def write(self, section: str, title: str, row: Mapping[str, Any]) -> None:
        """Add or replace a row, and save: a file is whole at any time."""
        self._record[section][title] = dict(row)
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)  # noqa: PTH105


def _kind(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that all machines of a table share; the total memory of equal cards may differ a little."""
    return {name: value for name, value in about.items() if name != "total_bytes"}


def read_table(path: Path) -> dict[str, Any]:
    """A table's record.

    Raises:
        ValueError: It is none, or of another schema.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no table of schema {SCHEMA}")
    missing = [name for name in ("about", *SECTIONS) if not isinstance(record.get(name), dict)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return record


def summarise(record: Mapping[str, Any]) -> list[str]:
    """Lines on every section."""
    about = record["about"]
    lines = [
        f"{about['card']} ({about['place']}), torch {about['torch']}, CUDA {about['cuda']}, cuDNN {about['cudnn']}"
    ]
    lines += _sum_up_constants(_good(record["constants"]))
    lines += _sum_up_comparison(_good(record["comparison"]))
    failed = [
        f"{name}: {title}"
        for name, rows in record.items()
        if name not in ("schema", "about")
        for title, row in rows.items()
        if "error" in row
    ]
    return [*lines, f"rows that failed: {'; '.join(failed) or 'none'}"]


def peak_errors(rows: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return by which fraction each prediction exceeds its measurement, by row; rows without one are left out."""
    both = {title: (row["simulated"][name], (row["measured"] or {}).get(name)) for title, row in rows.items()}
    return {title: (mine - real) / real for title, (mine, real) in both.items() if mine and real}


def least_errors(rows: Mapping[str, Any]) -> dict[str, float]:
    """Return how far each predicted least memory is outside of the measured limits: 0 between failure and success."""
    found = {}
    for title, row in rows.items():
        least, mine = (row["measured"] or {}).get("least"), row["simulated"]["min_budget_bytes"]
        if least is None or mine is None:
            continue
        nearest = min(max(mine, least["failed_bytes"]), least["ran_bytes"])
        found[title] = (mine - nearest) / least["ran_bytes"]
    return found


def _sum_up_comparison(rows: Mapping[str, Any]) -> Iterator[str]:
    tables = {name.removesuffix("_bytes").replace("_", " "): peak_errors(rows, name) for name in _PEAKS}
    for name, errors in {**tables, "least memory": least_errors(rows)}.items():
        yield f"{name}: {_spread(errors)}"
    yield f"peaks predicted without a measurement: {sum(row['measured'] is None for row in rows.values())}"


def _spread(errors: Mapping[str, float]) -> str:
    if not errors:
        return "not measured"
    sizes = [abs(error) for error in errors.values()]
    high = quantiles(sizes, n=20, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    worst = max(errors, key=lambda title: abs(errors[title]))
    summary = f"median error {median(sizes):.2%}, 95th percentile {high:.2%} of {len(sizes)}"
    return f"{summary}; worst {errors[worst]:+.2%} ({worst})"


def _sum_up_constants(rows: Mapping[str, Any]) -> Iterator[str]:
    """Sum up by rule: of how many blocks it predicts the size, and the worst errors."""
    blocks = [(title, block) for title, row in rows.items() for block in row["rows"]]
    measured = [(title, block) for title, block in blocks if block["measured_bytes"] is not None]
    if not measured:
        yield f"constants: not measured ({len(blocks)} blocks predicted)"
        return
    for rule in dict.fromkeys(block["rule"] for _, block in measured):
        own = [(title, block, _miss(block)) for title, block in measured if block["rule"] == rule]
        exact = sum(not miss for *_, miss in own)
        outside = sum(miss > block["uncertainty_bytes"] for _, block, miss in own)
        title, block, _ = max(own, key=lambda entry: entry[2])
        worst = f"; worst {block['predicted_bytes']:,} for {block['measured_bytes']:,} ({title})"
        yield f"{rule}: {exact} of {len(own)} exact, {outside} outside of their band{worst * (exact < len(own))}"


def _miss(block: Mapping[str, Any]) -> int:
    return abs(int(block["measured_bytes"]) - int(block["predicted_bytes"]))


def _good(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    return {title: row for title, row in rows.items() if "error" not in row}


def main() -> None:
    """Print the summary of each file of the command line."""
    for name in sys.argv[1:]:
        print("\n".join(summarise(read_table(Path(name)))))


if __name__ == "__main__":
    main()
