"""Checkpoints are whole or absent, hold no code, and the newest undamaged one is found again."""

from __future__ import annotations

import math
import os
import random
import resource
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.errors import CheckpointError
from autoaccum.training.checkpoints import (
    VERSION,
    Checkpoints,
    NotPortableError,
    read_checkpoint,
    write_file,
)


def record(update: int = 0) -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "update": update,
        "model": {"weight": shared, "tied": shared, "half": torch.ones(3, dtype=torch.bfloat16)},
        "counts": Counter([1, 1]),
        "nest": [(1, 2.5, None, True), {"deep": [b"bytes", "text", 1 + 2j, 1 << 127]}, {3}],
        "order": OrderedDict(b=1, a=math.inf),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def never(event: Any) -> None:
    pytest.fail(f"{event} was sent")


# What they hold.


def test_anybody_can_load_what_is_written(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(7, record(7))
    content = torch.load(path, weights_only=True)
    assert (content["format"], content["version"]) == ("autoaccum checkpoint", VERSION)
    read = read_checkpoint(path)
    assert same(content["record"], record(7))
    assert same(read, record(7))
    assert read["model"]["weight"] is read["model"]["tied"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_tensors_and_numpy_scalars_are_converted(tmp_path: Path) -> None:
    big = torch.arange(100_000.0)
    odd = {
        "slice": big[5:8],
        "wide": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
    }
    groups = {"keys": {np.int64(3): 1}, "groups": defaultdict(list, a=[1]), "rates": [np.float64(0.1), np.bool_(True)]}
    path = Checkpoints(tmp_path).write(1, {**odd, **groups})
    read = read_checkpoint(path)
    for name, tensor in odd.items():
        assert torch.equal(read[name].to_dense(), tensor.detach().to_dense().resolve_conj())
    assert same({name: read[name] for name in groups}, {"keys": {3: 1}, "groups": {"a": [1]}, "rates": [0.1, True]})
    assert path.stat().st_size < 20_000


NOT_PORTABLE: dict[str, tuple[Any, str]] = {
    "function": ({"scheduler": {"anneal_func": math.cos}}, "scheduler.anneal_func: it is a builtin_function_or_method"),
    "array": ({"data": [1, np.ones(2)]}, "data.1: it is a ndarray"),
    "object": ({"data": random.Random()}, "data: it is a Random"),
    "meta": ({"data": torch.ones(1, device="meta")}, "data: it is a Tensor"),
}


@pytest.mark.parametrize("kind", NOT_PORTABLE)
def test_a_state_that_needs_code_is_refused_by_name_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    content, reason = NOT_PORTABLE[kind]
    with pytest.raises(NotPortableError, match="which would not load without running code: use") as caught:
        Checkpoints(tmp_path).write(1, content)
    assert reason in str(caught.value)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


# Damage.


def verdict(path: Path) -> str:
    try:
        return "whole" if same(read_checkpoint(path), record()) else "changed"
    except CheckpointError as error:
        return str(error)


def test_any_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(1, record())
    whole, generator, verdicts = path.read_bytes(), random.Random(1), list[str]()
    for _ in range(600):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        verdicts.append(verdict(path))
    assert "changed" not in verdicts
    assert not [text for text in verdicts if "\n" in text or "weights_only" in text]
    assert verdicts.count("whole") < 500


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_can_run_code(tmp_path: Path) -> None:
    store, mark, notices = Checkpoints(tmp_path), tmp_path / "owned", list[Any]()
    path = store.write(1, record(1))
    torch.save({"format": "autoaccum checkpoint", "record": Malicious(mark)}, tmp_path / "checkpoint-00000002.pt")
    torch.save([1], tmp_path / "checkpoint-00000003.pt")
    found = store.newest(notices.append)
    assert found is not None
    assert found[0] == path
    assert not mark.exists()
    assert len(notices) == 2


# The folder.


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=3)
    assert store.newest(never) is None
    for update in (0, 100, 200, 99_999_999, 100_000_000):
        assert store.write(update, record(update)).name == f"checkpoint-{update:08}.pt"
    assert [path.name[11:-3] for path in store.paths()] == ["100000000", "99999999", "00000200"]
    path, read = store.newest(never) or pytest.fail("none found")
    assert path == store.paths()[0]
    assert same(read, record(100_000_000))
    store.write(1, record(1))
    assert len(store.paths()) == 4, "what came later is not removed before its time"


def test_damaged_checkpoints_are_skipped_with_a_notice(tmp_path: Path) -> None:
    store, notices = Checkpoints(tmp_path, keep=3), list[Any]()
    for update in (1, 2, 3):
        store.write(update, record(update))
    for path in store.paths()[:2]:
        path.write_bytes(path.read_bytes()[:-1000])
    path, read = store.newest(notices.append) or pytest.fail("none found")
    assert read["update"] == 1
    assert ["3.pt is damaged" in notices[0].text, "2.pt is damaged" in notices[1].text] == [True, True]
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="all checkpoints in .* are damaged"):
        store.newest(notices.append)
    assert len(store.paths()) == 3


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_format_is_refused_and_never_skipped(tmp_path: Path, version: int) -> None:
    store = Checkpoints(tmp_path)
    store.write(1, record(1))
    write_file(tmp_path / "checkpoint-00000002.pt", {"format": "autoaccum checkpoint", "version": version})
    with pytest.raises(CheckpointError, match=f"is of format {version}, this autoaccum reads format {VERSION}: resume"):
        store.newest(never)


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00000001.pt.tmp").write_bytes(b"half")
    (tmp_path / ".mine.tmp").touch()
    Checkpoints(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]


# Trouble with the disk.


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A file holds at most 200 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_earlier_ones(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    earlier = store.write(1, {"weight": torch.zeros(1)})
    failed = r"checkpoint-00000002.pt cannot be written \(File too large\): free disk space, and check"
    for size in (100_000, 200_000, 10_000_000):
        with pytest.raises(CheckpointError, match=failed):
            store.write(2, {"weight": torch.zeros(size)})
    assert [*tmp_path.iterdir()] == [earlier]
    newest = store.newest(never)
    assert newest is not None
    assert newest[0] == earlier
