"""The lock: read as it was written, made to be read and merged, and refused when it is damaged."""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
from example_counts import count_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_locks import Lock, a_case, a_lock, a_measurement, cases, locks
from small_repository import git, try_git

from autoaccum.devices.explanation import Holding
from autoaccum.errors import LockFileError
from autoaccum.guarding.cases import Case, case_name
from autoaccum.guarding.guard_result import Measurement
from autoaccum.guarding.lock import read_lock, write_lock

SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=count_examples(50))
LOCK = a_lock(a_case(), a_case("other.py"))
LARGEST, END = '{"largest": 32}\n', '{"end": "a lock that was cut off lacks this line"}\n'
WAY_OUT = ": restore it from git, or measure all cases anew by `autoaccum guard --update --force`"


def written(folder: Path, lock: Lock) -> str:
    write_lock(folder / "autoaccum.lock", lock)
    return (folder / "autoaccum.lock").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("sound"), LOCK)


class TestSound:
    @SHARED_FOLDER
    @given(lock=locks(), seed=st.integers(0, 1000))
    def test_any_lock_is_read_as_it_was_and_written_alike_in_any_order(
        self, tmp_path: Path, lock: Lock, seed: int
    ) -> None:
        text = written(tmp_path, lock)
        again = read_lock(tmp_path / "autoaccum.lock")
        assert dict(map(in_any_order, again.items())) == dict(map(in_any_order, lock.items()))
        shuffled = list(lock.items())
        random.Random(seed).shuffle(shuffled)
        assert written(tmp_path, dict(shuffled)) == text
        assert written(tmp_path, again) == text

    @settings(max_examples=count_examples(50))
    @given(given=st.lists(cases(), unique=True, max_size=8))
    def test_no_two_cases_are_called_alike(self, given: list[Case]) -> None:
        assert len({case_name(case) for case in given}) == len(given)

    def test_it_is_made_to_be_read(self, tmp_path: Path) -> None:
        lines = written(tmp_path, {a_case(precision="bf16"): a_measurement()}).splitlines()
        assert all(json.loads(line) for line in lines)
        assert json.loads(lines[0])["autoaccum-lock"] == 5
        for line in (
            '{"asked": {"workload": "train.py", "gpu": "rtx3090", "target_batch": 256, "precision": "bf16"}}',
            '{"micro_batches": [[8, 32]]}',
            '{"limit_bytes": 23622320128}',
            '{"holdings": {"category": "activations", "module": "blocks.{0..3}.mlp.0", "kind": "Linear",'
            ' "dtype": "bfloat16", "op": "aten.addmm", "bytes": 314572800}}',
        ):
            assert line in lines

    def test_a_change_of_one_module_is_a_change_of_its_row_and_of_the_sums(self, tmp_path: Path) -> None:
        before = written(tmp_path, {a_case(): a_measurement()}).splitlines()
        rows = a_measurement().holdings
        grown = [Holding(**{**vars(row), "bytes": row.bytes * 2}) if row.module == "head" else row for row in rows]
        after = written(tmp_path, {a_case(): a_measurement(*grown)}).splitlines()
        changed = [next(iter(json.loads(line))) for line, other in zip(before, after, strict=True) if line != other]
        assert changed == ["peak_bytes", "min_budget_bytes", "holdings", "digest"]


def in_any_order(entry: tuple[Case, Measurement]) -> tuple[Case, Measurement]:
    case, measurement = entry
    return case, dataclasses.replace(measurement, holdings=tuple(sorted(measurement.holdings, key=dataclasses.astuple)))


class TestDamaged:
    @pytest.mark.parametrize(
        "content",
        [b"", b'[[package]]\nname = "torch"\n', b"torch==2.13.0\n", b"\x80\x04\x95", b"autoaccum-lock = 1\n"],
        ids=["empty", "of something else", "no JSON", "no text", "in TOML"],
    )
    def test_what_is_no_lock_of_this_format(self, tmp_path: Path, content: bytes) -> None:
        assert "--update --force" in refusal(tmp_path, content)

    @pytest.mark.parametrize(
        ("old", "new", "told"),
        [
            (
                '-lock": 5',
                '-lock": 6',
                "LOCK is no lock in the format 5, which this autoaccum reads: use the autoaccum",
            ),
            ('"largest": 32', '"largest": 33', "the entry that ends in line 17 of the lock LOCK does not match its"),
            ('"target_batch": 256', '"target_batch": 512', "does not match its digest, as after an edit by"),
            ('{"digest": ', '{"other": ', "the entry that ends in line 33 of"),
            ('"largest": 32}', '"largest" 32}', "does not match its digest"),
            (LARGEST, f"<<<<<<< HEAD\n{LARGEST}=======\n{LARGEST}>>>>>>> theirs\n", "or a conflict in a merge"),
            (END, "", "the lock LOCK is cut off: its last line is missing"),
        ],
        ids=["another format", "edited", "asked otherwise", "without digest", "no JSON", "half merged", "cut off"],
    )
    def test_what_was_changed_is_reported_with_the_command_that_rewrites_it(
        self, tmp_path: Path, text: str, old: str, new: str, told: str
    ) -> None:
        assert old in text
        said = refusal(tmp_path, text.replace(old, new, 1).encode())
        assert told in said
        assert said.endswith(WAY_OUT.removeprefix(": "))

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=count_examples(100))
    @given(data=st.data())
    def test_a_damaged_byte_or_line_never_makes_another_lock(
        self, tmp_path: Path, text: str, data: st.DataObject
    ) -> None:
        content = text.encode()
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
        path = tmp_path / "autoaccum.lock"
        path.write_bytes(damaged)
        with suppress(LockFileError):
            found = read_lock(path)
            # An entry of which nothing is left is not there, and whoever guards that case is told so.
            assert found == LOCK or (len(damaged) < len(content) and found.items() <= LOCK.items())


def refusal(folder: Path, content: bytes) -> str:
    path = folder / "autoaccum.lock"
    path.write_bytes(content)
    with pytest.raises(LockFileError) as told:
        read_lock(path)
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)
    return str(told.value).replace(str(path), "LOCK")


@pytest.mark.parametrize(("ours", "theirs", "clean"), [("a.py", "z.py", True), ("n.py", "o.py", False)])
def test_branches_that_each_add_an_entry_merge(tmp_path: Path, ours: str, theirs: str, clean: bool) -> None:
    path = tmp_path / "autoaccum.lock"
    known = [a_case("m.py"), a_case("p.py")]
    git(tmp_path, "init", "-q")

    def commit(*cases: str) -> None:
        write_lock(path, a_lock(*known, *map(a_case, cases)))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "lock")

    commit()
    git(tmp_path, "checkout", "-qb", "theirs")
    commit(theirs)
    git(tmp_path, "checkout", "-q", "main")
    commit(ours)
    assert (try_git(tmp_path, "merge", "-q", "theirs").returncode == 0) == clean
    if clean:
        assert read_lock(path) == a_lock(*known, a_case(ours), a_case(theirs))
    else:
        assert refusal(tmp_path, path.read_bytes()).endswith(WAY_OUT)
