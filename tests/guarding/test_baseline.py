"""Another revision: it is checked out beside the user's work, measured by its own code, and gone afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from small_repository import commit, git

from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import PACKAGE_ROOT
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_run import guard
from autoaccum.guarding.project import checked_out

MODEL = """
import helper
from torch import nn, randn

def model():
    return nn.Linear(64, helper.WIDTH)

def batch(size):
    return randn(size, 64), randn(size, helper.WIDTH)

criterion = nn.MSELoss()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary folder, and none of the user's git settings."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name, value in (("GIT_CONFIG_GLOBAL", os.devnull), ("GIT_CONFIG_SYSTEM", os.devnull), ("TMPDIR", str(folder))):
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository in the middle of work: what is staged, changed and untracked, a submodule, and hooks."""
    folder = tmp_path / "clone"
    commit(tmp_path / "part", {"part.py": ""})
    commit(folder, {"train.py": "first = 1\n", "sub/model.py": "first = 1\n"}, "first")
    git(folder, "tag", "v1")
    git(folder, "submodule", "--quiet", "add", str(tmp_path / "part"), "part")
    commit(folder, {"train.py": "second = 2\n", "sub/new.py": ""}, "second")
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
    """A hash of everything in a folder, but for git's list of worktrees, which may be there and empty."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = b"" if path.is_dir() or path.is_symlink() else path.read_bytes()
        times = 0 if path.is_dir() else about.st_mtime_ns
        digest.update(repr((str(path), about.st_mode, times, content)).encode())
    return digest.hexdigest()


def test_a_revision_lies_outside_and_nothing_is_left_or_touched(
    clone: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(clone)
    monkeypatch.setenv("GIT_DIR", ".git")  # As within a hook.
    for revision in ("v1", "HEAD~1", "main"):
        with checked_out(clone / "sub", revision) as checkout:
            folder = Path(checkout.folder)
            assert (folder / "model.py").read_text() == "first = 1\n"
            assert (str(folder.parent), checkout.original) == (checkout.root, str(clone))
            assert not (folder.parent / "untracked.py").exists()
            assert folder.parent.parent == temporary
            (folder / "train.py").write_text("by whoever measures\n")
    for error in (ValueError(), KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises(type(error)), checked_out(clone, "v1"):
            raise error
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []
    assert not (clone.parent / "hooked").exists()


SCRIPT = """
import signal, sys, time
from pathlib import Path
from autoaccum.guarding.project import checked_out
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
with checked_out(Path(sys.argv[1]), "v1") as checkout:
    print(checkout.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left_by_a_process_that_is_terminated(clone: Path, temporary: Path, number: signal.Signals) -> None:
    before = snapshot(clone)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(clone)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip()).is_dir()
        process.send_signal(number)
        assert process.wait(120) in (128 + number, -number)
    assert snapshot(clone) == before
    assert list(temporary.iterdir()) == []


def test_what_cannot_be_checked_out_is_reported(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(folder: Path, revision: str, kind: type[Exception] = NotMeasuredError) -> str:
        with pytest.raises(kind) as told, checked_out(folder, revision):
            pass
        return str(told.value)

    before = snapshot(clone)
    assert "(Needed a single revision): name a commit, a branch or a tag; a shallow" in refusal(clone, "v9")
    for revision in ("-h", "--output=x", " ", "a\0b"):
        assert "is not a revision: name a commit" in refusal(clone, revision, UsageError)
    for revision in ("v1..main", "HEAD:train.py", "^HEAD"):
        refusal(clone, revision)
    assert snapshot(clone) == before
    (tmp_path / "plain").mkdir()
    assert "not a git repository" in refusal(tmp_path / "plain", "v1")
    (clone / "late").mkdir()
    assert "v1 has no folder late: name a revision" in refusal(clone / "late", "v1")
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))
    assert "git cannot be run (No such file or directory): install it" in refusal(clone, "v1")


def test_paths_lead_to_the_checkout_and_an_environments_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, other = tmp_path / "original", tmp_path / "other"
    inside = original / ".venv/lib/python3.11/site-packages"
    for folder in (inside, original / "src", other / "src", original / "only"):
        folder.mkdir(parents=True)
    entries = {
        str(original): str(other),
        str(original / "src"): str(other / "src"),
        **{
            same: same for same in (str(inside), str(original / "only"), "/usr/lib", "", "__editable__.x.__path_hook__")
        },
    }
    monkeypatch.setattr(sys, "path", list(entries))
    monkeypatch.setenv("PYTHONPATH", f"{original / 'src'}:/usr/lib")
    paths = ImportPaths.of(other, original=original, root=other)
    assert paths.sys_path == tuple(entries.values())
    assert paths.pythonpath == f"{other / 'src'}:/usr/lib"
    assert ImportPaths.of(original).sys_path == tuple(entries)


@pytest.mark.slow
def test_each_side_is_measured_by_its_own_code_and_never_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_children: None
) -> None:
    clone, case = tmp_path / "clone", make_case(workload="train.py", gpu="rtx3090", target_batch=8)
    commit(clone, {"train.py": MODEL, "src/helper.py": "WIDTH = 64\n"})
    (clone / "src/helper.py").write_text("WIDTH = 262144\n")
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(clone / "src")
    (found,) = guard([case], clone, baseline="HEAD").verdicts
    assert (found.outcome, found.before and found.before.update["parameters"]) == ("regressed", "4,160")
    commit(clone, {"train.py": f"import sys\nsys.path.insert(0, {str(clone / 'src')!r})\n{MODEL}"})
    (same,) = guard([case], clone, baseline="HEAD").verdicts
    assert (same.outcome, same.exit_code) == ("unmeasured", 3)
    assert f"{clone}/src/helper.py is loaded, and not from the revision that is to be measured" in str(same.reasons[0])
