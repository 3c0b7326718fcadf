"""Checkpoints tell every damage, and the newest whole one is found again."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_records import record, same

from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.checkpoints.checkpoints import (
    CheckpointStore,
    has_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from autoaccum.training.checkpoints.verified_files import DamagedFileError


def never(path: Path, reason: str) -> None:
    pytest.fail(f"{path} was passed over: {reason}")


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
