"""The file that strangers run, on this card: what it counts agrees with itself, and with the prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from truths.measured_runs import find_runs
from truths.scores import FITS
from truths.tables import MEASURED

from autoaccum.devices import measured_run

RECORD = Path(__file__).parents[1] / "shared" / "real_allocator" / "measured_run.json"


@pytest.mark.gpu
def test_a_run_is_measured_and_predicted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(json.loads(RECORD.read_text())["script"])
    options = ("-o", "run.json", "--micro-batch", "8", "--include-script")
    command = [sys.executable, measured_run.__file__, *options, "train.py", "8", "256"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    update = record["updates"][-1]
    assert len(record["updates"]) == 3
    assert update["in_use_bytes"] > update["reserved_bytes"], "a context takes memory, too"
    (case,) = MEASURED.read(list(find_runs(tmp_path, run_scripts=True)))
    errors = {score.quantity: score.error() for score in MEASURED.compare(case, [MEASURED.predict(case, 8)])}
    assert FITS in errors
    assert abs(errors["allocated"] or 0) < 0.01
