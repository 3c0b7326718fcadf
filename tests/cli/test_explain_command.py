"""`autoaccum explain`: a snapshot that PyTorch's own allocator wrote, beside the prediction of what it recorded.

tests/shared/real_allocator/snapshot.pickle.xz is of three updates of two micro-batches in a plain loop (see
record_snapshot.py there), by torch 2.15.0+cu132 with TORCH_CUBLAS_WORKSPACE_CACHE=1 and
TORCH_CUBLASLT_UNIFIED_WORKSPACE=1, with which releases from 2.13 on take the same workspaces at the same addresses.
"""

from __future__ import annotations

import json
import lzma
import pickle
from pathlib import Path

import pytest
from command_line import Command, Done

SHARED = Path(__file__).parents[1] / "shared"
WORDS = ("explain", "step.pickle", "net.py", "--gpu", "rtx3090", "--micro-batch", "24", "-q")
WORKSPACES = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1", "COLUMNS": "100"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with lzma.open(SHARED / "real_allocator" / "snapshot.pickle.xz") as file:
        (tmp_path / "step.pickle").write_bytes(file.read())
    (tmp_path / "net.py").write_text((SHARED / "workloads" / "recorded_net.py").read_text())
    return tmp_path


def run(command: Command, folder: Path, *words: str) -> Done:
    return command(folder, *WORDS, *words, **WORKSPACES)


@pytest.mark.needs_torch(2, 13)
def test_an_update_of_the_real_allocator_is_the_predicted_one(command: Command, folder: Path) -> None:
    done = run(command, folder, "--target-batch", "48")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the last update of step.pickle (754 events) beside that predicted for rtx3090")
    figures = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines()}
    assert figures["peak held"][:4] == ["111", "MiB", "111", "MiB"]
    assert figures["peak reserved"] == ["122", "MiB", "122", "MiB", "none"]
    assert "at the peak" not in done.stdout, "scalars of the loss are no difference to show"
    assert "the snapshot agrees with the prediction, to its uncertainty of 1.1 MiB" in done.stdout


def test_another_model_is_told_by_module_operator_and_line(command: Command, folder: Path) -> None:
    net = folder / "net.py"
    net.write_text(net.read_text().replace("2048", "2304"))
    line = next(number for number, text in enumerate(net.read_text().splitlines(), 1) if "gelu" in text)
    done = run(command, folder, "--target-batch", "48", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    record = json.loads(done.stdout)
    assert record["agrees"] is False
    update = record
    first = update["first_difference"]
    assert (first["recorded_bytes"], first["predicted_bytes"]) == (24 * 64 * 2048 * 4, 24 * 64 * 2304 * 4)
    assert first["source"]["op"] == "aten.addmm"
    rows = {
        (*each["source"].values(),): (each["recorded_bytes"], each["predicted_bytes"]) for each in update["differences"]
    }
    wide, wider = 24 * 64 * 2048 * 4, 24 * 64 * 2304 * 4
    assert rows["not predicted", "", "", f"net.py:{line}"] == (2 * wide, 0)
    assert rows["activations", "up", "aten.addmm", ""] == rows["activations", "Net", "aten.gelu", ""] == (0, wider)
    difference = sum(recorded - predicted for recorded, predicted in rows.values())
    held = update["held"]["recorded"] - update["held"]["predicted"]
    assert difference < 0, "the recorded model is the smaller one"
    assert abs(difference - held) < 64 * 1024, "all but small blocks has a row"


def test_what_cannot_be_the_recorded_update_says_why(command: Command, folder: Path) -> None:
    file = folder / "step.pickle"
    snapshot = pickle.loads(file.read_bytes())
    snapshot["device_traces"] = [snapshot["device_traces"][0][-60:]]
    file.write_bytes(pickle.dumps(snapshot))
    done = run(command, folder, "--target-batch", "48")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the record does not end with an update in micro-batches of 24 + 24: not half")
    assert "recorded ones; older events were dropped (max_entries): give" in done.stderr
    assert len(done.stderr.splitlines()) == 1

    done = run(command, folder, "--target-batch", "12")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a micro-batch of 24 is more than the 12 samples of an update: give those")
