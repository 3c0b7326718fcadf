"""Signs of life: a worker gives them while it trains, and others see when they stop.

Optuna has a heartbeat of its own for databases, and none for journals. This one is of user attributes, which every
storage has; and nobody's clock is compared with another's: a worker is lost when another one has watched for three of
its heartbeats and seen nothing new.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from autoaccum.tuning.studies.attributes import value_of
from autoaccum.tuning.studies.workers import Worker

BEATS = "beats"
_MISSED = 3


class Heartbeat:
    """Within it, a thread says every `seconds` that the trial is still being run.

    Args:
        storage: Where.
        trial_id: The trial, by Optuna's id.
        seconds: Between two beats.
    """

    def __init__(self, storage: BaseStorage, trial_id: int, seconds: float) -> None:
        self._storage = storage
        self._trial_id = trial_id
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="autoaccum heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(self._seconds):
            beats += 1
            try:
                self._storage.set_trial_user_attr(self._trial_id, BEATS, beats)
            except UpdateFinishedTrialError:
                return
            except Exception:  # A storage out of reach may be back at the next beat; the training goes on meanwhile.
                continue
            finally:
                with suppress(Exception):
                    self._storage.remove_session()


class Watch:
    """Which running trials have nobody who runs them any more.

    Args:
        heartbeat: What is taken for a trial's heartbeat where it does not tell, in seconds.
        clock: Seconds that only go forward.
    """

    def __init__(self, heartbeat: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self._seen: dict[int, tuple[object, float]] = {}

    def lost(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """Those of them whose worker is gone from this machine, or has shown no sign of life for long enough."""
        return [trial for trial in trials if trial.state == TrialState.RUNNING and self._is_lost(trial)]

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = Worker.read(trial.user_attrs.get("process"))
        if worker is not None and worker.is_gone():
            return True
        now = self._clock()
        sign = (len(trial.user_attrs), trial.user_attrs.get(BEATS), len(trial.intermediate_values), len(trial.params))
        before, since = self._seen.get(trial.number, (None, now))
        if before != sign:
            self._seen[trial.number] = (sign, now)
            return False
        return now - since > _MISSED * (value_of(trial, "heartbeat", float) or self._heartbeat)
