from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_locks import a_case, a_lock, a_measurement

from autoaccum.errors import LockFileError, MissingLockError, UsageError
from autoaccum.guarding.locks.lock_entries import DIGEST, digest_of, to_record
from autoaccum.guarding.locks.lock_file import Lock, read_lock, salvage_lock, write_lock
from autoaccum.guarding.locks.lock_text import lock_text

LOCK = a_lock(a_case(), a_case("other.py"))
POETRY = '[[package]]\nname = "torch"\nversion = "2.13.0"\n\n[metadata]\nlock-version = "2.0"\n'
UV = 'version = 1\nrequires-python = ">=3.10"\n\n[[package]]\nname = "torch"\n'
FORCE = "`autoaccum guard --update --force`"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sound") / "autoaccum.lock"
    write_lock(path, LOCK)
    return path.read_text(encoding="utf-8")


def line_of(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(start))


def refusal(path: Path, content: bytes) -> str:
    """What is said of a file, which stays as it is whoever wants to update it."""
    path.write_bytes(content)
    with pytest.raises(LockFileError) as told:
        read_lock(path)
    with pytest.raises(LockFileError) as told_again:
        write_lock(path, a_lock())
    assert str(told_again.value) == str(told.value)
    assert told.value.exit_code == 2
    assert path.read_bytes() == content
    assert sorted(path.parent.iterdir()) == [path]
    assert "\n" not in str(told.value)
    assert told.value.hint
    return str(told.value).replace(f"{path}", "LOCK")


def test_what_is_no_lock_is_told_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "autoaccum.lock"
    assert refusal(path, b"") == f"LOCK is empty: restore it, or write it anew by {FORCE}"
    assert refusal(path, b" \n\n").startswith("LOCK is empty")
    foreign = f"name another file by --lock, or overwrite this one by {FORCE}"
    assert refusal(path, POETRY.encode()) == (
        f"LOCK is no lock of autoaccum, but TOML of something else (package, metadata): {foreign}"
    )
    assert "(version, requires-python, package)" in refusal(path, UV.encode())
    assert refusal(path, b'{"autoaccum-lock": 1}') == f"LOCK is no lock of autoaccum, but JSON: {foreign}"
    assert refusal(path, b"torch==2.13.0\n") == f"LOCK is no lock of autoaccum, but no TOML at all: {foreign}"
    assert refusal(path, b"\x80\x04\x95") == f"LOCK, line 1, is not UTF-8: {foreign}"
    assert refusal(path, b"[" * 100_000).startswith("LOCK is no lock of autoaccum")
    number = line_of(text, "card")
    damaged = text.replace("NVIDIA", "NVIDI\udcff", 1).encode(errors="surrogateescape")
    assert refusal(path, damaged) == (
        f"LOCK, line {number}, is not UTF-8: restore it, or have all measured anew by {FORCE}"
    )
    newer = text.replace("autoaccum-lock = 1", "autoaccum-lock = 2")
    assert refusal(path, newer.encode()) == (
        "LOCK was written by a newer autoaccum (format 2, and this one reads 1): update autoaccum:"
        " pip install -U autoaccum"
    )
    assert "its autoaccum-lock is '1'" in refusal(path, text.replace("-lock = 1", "-lock = '1'").encode())


def test_what_is_damaged_is_told_by_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "autoaccum.lock"
    entry = line_of(text, '["train.py on rtx3090, target 256"]')
    here = f"LOCK, line {entry}: the entry train.py on rtx3090, target 256"
    at = text.index('["train.py')
    head, tail = text[:at], text[at:]

    def change(old: str, new: str) -> str:
        assert tail.count(old) >= 1
        return refusal(path, (head + tail.replace(old, new, 1)).encode())

    edited = f"{here} does not match its digest, as after an edit or a merge by hand: restore it, or have all measured"
    assert change("largest = 32", "largest = 33") == f"{edited} anew by {FORCE}"
    assert change("asked.target-batch = 256", "asked.target-batch = 512").startswith(edited)
    assert re.match(f"{re.escape(here)} has no digest", change('digest = "', 'other = "'))
    assert "is of train.py on rtx3090, target 256" in change('["train.py on', '["Train.py on')
    assert re.match(r"LOCK, line \d+, is damaged \(.+\): restore it", change("largest = 32", "largest 32"))
    doubled = refusal(path, (text + tail).encode())
    assert doubled.startswith(
        f"LOCK has the entry train.py on rtx3090, target 256 in line {entry} and in line {text.count(chr(10)) + 1}"
    )
    last = tail.rstrip().rpartition("\n")[2]
    assert change(last, f"extra = 1\n{last}").startswith(edited)
    assert refusal(path, text[: -len(last) - 1].encode()).startswith("LOCK is cut off: its last line is missing: rest")
    assert "extra is no entry of a lock" in refusal(path, text.replace("-lock = 1", "-lock = 1\nextra = 1").encode())


MARKED = """<<<<<<< HEAD
largest = 32
{middle}=======
largest = 33
>>>>>>> theirs
"""


