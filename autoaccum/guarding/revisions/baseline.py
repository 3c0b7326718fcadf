"""Another revision of the user's repository, checked out beside it for as long as it is measured."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autoaccum.devices.checkout import Checkout, is_original
from autoaccum.devices.interruptions import Interruptions
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.revisions.repository import Repository
from autoaccum.workload.references import split_reference

_PREFIX = "autoaccum-baseline-"


@contextmanager
def checked_out(folder: Path, revision: str) -> Iterator[Checkout]:
    """Within, `revision` lies in a temporary worktree outside of the repository, with `folder`'s place in it.

    Nothing is left of it afterwards, however it ends; what a run left behind that was killed, the next one removes. The
    user's files, index, HEAD and hooks are not touched. Submodules are not checked out.

    Args:
        folder: The project's, in a git repository.
        revision: Whatever git knows a commit by.

    Raises:
        UsageError: It can be no revision.
        NotMeasuredError: It cannot be checked out: there is no git, no repository, no such revision or folder in it.
    """
    repository = Repository.of(folder)
    commit = repository.find_commit(revision)
    _remove_stale(repository)
    place = _make_place(repository)
    held = _hold(place)
    try:
        repository.add_worktree(place, commit)
        inside = place / repository.folder.relative_to(repository.top)
        if not inside.is_dir():
            raise NotMeasuredError(
                f"{revision} has no folder {inside.relative_to(place)}", hint="name a revision that has the project"
            )
        yield Checkout(inside, original=repository.top, top=place)
    finally:
        with Interruptions():
            repository.remove_worktree(place)
            if held is not None:
                os.close(held)


def check_there(checkout: Checkout, workload: str, folder: Path, revision: str) -> None:
    """See whether a workload of the project in `folder` is in the revision that is checked out, too.

    Raises:
        NotMeasuredError: It is not, or only a link that leads back into the user's folders.
    """
    target, _, _ = split_reference(workload)
    module = target.replace(".", "/")
    files = [target] if target.endswith(".py") or "/" in target else [f"{module}.py", f"{module}/__init__.py"]
    for file in files:
        place = (checkout.folder / file).resolve()
        if checkout.original is not None and is_original(str(place), str(checkout.original), str(checkout.root)):
            raise NotMeasuredError(
                f"{file} is in {revision} a symbolic link to {place}, not to a file of that revision",
                hint=f"name {os.path.relpath(place, folder.resolve())} itself",
            )
    here = [file for file in files if (folder / file).exists()]
    if not here or any((checkout.folder / file).exists() for file in files):
        return
    if Repository.of(folder).is_tracked(here[0]):
        hint = "name a revision that has it; until then `autoaccum guard --update` locks it"
        raise NotMeasuredError(f"there is no {here[0]} in {revision}", hint=hint)
    raise NotMeasuredError(
        f"there is no {here[0]} in {revision}, nor does git know it at all",
        hint="commit it: there is nothing to compare it with",
    )


def _make_place(repository: Repository) -> Path:
    """An empty folder outside of the repository, so that nothing of the user's takes it for its own."""
    above = Path(tempfile.gettempdir()).resolve()
    if above.is_relative_to(repository.top):
        raise NotMeasuredError(
            f"temporary files go to {above}, which lies in the repository", hint="set TMPDIR to a folder outside of it"
        )
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))


def _hold(place: Path) -> int | None:
    """A lock on a folder that ends with this process, or None where another one has it."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_stale(repository: Repository) -> None:
    """Remove what processes left behind that are no more."""
    for place in repository.worktrees(_PREFIX):
        held = None
        with suppress(OSError):
            if place.exists() and (held := _hold(place)) is None:
                continue
            repository.remove_worktree(place)
        if held is not None:
            os.close(held)
