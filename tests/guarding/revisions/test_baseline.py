from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_repository import commit, git

from autoaccum.devices.process import PACKAGE_ROOT
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError
from autoaccum.guarding.revisions.baseline import check_there, checked_out

PREFIX = "autoaccum-baseline-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, and none of git's settings are the user's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name, value in (("GIT_CONFIG_GLOBAL", os.devnull), ("GIT_CONFIG_SYSTEM", os.devnull), ("TMPDIR", str(folder))):
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository in the middle of work: a branch, a stash, what is staged, changed and untracked, and hooks."""
    folder = tmp_path / "clone"
    commit(folder, {"train.py": "first = 1\n", "sub/model.py": "first = 1\n"}, "first")
    git(folder, "tag", "v1")
    commit(folder, {"train.py": "second = 2\n", "sub/new.py": ""}, "second")
    (folder / "train.py").write_text("stashed = 3\n")
    git(folder, "stash")
    (folder / "train.py").write_text("staged = 4\n")
    git(folder, "add", "train.py")
    (folder / "train.py").write_text("changed = 5\n")
    (folder / "untracked.py").write_text("")
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        path = folder / ".git/hooks" / hook
        path.write_text(f"#!/bin/sh\ntouch '{tmp_path}/hooked'\n")
        path.chmod(0o755)
    return folder


def snapshot(folder: Path) -> str:
    """A hash of everything in a folder: names, modes, times of change and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        is_folder = path.is_dir()
        content = b"" if is_folder or path.is_symlink() else path.read_bytes()
        times = 0 if is_folder else about.st_mtime_ns
        digest.update(repr((str(path), about.st_mode, times, content)).encode())
    return digest.hexdigest()


