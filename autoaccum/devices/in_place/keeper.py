"""Runs something with all live state set aside, and puts it back whatever happens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from autoaccum.accumulation.changes import listed_names
from autoaccum.accumulation.recovery import release_memory
from autoaccum.devices.in_place.live_state import LiveState
from autoaccum.devices.in_place.subjects import Tried
from autoaccum.devices.in_place.verdicts import not_restored
from autoaccum.devices.interruptions import Interruptions
from autoaccum.errors import NotMeasuredError

T = TypeVar("T")


class StateKeeper:
    """Keeps the state of what is tried; `at_once` see `Interruptions`.

    Attributes:
        warnings: Sentences on Python attributes that trials change.
    """

    def __init__(self, tried: Tried, *, at_once: bool = False) -> None:
        self._tried, self._at_once = tried, at_once
        self.warnings: list[str] = []

    def run(self, job: Callable[[Interruptions], T]) -> T:
        """Run `job`, put everything back, and compare by hash; then return what it returned, or raise what it raised.

        Raises:
            NotMeasuredError: Something could not be put back; where an interruption ended `job`, that is a warning.
        """
        with Interruptions(at_once=self._at_once) as interruptions:
            state = LiveState(self._tried.roots, self._tried.optimizer, self._tried.generators)
            failure: BaseException | None = None
            try:
                result = job(interruptions)
            except BaseException as error:
                failure = error
            try:
                problem = self._put_back(state)
                if problem is not None and (failure is None or isinstance(failure, Exception)):
                    raise problem from failure
                if problem is not None:
                    warnings.warn(str(problem), RuntimeWarning, stacklevel=2)
                if failure is not None:
                    raise failure
            finally:
                del failure  # the traceback holds this frame
            return result

    def _put_back(self, state: LiveState) -> NotMeasuredError | None:
        try:
            release_memory(self._tried.device)  # Raises where a card's context is dead.
            kept = state.changed_attributes()
            state.restore()
            changed = state.differences()
        except Exception as error:
            return not_restored(error)
        if kept:
            told = (
                f"a trial changes what the model keeps in Python ({listed_names(kept)}), which no rollback covers: keep"
                " state in buffers (register_buffer)"
            )
            self.warnings = [*self.warnings, *([] if told in self.warnings else [told])]
        return not_restored(changed) if changed else None
