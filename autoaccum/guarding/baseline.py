"""Check out another revision of the user's repository in a temporary git worktree, to measure it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoaccum.devices.child.import_paths import Checkout
from autoaccum.devices.delayed_signals import DelayedSignals
from autoaccum.errors import NotMeasuredError, UsageError

_PREFIX = "autoaccum-baseline-"

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""Variables that git sets within a hook, which would lead away from the worktree's files."""

_SETTINGS = ("core.hooksPath=/dev/null", "submodule.recurse=false", "gc.auto=0")


@contextmanager
def checked_out(folder: Path, revision: str) -> Iterator[Checkout]:
    """Check out `revision` in a temporary worktree outside the repository, and yield the same `folder` in it.

    The worktree is removed afterwards; if this process is killed, `git worktree prune` removes it. The user's files,
    index, HEAD and hooks are not touched. Neither submodules nor large files (Git LFS) are fetched.

    Raises:
        UsageError: `revision` cannot be the name of a revision.
        NotMeasuredError: It cannot be checked out: there is no git, no repository, no such revision or folder in it.
    """
    if not revision.strip() or revision.startswith("-") or "\0" in revision:
        raise UsageError(f"{revision!r} is not a revision", hint="name a commit, a branch or a tag, such as HEAD~1")
    top = Path(_git(folder, "rev-parse", "--show-toplevel", hint="run it in a clone, or compare with a lock")).resolve()
    commit = _git(
        folder,
        *("rev-parse", "--verify", f"{revision}^{{commit}}"),
        hint="name a commit, a branch or a tag; a shallow clone needs `git fetch --unshallow`, or fetch-depth: 0 of"
        " actions/checkout",
    )
    worktree = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    try:
        _git(folder, "worktree", "add", "--detach", "--quiet", str(worktree), commit, hint="try `git worktree add`")
        inside = worktree / folder.resolve().relative_to(top)
        if not inside.is_dir():
            raise NotMeasuredError(
                f"{revision} has no folder {inside.relative_to(worktree)}", hint="name a revision that has the project"
            )
        yield Checkout(inside, original=top, root=worktree)
    finally:
        with DelayedSignals():
            _run(folder, "worktree", "remove", "--force", "--force", str(worktree))  # Twice: even if incomplete.
            shutil.rmtree(worktree, ignore_errors=True)


def _git(folder: Path, *words: str, hint: str) -> str:
    """Return the output of a git command in a folder; raise NotMeasuredError if it cannot be run, or fails."""
    done = _run(folder, *words)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("fatal: ")
        raise NotMeasuredError(f"git cannot find or check out the revision ({reason})", hint=hint)
    return done.stdout.strip()


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in its own session, so that Ctrl-C reaches only this process."""
    kept = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    try:
        return subprocess.run(
            ["git", *settings, *words],
            cwd=folder,
            env={**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise NotMeasuredError(
            f"git cannot be run ({error.strerror})", hint="install it, or compare with a lock, without --baseline"
        ) from None
