"""What is asked of git: what a revision is, and worktrees that run nothing of the user's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autoaccum.errors import NotMeasuredError, UsageError

_ELSEWHERE = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
"""Where git looks for its files within a hook (`git rev-parse --local-env-vars`): not where a worktree's are."""

_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "submodule.recurse=false",
    "filter.lfs.smudge=",
    "filter.lfs.process=",
    "filter.lfs.required=false",
    "gc.auto=0",
    "maintenance.auto=false",
)
"""Nothing is run and nothing fetched: no hooks, no submodules, and of what Git LFS keeps its pointers."""


@dataclass(frozen=True)
class Repository:
    """A git repository that a folder lies in.

    Attributes:
        folder: The folder.
        top: Of the user's working tree.
        entries: Where git keeps an entry for each worktree, by the name of its folder.
    """

    folder: Path
    top: Path
    entries: Path

    @classmethod
    def of(cls, folder: Path) -> Repository:
        """The one that `folder` lies in.

        Raises:
            NotMeasuredError: There is none, it has no working tree, or there is no git.
        """
        done = _run(folder, "rev-parse", "--show-toplevel", "--git-common-dir")
        if done.returncode:
            said = _first_line(done)
            hint = "run it in a clone, or compare with a lock, without --baseline"
            if "dubious ownership" in said:
                hint = f"have git trust it: git config --global --add safe.directory {folder}"
            raise NotMeasuredError(f"git finds no files of a repository in {folder} ({said})", hint=hint)
        top, common = done.stdout.splitlines()[:2]
        return cls(folder.resolve(), Path(top).resolve(), (folder / common).resolve() / "worktrees")

    def find_commit(self, revision: str) -> str:
        """The commit that a revision is.

        Raises:
            UsageError: It can be none.
            NotMeasuredError: There is none of this name here.
        """
        unusable = UsageError(f"{revision!r} is no revision", hint="name a commit, a branch or a tag, such as HEAD~1")
        if not revision.strip() or revision.startswith("-") or "\0" in revision:
            raise unusable
        done = self._git("rev-parse", "--verify", f"{revision}^{{commit}}")
        if done.returncode:
            raise NotMeasuredError(f"there is no revision {revision!r} ({_first_line(done)})", hint=self._far(revision))
        commit = done.stdout.strip()
        if not re.fullmatch("[0-9a-f]+", commit):  # `^HEAD` is all that HEAD does not lead to.
            raise unusable
        return commit

    def is_tracked(self, path: str) -> bool:
        """Whether git knows a file, relative to `folder`."""
        return self._git("ls-files", "--error-unmatch", "--", path).returncode == 0

    def add_worktree(self, place: Path, commit: str) -> None:
        """Check a commit out into an empty folder, on no branch.

        Raises:
            NotMeasuredError: Git cannot.
        """
        done = self._git("worktree", "add", "--detach", "--quiet", str(place), commit)
        if done.returncode:
            raise NotMeasuredError(
                f"{commit[:12]} cannot be checked out ({_last_line(done)})", hint="see what `git worktree add` says"
            )

    def remove_worktree(self, place: Path) -> None:
        """Leave nothing of a worktree, however much of it there is."""
        self._git("worktree", "remove", "--force", "--force", str(place))  # Twice: even if it was still being made.
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(self.entries / place.name, ignore_errors=True)
        with suppress(OSError):
            self.entries.rmdir()  # As git does when the last one is gone.

    def worktrees(self, prefix: str) -> Iterator[Path]:
        """The folders of worktrees with names that start so; they need not be there any more."""
        for entry in sorted(self.entries.glob(f"{prefix}*")):
            with suppress(OSError, UnicodeDecodeError):
                yield Path((entry / "gitdir").read_text(encoding="utf-8").strip()).parent

    def _far(self, revision: str) -> str:
        """The way to a revision that is not here."""
        if self._git("rev-parse", "--verify", "--quiet", f"origin/{revision}^{{commit}}").returncode == 0:
            return f"did you mean origin/{revision}?"
        if self._git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
            return (
                "this clone has no history; run `git fetch --unshallow origin`, or give actions/checkout fetch-depth: 0"
            )
        return "run `git fetch origin`, or name a commit, a branch or a tag"

    def _git(self, *words: str) -> subprocess.CompletedProcess[str]:
        return _run(self.folder, *words)


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git, in a session of its own so that Ctrl-C ends it only through this process."""
    kept = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    own = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    try:
        process = subprocess.Popen(
            ["git", *settings, *words],
            cwd=folder,
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,
        )
    except FileNotFoundError:
        if not folder.is_dir():
            raise NotMeasuredError(f"there is no folder {folder}", hint="run it in a clone") from None
        raise NotMeasuredError(
            "there is no git to check another revision out",
            hint="install it, or compare with a lock, without --baseline",
        ) from None
    except OSError as error:
        raise NotMeasuredError(f"git cannot be run ({error.strerror})", hint="see whether `git version` runs") from None
    with process:
        try:
            said, complaint = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # With the filters that it has started.
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, complaint)


def _first_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["git says nothing"])[0].removeprefix("fatal: ")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["git says nothing"])[-1].removeprefix("fatal: ")
