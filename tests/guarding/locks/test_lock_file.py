from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_locks import a_case, a_lock, a_measurement, cases, holdings, locks
from small_repository import git, try_git

from autoaccum.devices.explanation import Holding
from autoaccum.errors import LockFileError, MissingLockError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.folding import fold, group_of
from autoaccum.guarding.locks.lock_file import Lock, read_lock, salvage_lock, write_lock
from autoaccum.units import MIB

SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def written(folder: Path, lock: Lock, name: str = "autoaccum.lock") -> str:
    write_lock(folder / name, lock, force=True)
    return (folder / name).read_text(encoding="utf-8")


@SHARED_FOLDER
@given(lock=locks(), seed=st.integers(0, 1000))
def test_any_lock_is_read_as_it_was_and_written_alike_in_any_order(tmp_path: Path, lock: Lock, seed: int) -> None:
    text = written(tmp_path, lock)
    again = read_lock(tmp_path / "autoaccum.lock")
    assert again == lock
    assert list(again.entries) == list(lock.entries)
    shuffled = list(lock.entries.items())
    random.Random(seed).shuffle(shuffled)
    assert written(tmp_path, Lock(dict(shuffled))) == text
    assert written(tmp_path, again) == text
    assert text.isascii() or text.encode().decode() == text


@settings(deadline=None, max_examples=100)
@given(given=st.lists(cases(), unique=True, max_size=8))
def test_no_two_cases_are_called_alike(given: list[object]) -> None:
    assert len({case_name(case) for case in given}) == len(given)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=100)
@given(rows=st.lists(holdings(), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_folding_keeps_the_sum_and_what_matters_in_any_order_and_is_done_once(rows: list[Holding], seed: int) -> None:
    random.Random(seed).shuffle(rows)
    whole = a_measurement(*rows)
    assert fold(whole) == whole
    assert sum(row.bytes for row in whole.holdings) == sum(row.bytes for row in rows)
    sizes = {group_of(row): sum(o.bytes for o in rows if group_of(o) == group_of(row)) for row in rows}
    kept = {group_of(row) for row in whole.holdings}
    for group, size in sizes.items():
        assert group in kept or size * 1000 < whole.peak_bytes


def test_a_locked_group_is_told_however_small_it_came_to_be() -> None:
    small = Holding(category="activations", module="head", kind="Linear", bytes=MIB)
    large = Holding(category="activations", module="body", kind="Linear", bytes=2000 * MIB)
    assert [row.module for row in fold(a_measurement(small, large)).holdings] == ["", "body"]
    whole = a_measurement(large)
    unfolded = type(whole)(**{**vars(whole), "holdings": (small, large)})
    assert [row.module for row in fold(unfolded, keep={group_of(small)}).holdings] == ["body", "head"]


def test_it_is_made_to_be_read(tmp_path: Path) -> None:
    lines = written(tmp_path, Lock({a_case(precision="bf16"): a_measurement()})).splitlines()
    assert lines[0].startswith("# ")
    for line in (
        "autoaccum-lock = 1",
        '["train.py on rtx3090, target 256, bf16"]',
        'asked.workload = "train.py"',
        "asked.target-batch = 256",
        "micro-batches = [[8, 32]]",
        "limit-bytes = 23_622_320_128  # 22.00 GiB",
        "categories.activations = 1_258_291_200  # 1.17 GiB",
        '  [   4,     314_572_800, "activations", "blocks.{0..3}.mlp.0", "Linear", "bfloat16", "aten.addmm"],'
        "  # 1.17 GiB",
        '  [   1,      33_554_432, "workspace"],  # 32.0 MiB',
        '  ["forward", 1_048_576, { activations = 1_048_576 }],  # 1.0 MiB',
        'versions.torch = "2.13.0"',
    ):
        assert line in lines
    assert max(map(len, lines)) <= 130


def test_a_change_of_one_module_is_a_change_of_its_row_and_of_the_sums(tmp_path: Path) -> None:
    before = written(tmp_path, Lock({a_case(): a_measurement()})).splitlines()
    rows = a_measurement().holdings
    grown = [Holding(**{**vars(row), "bytes": row.bytes * 2}) if row.module == "head" else row for row in rows]
    after = written(tmp_path, Lock({a_case(): a_measurement(*grown)})).splitlines()
    changed = [line.split(" = ")[0] for line, other in zip(before, after, strict=True) if line != other]
    assert [key for key in changed if not key.startswith("  [")] == [
        "peak-bytes",
        "held-bytes",
        "least-bytes",
        "categories.parameters",
        "digest",
    ]
    assert len(changed) == 6


def test_an_equal_lock_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "autoaccum.lock"
    write_lock(path, a_lock())
    before = path.stat()
    write_lock(path, a_lock())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_link_stays_one_and_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    link, path = tmp_path / "autoaccum.lock", tmp_path / "real.lock"
    link.symlink_to(path)
    with pytest.raises(MissingLockError, match=r"there is no lock .*: write it by `autoaccum guard --update`"):
        read_lock(link)
    write_lock(link, a_lock())
    assert link.is_symlink()
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_lock(link) == a_lock()


def test_sums_that_are_wrong_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add up to"):
        write_lock(tmp_path / "autoaccum.lock", Lock({a_case(): a_measurement(peak_bytes=1)}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ours", "theirs", "clean"),
    [("a.py", "z.py", True), ("n.py", "o.py", False)],
    ids=["apart", "side by side"],
)
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
    merged = try_git(tmp_path, "merge", "-q", "theirs")
    assert (merged.returncode == 0) == clean, merged.stdout
    if clean:
        assert read_lock(path) == a_lock(*known, a_case(ours), a_case(theirs))
        return
    before = path.read_bytes()
    number = next(n for n, line in enumerate(before.decode().splitlines(), 1) if line.startswith("<<<<<<<"))
    with pytest.raises(
        LockFileError, match=rf"line {number}, has a conflict of a merge .*: have all that both sides name"
    ):
        write_lock(path, a_lock())
    assert path.read_bytes() == before
    found = salvage_lock(path)
    assert found.lost == []
    assert Lock(found.entries) == a_lock(*known, a_case(ours), a_case(theirs)), "however git has cut the two entries"
