"""Git repositories for tests, with none of the user's own settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SURROUNDINGS = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    **{f"GIT_{who}_NAME": "somebody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "somebody@example.org" for who in ("AUTHOR", "COMMITTER")},
}


def try_git(folder: Path, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run git in a folder."""
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env={**os.environ, **_SURROUNDINGS},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def git(folder: Path, *words: str, seconds: float = 60) -> str:
    """Return the output of a git command that must succeed."""
    done = try_git(folder, *words, seconds=seconds)
    assert done.returncode == 0, f"git {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str], message: str = "a change") -> str:
    """Write files into a repository, created if needed, commit them, and return the commit."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "-q")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        git(folder, "add", "--", name)
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")
