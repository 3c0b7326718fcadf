"""`python -m tests.gpu.summary FILE`: what a measured table says, in a few lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.gpu.table import read_table

_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def main() -> None:
    """Print the summary of each file of the command line."""
    for name in sys.argv[1:]:
        print("\n".join(summarise(read_table(Path(name)))))


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
        exact, outside = (
            sum(not miss for *_, miss in own),
            sum(miss > block["uncertainty_bytes"] for _, block, miss in own),
        )
        title, block, _ = max(own, key=lambda entry: entry[2])
        worst = f"; worst {block['predicted_bytes']:,} for {block['measured_bytes']:,} ({title})"
        yield f"{rule}: {exact} of {len(own)} exact, {outside} outside of their band{worst * (exact < len(own))}"


def _miss(block: Mapping[str, Any]) -> int:
    return abs(int(block["measured_bytes"]) - int(block["predicted_bytes"]))


def _good(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    return {title: row for title, row in rows.items() if "error" not in row}


if __name__ == "__main__":
    main()
