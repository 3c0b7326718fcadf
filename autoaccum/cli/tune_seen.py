"""What was heard of a study, for where it ends early."""

from __future__ import annotations

from typing import Any

from autoaccum.tuning.events import StudyOpened, ThroughputKnown, TrialEnded


class Seen:
    """What was heard of a study, for where it ends early."""

    def __init__(self) -> None:
        self._opened: StudyOpened | None = None
        self._finished = 0
        self._is_kept = False

    def hear(self, event: Any) -> None:
        """Take an event in."""
        if isinstance(event, StudyOpened):
            self._opened, self._finished = event, event.finished
        elif isinstance(event, TrialEnded) and event.row.confirms is None:
            self._finished += 1
        # A study is made when all is known that its trials need.
        self._is_kept = self._is_kept or self._finished > 0 or isinstance(event, ThroughputKnown)

    def tell_kept(self) -> None:
        """One line on stderr above an error: what is not lost."""
        opened = self._opened
        if opened is not None and self._finished:
            are = "trial is" if opened.trials == 1 else "trials are"
            say(f"note: {self._finished} of {opened.trials} {are} kept in {opened.storage}")

    def tell_end(self, how: str) -> None:
        """One line on stderr: what is kept, and how to go on."""
        from autoaccum.reporting.tune_words import counted

        text = f"{how} before the first trial: the same command begins again"
        if self._opened is not None and self._is_kept:
            done = f"after {self._finished} of {counted(self._opened.trials, 'trial')}"
            text = f"{how} {done}: the study is in {self._opened.storage}; the same command goes on"
        say(text)


def say(text: str) -> None:
    """One line on stderr, in silence, too."""
    from autoaccum.reporting.consoles import make_console

    make_console(stderr=True).print(text, soft_wrap=True)
