"""An iterable, read one entry at a time under random states of its own; what was looked at ahead is put back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Final

from torch.utils.data import DataLoader

from autoaccum.accumulation.randomness import Generator
from autoaccum.training.data.ends import check_end
from autoaccum.training.data.fetching import set_epoch
from autoaccum.training.data.sampler_generators import capture_generators, loader_generators, restore_generators
from autoaccum.training.data.worker_failures import explain_worker_failure
from autoaccum.training.data.workers import end_workers, started, workers_of
from autoaccum.training.seeds import RandomStream, mix

END: Final = object()
"""What is read behind the last entry."""


class Reading:
    """Goes through an iterable, epoch by epoch.

    Attributes:
        name: What the data is, for messages.
        is_stateful: Whether the data can tell its place and go to it.
        stream: The random states it is read under, of run and epoch.
        taken: Entries of this epoch that were taken.
        is_at_end: Whether its end was read.

    Args:
        data: What the user gave.
        name: As the attribute.
        seed: Of the run.
        lists: From an epoch to what yields the data's entries in lists, where `data` is not iterated itself.
    """

    def __init__(self, data: Any, name: str, seed: int, lists: Callable[[int], DataLoader[Any]] | None = None) -> None:
        self.name = name
        self.is_stateful = lists is None and _has_state(data)
        self.taken, self.is_at_end = 0, False
        self.stream = RandomStream(0)
        self._data, self._seed, self._lists = data, seed, lists
        self._generators: dict[str, Generator] = loader_generators(data) if isinstance(data, DataLoader) else {}
        self._began_with: dict[str, Any] | None = None
        self._epoch = 0
        self._source: Iterator[Any] | None = None
        self._entries: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        self._unread_state: Any = None
        self._may_reopen = False
        self.begin(0)

    @property
    def reads_by(self) -> dict[str, Any]:
        """What else decides which entry comes when: the settings of a loader, as plain values."""
        loader = self._data if self._lists is None else self._lists(0)
        if not isinstance(loader, DataLoader):
            return {}
        return {"batch_size": loader.batch_size, "workers": loader.num_workers}

    @property
    def has_looked_ahead(self) -> bool:
        """Whether entries wait that were looked at and put back."""
        return bool(self._ahead)

    def running(self) -> AbstractContextManager[None]:
        """Swap its random states in: all that reads goes in here. It takes 0.2 ms, and a list draws nothing."""
        return nullcontext() if type(self._data) in (list, tuple) else self.stream.running()

    def begin(self, epoch: int, *, afresh: bool = True) -> None:
        """Go to the beginning of an epoch.

        Args:
            epoch: Counted from 0.
            afresh: False: what was only looked at so far stays to be taken; so it does where it could not be had again.
        """
        was_looked_at = self._entries is not None and self.taken == 0 and epoch == self._epoch
        if was_looked_at and (not afresh or self._entries is self._data):
            return
        self.close()
        self._ahead.clear()
        if self._unread_state is not None:
            self._data.load_state_dict(self._unread_state)
            self._unread_state = None
        self._epoch, self.taken, self.is_at_end, self._began_with = epoch, 0, False, None
        self.stream = RandomStream(mix(self._seed, "stream", epoch))

    def start_workers(self) -> None:
        """Start those of a loader, unless they run; what keeps its own place is opened when it is read."""
        if self._entries is not None or self.is_stateful:
            return
        loader = self._data if self._lists is None else self._lists(self._epoch)
        if isinstance(loader, DataLoader) and loader.num_workers > 0 and type(loader).__iter__ is DataLoader.__iter__:
            with self.running():
                self._entries = self._open()

    def take(self) -> Any:
        """The next entry, or END.

        Raises:
            DataWorkerError: A worker died. What the data raises comes through.
        """
        self._unread_state = None
        entry = self._ahead.popleft() if self._ahead else self._next()
        self.is_at_end = entry is END
        self.taken += not self.is_at_end
        return entry

    def look_ahead(self, count: int) -> list[Any]:
        """The next entries, which stay to be taken."""
        if self.is_stateful and self._entries is None:
            self._unread_state = self.copied_state()
        with self.running():
            while len(self._ahead) < count and (not self._ahead or self._ahead[-1] is not END):
                self._ahead.append(self._next())
        return [entry for entry in self._ahead if entry is not END][:count]

    def copied_state(self) -> Any:
        """The data's own state; later reading does not change it."""
        return copy.deepcopy(self._data.state_dict())

    def load_state(self, state: Any, taken: int, random: Mapping[str, Any] | None, *, may_be_at_end: bool) -> None:
        """Have the data go on from a state of its own.

        Args:
            state: That state.
            taken: Entries of the epoch that were taken.
            random: Where its random stream was, as `RandomStream.describe` gave it.
            may_be_at_end: Whether a new epoch may begin from there.
        """
        self.close()
        self._ahead.clear()
        self._data.load_state_dict(state)
        self.taken, self._may_reopen = taken, may_be_at_end
        if not may_be_at_end:
            # Some go forward when they are iterated again, and draw what was drawn before.
            with self.running():
                self._entries = self._open()
        self.stream.restore(random)

    def generator_states(self, *, ended: bool) -> dict[str, Any]:
        """Of the generators of the user's own that a DataLoader draws from: as the epoch began, or ended."""
        if ended or self._began_with is None:
            return capture_generators(self._generators)
        return self._began_with

    def restore_generators(self, states: dict[str, Any]) -> list[str]:
        """Put them there; what could not be, as sentences."""
        return restore_generators(states, self._generators)

    def close(self) -> None:
        """End the processes it started; those of a loader that keeps its own stay."""
        source, self._source, self._entries = self._source, None, None
        if not getattr(source, "_persistent_workers", False):
            end_workers(source)

    def _next(self) -> Any:
        entry = self._read()
        may_reopen, self._may_reopen = self._may_reopen, False
        if entry is END and may_reopen:
            # A state from the end of an epoch: some iterate from there once, and start anew after.
            self.close()
            self.stream.rewind()
            entry = self._read()
        return entry

    def _read(self) -> Any:
        try:
            if self._entries is None:
                self._entries = self._open()
            return next(self._entries)
        except StopIteration as error:
            check_end(error, self._data)
            return END
        except (RuntimeError, OSError, EOFError) as error:
            explained = explain_worker_failure(error, workers_of(self._source))
            if explained is None:
                raise
            raise explained from error

    def _open(self) -> Iterator[Any]:
        self._began_with = capture_generators(self._generators)
        _tell_epoch(self._data, self._epoch)
        self._source = started(self._data if self._lists is None else self._lists(self._epoch))
        return self._source if self._lists is None else chain.from_iterable(self._source)


def _has_state(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _tell_epoch(data: Any, epoch: int) -> None:
    """Tell the data its epoch, where it wants to know; of a DataLoader, its dataset and its samplers."""
    inner = (data.dataset, data.sampler, data.batch_sampler) if isinstance(data, DataLoader) else ()
    for thing in (data, *inner):
        set_epoch(thing, epoch)
