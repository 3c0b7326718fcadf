"""Checkpoints are whole or not there, whatever memory, disks and kills do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_records import record

from autoaccum.errors import CheckpointError
from autoaccum.training.checkpoints.checkpoints import (
    CheckpointStore,
    write_checkpoint,
)


def test_too_little_memory_ends_in_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is too little host memory to write .*01.pt: free some"):
        write_checkpoint(tmp_path / "checkpoint-00000001.pt", {"wide": torch.zeros(1).expand(10**13)})
    assert list(tmp_path.iterdir()) == []


SHORT = """
import resource, sys
from pathlib import Path
import torch
from autoaccum.errors import CheckpointError
from autoaccum.training.checkpoints.checkpoints import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]))
record = {"weights": [torch.zeros(100_000) for _ in range(20)]}
store.write(1, record)
for room in (0, 1, 2, 4, 7, 8, 9, 12, 20, 1000):
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + room * 2**20, -1))
    try:
        done = store.write(2, record).name
    except CheckpointError as error:
        done = error.hint
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    print(done)
"""


def test_a_limit_on_memory_ends_in_a_checkpoint_or_an_error_and_not_in_waiting(tmp_path: Path) -> None:
    done = run(SHORT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {*done.stdout.split("\n")} <= {"", "free some", "checkpoint-00000002.pt"}
    assert done.stdout.endswith("checkpoint-00000002.pt\n")


# Trouble with the disk.

FULL = """
import os, resource, subprocess, sys, torch
from pathlib import Path
from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.checkpoints.checkpoints import CheckpointStore
from autoaccum.training.run_folder.run_folder import RunFolder

def attempt(update, size):
    try:
        print(store.write(update, {"update": update, "weight": torch.zeros(size)}).name)
    except CheckpointError as error:
        print(str(error).rpartition("/")[2])

folder = Path(sys.argv[1])
mounted = "mount" in sys.argv
if mounted:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], check=True)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
store = CheckpointStore(folder)
for size in (1, 100_000, 200_000, 10_000_000):
    attempt(2 if size > 1 else 1, size)
attempt(2, 40_000)
if mounted:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    attempt(3, 1)
    for path in (folder, folder / "new"):
        try:
            RunFolder.open(path)
        except UsageError as error:
            print(error.message.removeprefix(str(folder)))
print([path.name for path in sorted(folder.iterdir())], store.newest(print)[1]["update"])
"""
KEPT = [
    "checkpoint-00000002.pt",
    "['checkpoint-00000001.pt', 'checkpoint-00000002.pt'] 2",
]


def run(program: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_file_that_may_not_grow_leaves_the_earlier_ones(tmp_path: Path) -> None:
    done = run(FULL, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    failed = "checkpoint-00000002.pt cannot be written (File too large): see that its folder can be written to"
    assert done.stdout.splitlines() == ["checkpoint-00000001.pt", *[failed] * 3, *KEPT]


def test_a_full_and_a_read_only_disk_leave_the_earlier_ones(tmp_path: Path) -> None:
    apart = ("unshare", "--map-root-user", "--mount")
    try:
        may_mount = (
            subprocess.run([*apart, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        may_mount = False
    if not may_mount:
        pytest.skip("this process may not mount; the limit on files above takes the same way through the code")
    done = run(FULL, tmp_path, "mount", before=apart)
    assert (done.returncode, done.stderr) == (0, "")
    full = "checkpoint-00000002.pt cannot be written (No space left on device): make room"
    fixed = "checkpoint-00000003.pt cannot be written (Read-only file system): see that its folder can be written to"
    refused = [f"{name} cannot be written to (Read-only file system)" for name in ("", "/new")]
    assert done.stdout.splitlines() == ["checkpoint-00000001.pt", *[full] * 3, KEPT[0], fixed, *refused, KEPT[1]]


@pytest.mark.parametrize("fault", ["changed", "cut"])
def test_what_does_not_read_back_is_not_kept(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, sync = CheckpointStore(tmp_path), os.fsync
    earlier = store.write(1, {"weight": torch.zeros(1000)})
    content = earlier.read_bytes()

    def spoil(handle: int) -> None:
        sync(handle)
        if fault == "changed":
            os.pwrite(handle, b"\x01", os.fstat(handle).st_size // 2)
        else:
            os.ftruncate(handle, os.fstat(handle).st_size - 500)

    monkeypatch.setattr(os, "fsync", spoil)
    for update in (1, 2):
        with pytest.raises(CheckpointError, match="does not read back as it was written: check the disk"):
            store.write(update, {"weight": torch.zeros(1000)})
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_bytes() == content


def test_a_folder_that_vanished_or_became_a_file_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    store = CheckpointStore(folder)
    folder.rmdir()
    with pytest.raises(
        CheckpointError, match="checkpoint-00000001.pt cannot be written \\(No such file or directory\\)"
    ):
        store.write(1, record(1))
    folder.touch()
    with pytest.raises(CheckpointError, match="cannot be written \\(Not a directory\\)"):
        store.write(1, record(1))


# Killed at any moment.

KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from autoaccum.training.checkpoints.checkpoints import CheckpointStore

folder, moments = Path(sys.argv[1]), random.Random(1)

def refuse(path, reason):
    raise AssertionError(f"{path} was passed over: {reason}")

def newest():
    found = CheckpointStore(folder).newest(refuse)
    if found is None:
        return 0
    assert torch.equal(found[1]["weight"], torch.full((100_000,), float(found[1]["update"])))
    return found[1]["update"]

def forked(function):
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        function(lambda number: os.write(write, b"%d " % number))
        os._exit(0)
    os.close(write)
    return process, read

def write_on(report):
    store, update = CheckpointStore(folder), newest()
    while True:
        update += 1
        store.write(update, {"update": update, "weight": torch.full((100_000,), float(update))})
        report(update)

def said(read):
    with os.fdopen(read) as pipe:
        return [int(word) for word in pipe.read().split()]

for _ in range(12):
    process, read = forked(write_on)
    time.sleep(moments.uniform(0.02, 0.15))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    reported = max(said(read), default=0)
    process, read = forked(lambda report: report(newest()))
    assert os.waitpid(process, 0)[1] == 0
    found = said(read)[0]
    assert found >= reported, (found, reported)
print(found)
"""


def test_a_process_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    # torch is loaded once; each process is forked before any of its threads has started.
    done = run(KILLED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 12
    assert len(CheckpointStore(tmp_path).paths()) in (3, 4)