def test_a_revision_lies_outside_and_nothing_is_left_or_touched(clone: Path, temporary: Path) -> None:
    before = snapshot(clone)
    for revision in ("v1", "HEAD~1", git(clone, "rev-parse", "v1")[:8]):
        with checked_out(clone, revision) as checkout:
            assert (checkout.folder / "train.py").read_text() == "first = 1\n"
            assert not (checkout.folder / "untracked.py").exists()
            assert (checkout.original, checkout.root) == (clone, checkout.folder)
            assert checkout.folder.parent == temporary
            assert git(checkout.folder, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
            (checkout.folder / "train.py").write_text("by whoever measures\n")
            (checkout.folder / "__pycache__").mkdir()
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []
    assert not (clone.parent / "hooked").exists()


def test_a_project_below_the_top_keeps_its_place(clone: Path) -> None:
    with checked_out(clone / "sub", "v1") as checkout:
        assert (checkout.folder / "model.py").read_text() == "first = 1\n"
        assert checkout.folder == checkout.root / "sub"
    commit(clone, {"late/model.py": ""})
    with (
        pytest.raises(NotMeasuredError, match="v1 has no folder late: name a revision"),
        checked_out(clone / "late", "v1"),
    ):
        pass


def test_a_linked_worktree_is_a_repository_too(clone: Path, tmp_path: Path) -> None:
    git(clone, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"), "v1")
    before = snapshot(clone), snapshot(tmp_path / "linked")
    with checked_out(tmp_path / "linked", "main") as checkout:
        assert (checkout.folder / "train.py").read_text() == "second = 2\n"
        assert checkout.original == tmp_path / "linked"
    assert (snapshot(clone), snapshot(tmp_path / "linked")) == before


def test_within_a_hook_git_finds_the_worktree_all_the_same(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(clone)
    monkeypatch.setenv("GIT_DIR", ".git")
    monkeypatch.setenv("GIT_INDEX_FILE", str(clone / ".git/index"))
    with checked_out(clone / "sub", "v1") as checkout:
        assert (checkout.folder / "model.py").exists()
    monkeypatch.undo()
    assert snapshot(clone) == before


def test_neither_submodules_nor_large_files_are_fetched(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "part", {"part.py": ""})
    git(clone, "submodule", "--quiet", "add", str(tmp_path / "part"), "part")
    commit(
        clone, {"weights.bin": "version https://git-lfs.github.com/spec/v1\n", ".gitattributes": "*.bin filter=lfs\n"}
    )
    for setting in ("smudge=false", "process=false", "required=true"):
        git(clone, "config", *f"filter.lfs.{setting}".split("="))
    git(clone, "config", "submodule.recurse", "true")
    before = snapshot(clone)
    with checked_out(clone, "HEAD") as checkout:
        assert list((checkout.folder / "part").iterdir()) == []
        assert (checkout.folder / "weights.bin").read_text().startswith("version")
    assert snapshot(clone) == before


@pytest.mark.parametrize("error", [ValueError("of whoever measures"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_nothing_is_left_after_an_error(clone: Path, temporary: Path, error: BaseException) -> None:
    before = snapshot(clone)
    with pytest.raises(type(error)), checked_out(clone, "v1"):
        raise error
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []


SCRIPT = """
import signal, sys, time
from pathlib import Path
from autoaccum.guarding.revisions.baseline import checked_out
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
with checked_out(Path(sys.argv[1]), "v1") as checkout:
    print(checkout.folder, flush=True)
    time.sleep(60)
"""


def launched(clone: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(clone)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def started(clone: Path) -> tuple[subprocess.Popen[str], Path]:
    process = launched(clone)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left_by_a_process_that_is_told_to_end(clone: Path, temporary: Path, number: signal.Signals) -> None:
    before = snapshot(clone)
    process, folder = started(clone)
    with process:
        assert folder.is_dir()
        for _ in range(3):  # As by somebody who is in a hurry, and to all of the group, as from a terminal.
            os.killpg(process.pid, number)
            time.sleep(0.002)
        assert process.wait(20) in (128 + number, -number)  # The latter if it hears of it once more as it leaves.
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []


def test_nothing_is_left_when_it_is_still_being_checked_out(clone: Path, temporary: Path) -> None:
    commit(clone, {"slow.bin": "", ".gitattributes": "*.bin filter=slow\n"})
    git(clone, "tag", "-f", "v1")
    git(clone, "config", "filter.slow.smudge", f"touch '{temporary}/begun'; sleep 60")
    before = snapshot(clone)
    process = launched(clone)
    with process:
        wait_for(lambda: (temporary / "begun").exists())
        assert len(list((clone / ".git/worktrees").iterdir())) == 1
        process.send_signal(signal.SIGINT)
        process.wait(20)
    (temporary / "begun").unlink()
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_another_holds_is_not(
    clone: Path, temporary: Path, tmp_path: Path
) -> None:
    git(clone, "worktree", "add", "-q", "--detach", str(tmp_path / "own"), "v1")
    (tmp_path / "own").rename(tmp_path / "unplugged")
    before = snapshot(clone)
    killed, folder = started(clone)
    with killed:
        killed.kill()
    holder, held = started(clone)
    with holder:
        assert not folder.exists()
        with checked_out(clone, "v1") as checkout:
            assert {path.name for path in temporary.iterdir()} == {held.name, checkout.folder.name}
        assert (held / "train.py").exists()
        holder.send_signal(signal.SIGTERM)
        holder.wait(20)
    killed, folder = started(clone)
    with killed:
        killed.kill()
    (folder / ".git").unlink()
    folder.rename(tmp_path / "cleaned by the system")
    with checked_out(clone, "v1"):
        pass
    assert snapshot(clone) == before  # With the entry of the worktree that is the user's own, though it is not there.
    assert list(temporary.iterdir()) == []


def refusal(folder: Path, revision: str) -> AutoaccumError:
    with pytest.raises(AutoaccumError) as told, checked_out(folder, revision):
        pass
    assert "\n" not in str(told.value)
    assert told.value.hint
    return told.value


def test_what_cannot_be_checked_out_is_told(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(clone)
    assert str(refusal(clone, "v9")) == (
        "there is no revision 'v9' (Needed a single revision): run `git fetch origin`, or name a commit, a branch or a"
        " tag"
    )
    for revision in ("-h", "--output=x", "", " ", "a\0b", "^HEAD", "^v1"):
        error = refusal(clone, revision)
        assert isinstance(error, UsageError)
        assert "is no revision: name a commit" in str(error)
    assert not (clone / "x").exists()
    for revision in ("v1..main", "HEAD:train.py", ":/nothing", "@{99}"):
        assert isinstance(refusal(clone, revision), NotMeasuredError)
    assert snapshot(clone) == before

    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{clone}", "shallow")
    assert "this clone has no history; run `git fetch --unshallow origin`" in str(
        refusal(tmp_path / "shallow", "HEAD~1")
    )
    git(clone, "branch", "dev")
    git(tmp_path, "clone", "-q", str(clone), "other")
    assert "did you mean origin/dev?" in str(refusal(tmp_path / "other", "dev"))
    git(tmp_path, "clone", "-q", "--bare", str(clone), "bare.git")
    assert "must be run in a work tree" in str(refusal(tmp_path / "bare.git", "v1"))
    (tmp_path / "plain").mkdir()
    assert "not a git repository" in str(refusal(tmp_path / "plain", "v1"))
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert "there is no revision 'HEAD'" in str(refusal(tmp_path / "empty", "HEAD"))

    (clone / "inside").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(clone / "inside"))
    assert "lies in the repository: set TMPDIR" in str(refusal(clone, "v1"))
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))
    assert "there is no git to check another revision out: install it" in str(refusal(clone, "v1"))


def test_a_workload_that_the_revision_has_not(clone: Path) -> None:
    with checked_out(clone, "v1") as checkout:
        for there in ("train.py", "train.py:tiny", "sub.model:tiny", "sub/model.py", "never.py", "torch.nn"):
            check_there(checkout, there, clone, "v1")
        with pytest.raises(NotMeasuredError, match=r"there is no sub/new.py in v1: name a revision that has it"):
            check_there(checkout, "sub.new:tiny", clone, "v1")
        with pytest.raises(NotMeasuredError, match=r"no untracked.py in v1, nor does git know it at all: commit it"):
            check_there(checkout, "untracked.py", clone, "v1")


def test_a_workload_that_is_a_link_back_to_the_users_folders(clone: Path, tmp_path: Path) -> None:
    (clone / "link.py").symlink_to(clone / "sub/model.py")
    (clone / "near.py").symlink_to("sub/model.py")
    (clone / "linked").symlink_to(clone / "sub")
    (clone / "far.py").symlink_to(tmp_path / "far.py")
    (tmp_path / "far.py").write_text("")
    git(clone, "add", ".")
    commit(clone, {}, "links")
    with checked_out(clone, "HEAD") as checkout:
        for there in ("near.py", "far.py"):
            check_there(checkout, there, clone, "HEAD")
        for link, target in (
            ("link.py", "sub/model.py"),
            ("link", "sub/model.py"),
            ("linked/model.py", "sub/model.py"),
            ("linked.model:tiny", "sub/model.py"),
        ):
            with pytest.raises(
                NotMeasuredError, match=rf"HEAD a symbolic link to {clone}/{target}, not.*: name {target} itself$"
            ):
                check_there(checkout, link, clone, "HEAD")
