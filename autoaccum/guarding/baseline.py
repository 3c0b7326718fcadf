"""Another revision of the user's repository, checked out beside it for as long as it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoaccum.devices.checkout import Checkout


@contextmanager
def checked_out(folder: Path, revision: str) -> Iterator[Checkout]:
    """Within, `revision` lies in a temporary worktree outside of the repository, with `folder`'s place in it.

    Nothing is left of it afterwards, however it ends. The user's files, index, HEAD and hooks are not touched.

    Args:
        folder: The project's, in a git repository.
        revision: Whatever git knows a commit by.

    Raises:
        UsageError: It is no revision.
        NotMeasuredError: It cannot be checked out: there is no git, no repository, no such revision or folder in it.
    """
    raise NotImplementedError
    yield


def check_there(checkout: Checkout, workload: str, folder: Path, revision: str) -> None:
    """See whether a workload of the project in `folder` is in the revision that is checked out, too.

    Raises:
        NotMeasuredError: It is not.
    """
    raise NotImplementedError
