"""The file that measures a run on anybody's card: its record by a real snapshot, and what it refuses without a card.

tests/benchmarks/test_measured_runs.py predicts what it recorded; tests/gpu/test_measured_run_on_card.py runs it there.
"""

from __future__ import annotations

import base64
import json
import lzma
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autoaccum.devices import measured_run
from autoaccum.devices.measured_run import is_out_of_memory, reduce_history, without_secrets

SNAPSHOT = Path(__file__).parents[1] / "shared" / "real_allocator" / "snapshot.pickle.xz"
SEGMENTS = [
    {"address": 4096, "segment_type": "large", "blocks": [{"size": 1024, "state": "active_allocated"}]},
    {
        "address": 0,
        "segment_type": "small",
        "blocks": [{"size": 512, "state": "inactive"}, {"size": 1536, "state": "active_pending_free"}],
    },
]


def decoded(history: str | None) -> Any:
    assert history is not None
    return json.loads(lzma.decompress(base64.b64decode(history)))


def entry(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def test_a_history_has_numbers_for_addresses() -> None:
    entries = [
        entry("alloc", 0, 500),  # Block 2: blocks 0 and 1 were there.
        entry("free_requested", 4096, 1024),
        entry("free_completed", 4096, 1024),
        entry("segment_free", 4096, 1024),
        entry("segment_alloc", 8192, 4096),
        entry("alloc", 8192, 4000),
        entry("free_completed", 0, 500),
        entry("segment_alloc", 16384, 1024),
        entry("segment_free", 8192, 4096),
    ]
    assert decoded(reduce_history(SEGMENTS, entries)) == {
        "segments": [["small", [-512, 1536]], ["large", [1024]]],
        "events": [500, 1 - 3, 4000, 2 - 4],
        "segment_events": [[2, -1024], [2, 4096], [4, 1024], [4, -4096]],
    }


def test_a_snapshot_of_the_real_allocator_is_kept_in_a_fraction_of_its_size() -> None:
    snapshot = pickle.loads(lzma.decompress(SNAPSHOT.read_bytes()))
    entries = snapshot["device_traces"][0]
    history = reduce_history([], entries)
    record = decoded(history)
    alive = dict[int, int]()
    count = 0
    for event in record["events"]:
        if event > 0:
            alive[count] = event
            count += 1
        else:
            del alive[count + event]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert sorted(alive.values()) == sorted(block["requested_size"] for block in blocks)
    assert sum(size for _, size in record["segment_events"]) == sum(each["total_size"] for each in snapshot["segments"])
    assert len(history or "") < 5000


def test_a_long_history_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_run, "_LONGEST_HISTORY", 10)
    assert reduce_history(SEGMENTS, []) is None


def test_an_error_may_come_from_one_of_the_card() -> None:
    error = ValueError("the batch was lost")
    assert not is_out_of_memory(error)
    error.__cause__ = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert is_out_of_memory(error)


def test_secrets_of_a_command_are_not_shown() -> None:
    words = ["train.py", "--hub_token", "hf_1", "--wandb-api-key=12", "--tokens", "4", "token", "x", "api_key=a=\nb"]
    shown = ["train.py", "--hub_token", "***", "--wandb-api-key=***", "--tokens", "4", "token", "x", "api_key=***"]
    assert without_secrets(words) == shown
    assert without_secrets(["--data=https://me:mine@host/a"]) == ["--data=https://***@host/a"]


def measure(folder: Path, words: Sequence[str], script: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (folder / name).write_text(f"import sys\nprint(sys.argv, __name__, sys.path[0])\n{script}\n")
    command = [sys.executable, measured_run.__file__, *words]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script is given"),
        (["lost.py"], "there is no script lost.py"),
        (["--updates", "1", "train.py"], "--updates 1 is too few: the first makes the optimizer's state"),
        (["-o", "train.py", "train.py"], "train.py exists already: add --force"),
        (["-o", "lost/run.json", "train.py"], "there is no folder for lost/run.json"),
    ],
)
def test_wrong_usage_is_refused_before_the_script_runs(tmp_path: Path, words: list[str], said: str) -> None:
    done = measure(tmp_path, words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {said}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("", 3, "this process ended after 0 of 3 updates: name the script that trains itself"),
        ("sys.exit(5)", 3, "the script left with exit status 5 after 0 of 3 updates"),
        ("raise KeyboardInterrupt", 130, "interrupted after 0 of 3 updates, and nothing was written"),
        ("{}['tokens']", 3, "the script failed after 0 of 3 updates, and nothing was written"),
        ("import torch; torch.ones(1, device='cuda')", 2, "run it on the machine with the card"),
    ],
)
def test_without_updates_on_a_card_nothing_is_written(tmp_path: Path, script: str, code: int, said: str) -> None:
    done = measure(tmp_path, ["-o", "run.json", "train.py", "--lr", "1"], script)
    assert done.returncode == code
    *lines, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert said in last
    assert not any(measured_run.__file__ in line for line in lines), "the traceback is the script's own"
    assert done.stdout.strip() == f"['train.py', '--lr', '1'] __main__ {tmp_path}"
    assert not (tmp_path / "run.json").exists()


def test_a_module_runs_as_by_python(tmp_path: Path) -> None:
    done = measure(tmp_path, ["-m", "package.train", "--lr", "1"])
    assert done.stdout.strip() == f"['{tmp_path}/package/train.py', '--lr', '1'] __main__ {tmp_path}"
