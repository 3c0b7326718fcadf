"""Where a workload's own words go while a command runs it in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress


@contextmanager
def stdout_kept() -> Iterator[None]:
    """What the workload prints, by whatever means, goes to stderr: stdout is for what the command came to."""
    kept = os.dup(1)
    try:
        _flush_stdout()
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush_stdout()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_stdout() -> None:
    with suppress(OSError, ValueError, AttributeError):  # Closed, full, or never there.
        sys.stdout.flush()
