"""Other Python threads of this process, which would share a limit on its memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from autoaccum.errors import UsageError

_SHOWN = 4
_TQDM = "TMonitor"


def check_single_thread() -> None:
    """Refuse to limit this process's memory while other Python threads run in it: they would run out of it, too.

    Threads of torch's own, of OpenMP and the like do not count: what they do is part of the trial.

    Raises:
        UsageError: There are some; they are named.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread() and _runs(thread)]
    if not others:
        return
    named = ", ".join(f"{thread.name} ({type(thread).__name__})" for thread in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    way = "end them first"
    if any(type(thread).__name__ == _TQDM for thread in others):
        way = "set tqdm.tqdm.monitor_interval = 0 before the first bar"
    raise UsageError(
        f"other Python threads run in this process and would share a trial's limit on memory: {named}{more}",
        hint=f"{way}, or plan through a file, whose trials have processes of their own: autoaccum plan model.py",
    )


def _runs(thread: threading.Thread) -> bool:
    """Whether the kernel still knows `thread`; Python keeps foreign ones that have ended ("Dummy-1")."""
    number = thread.native_id
    return thread.is_alive() and (number is None or Path(f"/proc/{os.getpid()}/task/{number}").exists())
