"""Write the histories that an installed CUDA build of torch records of its allocator, without a card.

`PYTHONPATH=.:tests/shared python tests/shared/real_allocator/record_history.py SITE_PACKAGES -o FILE` writes those that
tests/simulation/allocator/test_recorded_replay.py replays. It needs what `record_statistics.py` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allocator_requests import make_requests
from real_allocator.record_statistics import build
from short_histories import TOTAL_BYTES, ShortHistory

KEPT = ("", "per_process_memory_fraction:0.3", "per_process_memory_fraction:0.3,expandable_segments:True")


def record_history(folder: Path, text: str, seed: int, count: int) -> ShortHistory:
    """Return the history of one case."""
    made = make_requests(seed, count)
    requests = "".join(f"{'f' if size is None else 'm'} {block} {size or 0}\n" for block, size in made)
    runtime = {"LD_PRELOAD": f"{folder}/libcudart.so.13", "STUB_TOTAL": str(TOTAL_BYTES)}
    environment = {**os.environ, **runtime, "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(
        [folder / "allocator_history"], input=requests, capture_output=True, text=True, env=environment, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return {
        "conf": text,
        "entries": [(line[1], int(line[2]), int(line[3])) for line in lines if line[0] == "e"],
        "blocks": [[int(number) for number in line[1:]] for line in lines if line[0] == "b"],
        "statistics": next([int(number) for number in line[1:]] for line in lines if line[0] == "s"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the library that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(options.site_packages, folder, "allocator_history")
        histories = [record_history(folder, text, 7 + number, 240) for number, text in enumerate(KEPT)]
        options.output.write_text(json.dumps(histories, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
