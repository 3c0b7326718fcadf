"""Checkpoints are whole or not there, tell every damage, and run no code."""

from __future__ import annotations

import math
import os
import pickle
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.checkpoints.checkpoints import (
    VERSION,
    CheckpointStore,
    has_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from autoaccum.training.checkpoints.contents import NotPortableError, digest, portable
from autoaccum.training.checkpoints.verified_files import DamagedFileError


def record(update: int = 0) -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "update": update,
        "model": {"weight": shared, "tied": shared, "half": torch.ones(3, dtype=torch.bfloat16)},
        "counts": Counter([1, 1]),
        "nest": [(1, 2.5, None, True), {"deep": [b"bytes", "text", 1 + 2j, 1 << 127]}, {3}],
    }


def same(one: Any, other: Any) -> bool:
    return digest(portable(one)) == digest(portable(other))


def never(path: Path, reason: str) -> None:
    pytest.fail(f"{path} was passed over: {reason}")


# Round trips.

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
tensors = st.builds(
    lambda seed, shape, dtype: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.integers(0, 99),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
values = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(),
    st.binary(min_size=1, max_size=5),
    st.sampled_from([*DTYPES, torch.device("cuda:1"), torch.Size([2, 3])]),
    tensors,
)
nests = st.recursive(
    values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.sets(keys, max_size=3),
    ),
    max_leaves=12,
)