@pytest.mark.parametrize("middle", ["", "||||||| merged\nlargest = 31\n"], ids=["merge", "diff3"])
def test_a_half_merged_lock_is_told_by_its_first_marker(tmp_path: Path, text: str, middle: str) -> None:
    marked = text.replace("largest = 32\n", MARKED.format(middle=middle), 1)
    number = line_of(marked, "<<<<<<<")
    anew = f"have all that both sides name measured anew by {FORCE}"
    told = f"LOCK, line {number}, has a conflict of a merge (<<<<<<<): {anew}"
    path = tmp_path / "autoaccum.lock"
    assert refusal(path, marked.encode()).startswith(told)
    assert refusal(path, marked.replace("\n", "\r\n").encode()).startswith(told)
    rest = marked.replace("<<<<<<< HEAD\n", "")
    left = "|||||||" if middle else "======="
    assert f"line {line_of(rest, left)}, has a conflict of a merge ({left})" in refusal(path, rest.encode())
    assert f"({'>' * 7})" in refusal(path, text.replace("largest = 32\n", ">>>>>>> theirs\n", 1).encode())


def test_what_does_not_add_up_is_told_though_its_digest_is_right(tmp_path: Path) -> None:
    sound = to_record(a_case(), a_measurement())

    def told(change: Callable[[dict[str, object]], object]) -> str:
        record = {key: value for key, value in to_record(a_case(), a_measurement()).items() if key != DIGEST}
        change(record)
        texts = lock_text({"train.py on rtx3090, target 256": {**record, DIGEST: digest_of(record)}})
        return refusal(tmp_path / "autoaccum.lock", texts.encode())

    categories = dict(sound["categories"])
    assert "has its categories add up to" in told(lambda record: record.update({"peak-bytes": 5}))
    assert "what it holds is 5" in told(lambda record: record.update({"held-bytes": 5}))
    shifted = {**categories, "activations": categories["activations"] - 1, "workspace": categories["workspace"] + 1}
    assert "its holdings of" in told(lambda record: record.update({"categories": shifted}))
    assert "its holdings" in told(lambda record: record.update({"holdings": sound["holdings"][1:]}))
    assert "its categories in forward" in told(lambda record: record.update({"moments": [["forward", 5, {}]]}))
    other = "is not as it is written by this autoaccum"
    row = sound["holdings"][0]
    for wrong in ({"kind": "guessed"}, {"largest": "32"}, {"novel": 1}, {"card": 5}, {"micro-batches": [8]}):
        assert other in told(lambda record, wrong=wrong: record.update(wrong))  # type: ignore[misc]
    assert other in told(lambda record: record.update({"holdings": [[row[0] + 1, *row[1:]]]}))
    assert other in told(lambda record: record.pop("card"))
    assert other in told(lambda record: record.pop("asked"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_byte_or_line_never_makes_another_lock(tmp_path: Path, text: str, data: st.DataObject) -> None:
    content = text.encode()
    path = tmp_path / "autoaccum.lock"
    lines = content.splitlines(keepends=True)
    at, line = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines) - 1))
    damaged = data.draw(
        st.sampled_from(
            [
                content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :],
                content[:at] + content[at + 1 :],
                b"".join(lines[:line] + lines[line + 1 :]),
                b"".join([*lines[:line], lines[other], *lines[line + 1 :]]),
                b"".join([*lines[:line], lines[other], *lines[line:]]),
                content[:at],
            ]
        )
    )
    path.write_bytes(damaged)
    try:
        found = read_lock(path)
    except LockFileError as error:
        told = str(error)
        with suppress(LockFileError):  # It is cut off, and so not even written by force.
            left = salvage_lock(path)
            assert left.entries.items() <= LOCK.entries.items()
            told_of = LOCK.entries.keys() <= {*left.named} or left.lost
            assert told_of or b'\n["' not in damaged, "an update by force would lose an entry"
    else:
        # An entry of which nothing is left is not there, and whoever guards that case is told so.
        assert found == LOCK or (len(damaged) < len(content) and found.entries.items() <= LOCK.entries.items())
        told = ""
    assert "\n" not in told


def test_what_force_is_for_and_what_it_is_not_for(tmp_path: Path) -> None:
    path = tmp_path / "autoaccum.lock"
    path.write_text(POETRY)
    write_lock(path, LOCK, force=True)
    assert read_lock(path) == LOCK
    folder = tmp_path / "folder.lock"
    folder.mkdir()
    with pytest.raises(LockFileError, match="is a folder: name a file by --lock"):
        read_lock(folder)
    with pytest.raises(LockFileError, match="is a folder"):
        write_lock(folder, LOCK, force=True)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "autoaccum.lock"
    with pytest.raises(MissingLockError, match="there is no lock .*: write it by") as told:
        read_lock(missing)
    assert told.value.exit_code == 3
    with pytest.raises(UsageError, match="there is no folder"):
        write_lock(missing, LOCK)
    loop = tmp_path / "loop.lock"
    loop.symlink_to(loop)
    with pytest.raises(LockFileError, match="cannot be read .*symbolic links"):
        read_lock(loop)
    with pytest.raises(LockFileError, match="null byte"):
        read_lock(tmp_path / "a\0b")
    pipe = tmp_path / "pipe.lock"
    os.mkfifo(pipe)
    with pytest.raises(LockFileError, match=r"pipe.lock is no plain file: name another by --lock"):
        read_lock(pipe)
    below = tmp_path / "file"
    below.write_text("")
    with pytest.raises(MissingLockError):
        read_lock(below / "autoaccum.lock")
    with pytest.raises(UsageError, match="cannot be written"):
        write_lock(Path("/proc/autoaccum.lock"), Lock())
