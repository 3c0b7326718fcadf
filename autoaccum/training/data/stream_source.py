"""What can only be gone through as windows: its place is kept by its own state, or by what was read."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from autoaccum.accumulation.randomness import RandomState
from autoaccum.errors import UsageError
from autoaccum.training.checkpoints.contents import NotPortableError, portable
from autoaccum.training.data.counts import check_first_window
from autoaccum.training.data.reading import END, Reading
from autoaccum.training.data.window import Window
from autoaccum.workload import nests
from autoaccum.workload.batches import Batching


@dataclasses.dataclass(frozen=True)
class _Place:
    """Between two windows.

    Attributes:
        taken: Entries of the epoch that were read, the last one maybe in part.
        rest: What is left of that one.
        random: Where the random stream is.
        data: The data's own state; None where there is none to be kept.
        ended: Whether the epoch is over.
    """

    taken: int = 0
    rest: Any = None
    random: RandomState | None = None
    data: Any = None
    ended: bool = False


class StreamSource(abc.ABC):
    """Windows of an iterable; a `Source`.

    Args:
        reading: Goes through the data.
        target_batch: Samples of a window.
        unit: What the data yields, in words: `batches`.
        length: How many of them it has; None where it does not tell.
        samples_per_epoch: As in a `Source`.
        batching: How batches are counted and cut; None: by their rows.
    """

    def __init__(
        self,
        reading: Reading,
        *,
        target_batch: int,
        unit: str,
        length: int | None = None,
        samples_per_epoch: int | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.part_size, self.multiple_of = target_batch, 1
        self.interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.keeps_place = True
        self.samples_per_epoch = samples_per_epoch
        self._reading, self._target_batch, self._unit, self._length = reading, target_batch, unit, length
        self._batching = batching
        self._rest: Any = None
        self._epoch, self._is_restored, self._is_first = 0, False, True
        self._place = self._committed = _Place()

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {"kind": self._unit, "length": self._length, **self._reading.reads_by}

    @abc.abstractmethod
    def planning_batch(self, worst_of: int | None = None) -> Any:
        """What to plan with; it stays to be trained on."""

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that `restore` went to goes on where it was."""
        restored, self._is_restored = self._is_restored, False
        if restored and epoch == self._epoch:
            return
        if restored and not self._committed.ended:
            self._run_out()
        self._epoch, self._rest, self._is_first = epoch, None, True
        # What the data keeps from epoch to epoch, as an order it draws by itself, belongs to where this one begins.
        self._place = self._committed = _Place(data=self._data_state() if epoch > 0 else None)
        self._reading.begin(epoch, afresh=False)

    def start_workers(self) -> None:
        """Start those of this epoch, unless they run."""
        if not self._place.ended:
            self._reading.start_workers()

    def next_window(self) -> Window | None:
        """The next window; None when the epoch is over.

        Raises:
            UsageError: The epoch has fewer samples than a window, or what it yields is no batch.
            DataWorkerError: A worker died. What the data raises comes through.
        """
        if self._place.ended:
            return None
        with self._reading.running(), self.interruptible():
            window = self._fill()
        if self._is_first:
            check_first_window(window.samples, self._target_batch, self._reading.name, self._epoch)
        self._is_first = False
        is_committed = self._committed is self._place
        made = self._made(window) if window.samples else None
        reading = self._reading
        self._place = _Place(reading.taken, self._rest, reading.stream.place, self._data_state(), reading.is_at_end)
        if made is None and is_committed:
            self.commit()
        return made

    def commit(self) -> None:
        """Move behind the last window."""
        self._committed = self._place

    def state(self) -> dict[str, Any]:
        """The place as plain values; without the data's own state where that, or the rest of an entry, is none."""
        place = self._committed
        own = None if place.data is None else _kept({"data": place.data, "rest": _compact(place.rest)})
        return {
            "epoch": self._epoch,
            "taken": place.taken,
            "left": 0 if place.rest is None else self._size(place.rest),
            "ended": place.ended,
            "random": self._reading.stream.describe(place.random),
            "generators": self._reading.generator_states(ended=place.ended),
            "own": own,
        }

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Go to a place, by the data's own state or by reading forward; says which.

        Raises:
            UsageError: The data ends before it.
        """
        self._epoch, self._is_restored = state["epoch"], True
        self._is_first = state["taken"] == 0
        problems = self._reading.restore_generators(state["generators"])
        self._reading.begin(self._epoch)
        told = self._find(state)
        self._place = self._committed = _Place(
            state["taken"],
            self._rest,
            self._reading.stream.place,
            None if state["own"] is None else state["own"]["data"],
            state["ended"],
        )
        return "; ".join([*([told] if told else []), *problems]) or None

    def close(self) -> None:
        """End the workers."""
        self._reading.close()

    @abc.abstractmethod
    def _fill(self) -> Window:
        """Read up to a window, within the reading's random states."""

    def _made(self, window: Window) -> Window:
        """The window as it is given away, outside of them."""
        return window

    @abc.abstractmethod
    def _size(self, entry: Any) -> int:
        """The samples of what was read."""

    @abc.abstractmethod
    def _last_of(self, entry: Any, samples: int) -> Any:
        """The last `samples` of an entry; None for none."""

    def _data_state(self) -> Any:
        """The data's own state; None where nobody asks for it, it has none, or entries were looked at ahead of it."""
        keeps = self.keeps_place and self._reading.is_stateful and not self._reading.has_looked_ahead
        return self._reading.copied_state() if keeps else None

    def _find(self, state: Mapping[str, Any]) -> str | None:
        taken, own = state["taken"], state["own"]
        if own is not None and self._reading.is_stateful:
            may_be_at_end = state["ended"] or taken == 0
            self._reading.load_state(own["data"], taken, state["random"], may_be_at_end=may_be_at_end)
            self._rest = own["rest"]
            return "the data went on by its own state_dict"
        if taken == 0 or state["ended"]:
            return None
        self._read_forward(taken, state["left"])
        if self._length is not None:
            return None
        has = "its state_dict could not be kept" if self._reading.is_stateful else "the data has no state_dict"
        return f"{has}: {taken:,} {self._unit} were read forward"

    def _run_out(self) -> None:
        """Read what is left of an epoch, so that the data is where it would be."""
        with self._reading.running():
            while self._reading.take() is not END:
                pass

    def _read_forward(self, count: int, left: int) -> None:
        entry: Any = None
        with self._reading.running():
            for number in range(count):
                entry = self._reading.take()
                if entry is END:
                    raise UsageError(
                        f"{self._reading.name} ends after {number:,} {self._unit}, and the run had read {count:,}",
                        hint="give the data it began with, or another run folder",
                    )
        self._rest = self._last_of(entry, left) if left else None


def _compact(node: Any) -> Any:
    """A nest whose tensors are no views of larger ones, which would be saved whole."""
    if isinstance(node, Tensor):
        return node.detach().clone()
    children = nests.children(node)
    return nests.rebuild(node, [_compact(child) for _, child in children]) if children else node


def _kept(own: Any) -> Any:
    """As a checkpoint can hold it; None where it cannot, and the place is found by reading forward."""
    try:
        return portable(own)
    except NotPortableError:
        return None