def equal(one: Any, other: Any) -> bool:
    """Without the digest, which is under test."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other or repr(one) == repr(other)  # NaN.


@given(nests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nest_comes_back(tmp_path: Path, nest: Any) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, {"nest": nest})
    assert equal(read_checkpoint(path)["nest"], nest)


@given(nests, nests)
@settings(max_examples=100, deadline=None)
def test_different_nests_have_different_digests(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == equal(one, other)


def test_anybody_can_load_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, record(7))
    content = torch.load(path, weights_only=True)
    assert (content["format"], content["version"]) == ("autoaccum checkpoint", VERSION)
    assert same(content["record"], record(7))
    model = read_checkpoint(path)["model"]
    assert model["weight"] is model["tied"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_tensors_are_made_plain(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    big = torch.arange(100_000.0)
    odd = {
        "slice": big[5:8],
        "wide": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
    }
    write_checkpoint(path, {**odd, "keys": {np.int64(3): 1}, "groups": defaultdict(list, a=[1])})
    read = read_checkpoint(path)
    for name, tensor in odd.items():
        assert torch.equal(read[name].to_dense(), tensor.detach().to_dense().resolve_conj())
    assert [type(key) for key in read["keys"]] == [int]
    assert read["groups"] == {"a": [1]}
    assert path.stat().st_size < 20_000


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    numbers = [np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.float16(2)]
    arrays: list[Any] = [
        np.arange(6.0, dtype=np.float32).reshape(2, 3).T,
        np.zeros(()),
        np.ones(0, np.int8),
        np.eye(2) > 0,
    ]
    arrays[0].flags.writeable = False
    write_checkpoint(path, {"numbers": tuple(numbers), "arrays": arrays})
    read = read_checkpoint(path)
    assert read["numbers"] == tuple(numbers)
    assert [type(number) for number in read["numbers"]] == [type(number) for number in numbers]
    for array, other in zip(read["arrays"], arrays, strict=True):
        assert (type(array), array.dtype, array.shape) == (np.ndarray, other.dtype, other.shape)
        assert np.array_equal(array, other)
    assert torch.load(path, weights_only=True)["record"]["arrays"][1] == {
        "__numpy__": "array",
        "values": torch.zeros(()),
    }


Pair = namedtuple("Pair", "x y")  # noqa: PYI024

LOOP: list[Any] = []
LOOP.append(LOOP)

NOT_PORTABLE: dict[str, tuple[Any, str]] = {
    "function": ({"scheduler": {"anneal_func": math.cos}}, "scheduler.anneal_func: it is a builtin_function_or_method"),
    "array": ({"data": [1, np.array(["a"])]}, "data.1: it is a ndarray"),
    "object": ({"data": random.Random()}, "data: it is a Random"),
    "named": ({"data": Pair(1, 2)}, "data: it is a Pair"),
    "key": ({"data": {Pair(1, 2): 1}}, "a key of data: it is a Pair"),
    "empty": ({"data": b""}, "data: it is a bytes"),
    "loop": ({"data": LOOP}, "it is a nest that contains itself"),
    "meta": ({"data": torch.ones(1, device="meta")}, "data: it is a tensor on the meta device"),
}


@pytest.mark.parametrize("kind", NOT_PORTABLE)
def test_what_needs_code_is_named_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    content, said = NOT_PORTABLE[kind]
    with pytest.raises(NotPortableError, match="which would not load without running code: keep") as caught:
        write_checkpoint(tmp_path / "checkpoint-00000001.pt", content)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


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


# Damage.


def test_pytorch_itself_does_not_see_a_flipped_bit_but_the_digest_does(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, {"weight": torch.full((1000,), 3.0)})
    content = bytearray(path.read_bytes())
    place = content.index(torch.full((9,), 3.0).numpy().tobytes()) + 400
    content[place] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["record"]["weight"], torch.full((1000,), 3.0))
    with pytest.raises(DamagedFileError, match="does not have the digest that was written with it"):
        read_checkpoint(path)


def verdict(path: Path) -> str:
    try:
        return "whole" if same(read_checkpoint(path), record()) else "changed"
    except CheckpointError as error:
        return str(error)


def test_any_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, record())
    whole, generator, verdicts = path.read_bytes(), random.Random(1), list[str]()
    for _ in range(600):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        verdicts.append(verdict(path))
    assert "changed" not in verdicts
    assert not [text for text in verdicts if "\n" in text or "weights_only" in text]
    assert verdicts.count("whole") < 500


def test_any_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, record())
    small = path.read_bytes()
    write_checkpoint(path, {"deep": [{f"name {number}": torch.full((9,), number)} for number in range(100)]})
    large = path.read_bytes()
    assert len(large) > 20_000
    for whole, between in ((small, 97), (large, 500)):
        for length in range(0, len(whole), between):
            path.write_bytes(whole[:length])
            with pytest.raises(DamagedFileError, match="is damaged"):
                read_checkpoint(path)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_can_run_code(tmp_path: Path) -> None:
    store, mark = CheckpointStore(tmp_path), tmp_path / "owned"
    store.write(1, record(1))
    torch.save(
        {"format": "autoaccum checkpoint", "version": 1, "record": Malicious(mark)}, tmp_path / "checkpoint-00000002.pt"
    )
    (tmp_path / "checkpoint-00000003.pt").write_bytes(pickle.dumps(Malicious(mark)))
    torch.save(Malicious(mark), tmp_path / "checkpoint-00000004.pt", _use_new_zipfile_serialization=False)
    told: list[str] = []
    found = store.newest(lambda path, reason: told.append(reason))
    assert found is not None
    assert found[1]["update"] == 1
    assert not mark.exists()
    assert len(told) == 3
    assert "it holds more than values" in told[2]


def test_a_file_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    for content in ({"weight": torch.ones(1)}, [1], {"format": "autoaccum checkpoint", "version": 1}):
        torch.save(content, path)
        with pytest.raises(DamagedFileError):
            read_checkpoint(path)


# The store.


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    assert store.newest(never) is None
    for update in (0, 100, 200, 99_999_999, 100_000_000):
        assert store.write(update, record(update)).name == f"checkpoint-{update:08}.pt"
    assert [path.name[11:-3] for path in store.paths()] == ["100000000", "99999999", "00000200"]
    path, read = store.newest(never) or pytest.fail("none found")
    assert path == store.paths()[0]
    assert same(read, record(100_000_000))
    with pytest.raises(UsageError, match="0 checkpoints are to be kept"):
        CheckpointStore(tmp_path, keep=0)


def test_damaged_ones_are_passed_over_and_set_aside(tmp_path: Path) -> None:
    store, told = CheckpointStore(tmp_path, keep=3), list[tuple[str, str]]()
    for update in (1, 2, 3):
        store.write(update, record(update))
    for path in store.paths()[:2]:
        path.write_bytes(path.read_bytes()[:-1000])
    path, read = store.newest(lambda path, reason: told.append((path.name, reason))) or pytest.fail("none found")
    assert read["update"] == 1
    assert [name for name, _ in told] == ["checkpoint-00000003.pt", "checkpoint-00000002.pt"]
    assert all(reason.endswith(f"; it is kept as {name}.damaged") for name, reason in told)
    assert store.paths() == [path]
    store.write(2, record(2)).write_bytes(b"")
    assert store.newest(lambda path, reason: told.append((path.name, reason))) is not None
    assert told[2] == (
        "checkpoint-00000002.pt",
        "it is no file of torch.save; it is kept as checkpoint-00000002.pt.damaged2",
    )


def test_when_all_are_damaged_training_does_not_start_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for update in (1, 2):
        store.write(update, record(update)).write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole: checkpoint-00000002.pt \\(.*01.pt"):
        store.newest(never)
    assert len(store.paths()) == 2


def test_a_newer_format_is_never_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, record(1))
    torch.save({"format": "autoaccum checkpoint", "version": 2}, tmp_path / "checkpoint-00000002.pt")
    with pytest.raises(CheckpointError, match="is of format 2, this autoaccum reads up to 1: update autoaccum"):
        store.newest(never)
    assert len(store.paths()) == 2


def test_one_that_cannot_be_read_now_is_not_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, record(1))
    (tmp_path / "checkpoint-00000002.pt").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read \\(No such file or directory\\)"):
        store.newest(never)


def test_folders_and_pipes_are_no_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "checkpoint-00000008.pt").mkdir()
    os.mkfifo(tmp_path / "checkpoint-00000009.pt")
    assert store.newest(never) is None
    assert not has_checkpoint(tmp_path)
    path = store.write(1, record(1))
    assert store.newest(never) is not None
    assert store.paths() == [path]
    with pytest.raises(CheckpointError, match="08.pt cannot be written \\(Is a directory\\)"):
        store.write(8, record(8))
    with pytest.raises(CheckpointError, match="09.pt cannot be read \\(it is no file\\): move it away"):
        read_checkpoint(tmp_path / "checkpoint-00000009.pt")


def test_one_that_was_renamed_does_not_stay_the_newest(tmp_path: Path) -> None:
    store, told = CheckpointStore(tmp_path), list[str]()
    for update in (1, 2):
        store.write(update, {"made": update})
    store.paths()[0].rename(tmp_path / "checkpoint-00000900.pt")
    path, _ = store.newest(lambda path, reason: told.append(f"{path.name}: {reason}")) or pytest.fail("none found")
    assert path.name == "checkpoint-00000001.pt"
    assert told == [
        "checkpoint-00000900.pt: it was renamed: it is of update 2; it is kept as checkpoint-00000900.pt.damaged"
    ]


def test_what_came_later_is_not_removed_before_its_time(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for update in (5, 6, 1):
        store.write(update, record(update))
    assert len(store.paths()) == 3


def test_leftovers_of_a_killed_process_are_removed_where_a_run_is_known(tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint-00000001.pt.123.tmp"
    others = {".checkpoint-best.pt.123.tmp", ".weights.pt.123.tmp", ".model.pt.new.tmp", "mine.tmp"}
    for path in (left, *(tmp_path / name for name in others)):
        path.write_bytes(b"half")
    store = CheckpointStore(tmp_path)
    assert left.exists()
    path = store.write(1, record(1))
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, *others}
    left.write_bytes(b"half")
    CheckpointStore(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, *others}


def test_an_earlier_one_that_cannot_be_removed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, record(1))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        store.write(2, record(2))
    assert len(store.paths()) == 2
    path = store.write(3, record(3))
    assert store.paths() == [path]


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
