"""The ranks that share each update: what they tell each other, and how all learn that one has failed.

Ranks talk over a gloo group of their own, beside the group of the gradients, so that a rank can tell of an error while
nobody waits in a collective on a card. They do so at the same few points of every update; a rank that fails tells the
others at the next of them, in place of what they expect. All then know the same failures and decide alike.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.step_result import StepPhase
from autoaccum.checks import join_words
from autoaccum.errors import RankFailedError, RankLostError, UsageError, first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")

_ROW_BYTES = 2048
"""The bytes of a message for which one collective is enough; a longer one takes a second."""

_GRACE_SECONDS, _PATIENCE_SECONDS = 3.0, 20.0
"""How long ranks that see an exchange fail wait for the others to see it, to tell who is gone: at least, and while
several are missing, of which some may be busy."""

_LONGEST_NAP_SECONDS = 0.05


@dataclass(frozen=True)
class RankFailure:
    """An error that ended a rank's part of an update, as the other ranks are told of it.

    Attributes:
        rank: The rank that failed.
        text: The error in words.
        phase: The phase of the step in which it did.
        largest: The samples (or tokens) of its largest micro-batch; by tokens, of several samples.
        out_of_memory: Whether memory ran out: `certain`, `uncertain` (bugs can cause that error, too) or None.
        unchanged: Whether its batch is as it was before, so that it can be repeated.
        needs_whole_batch: It is no error: parts need each other, and all ranks are to repeat them in lock step.
    """

    rank: int
    text: str
    phase: StepPhase = "batch"
    largest: int = 0
    out_of_memory: Literal["certain", "uncertain"] | None = None
    unchanged: bool = True
    needs_whole_batch: bool = False

    def as_error(self) -> RankFailedError:
        """Return the error that other ranks raise."""
        text = f"rank {self.rank} failed: {self.text}"
        return RankFailedError(text, hint="its own output says more; nothing was changed here")


class OtherRanksFailed(Exception):
    """Raised where other ranks tell of their failures; this rank is not to tell of it again."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(f"rank {failures[0].rank} failed: {failures[0].text}")
        self.failures = tuple(failures)


class Ranks:
    """The ranks of a process group, or this process alone.

    Every rank makes it, since it makes a group of its own.

    Attributes:
        rank: The number of this rank, from 0.
        size: The number of ranks.
        group: The group over which gradients are summed; None for one rank.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = 0, 1
        if group is None:
            return
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        try:
            self._control = interruptibly(lambda: dist.new_group(members, timeout=_timeout(group), backend="gloo"))
        except (RuntimeError, dist.DistError) as error:
            raise RankLostError(
                f"a rank of {self.size} ended or did not come", hint=f"look at its output ({first_line(error)[:200]})"
            ) from error
        self._store = PrefixStore("autoaccum", self._control.get_group_store())

    def group_for(self, tensor: Tensor) -> ProcessGroup | None:
        """Return the group for collectives of tensors like `tensor`."""
        return self._control if tensor.device.type == "cpu" else self.group

    def gather(self, value: _T) -> list[_T]:
        """Return the values that the ranks give, in their order; each calls this at the same point.

        Raises:
            OtherRanksFailed: Ranks told of failures instead.
            RankLostError: A rank has ended, or did not call this in time.
        """
        if self.size == 1:
            return [value]
        values = self._exchange(value)
        if failures := [value for value in values if isinstance(value, RankFailure)]:
            raise OtherRanksFailed(failures)
        return values

    def report_failure(self, failure: RankFailure) -> tuple[RankFailure, ...]:
        """Report this rank's failure to the others, in place of what they expect; return the failures of all."""
        if self.size == 1:
            return (failure,)
        return tuple(answer for answer in self._exchange(failure) if isinstance(answer, RankFailure))

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place; raise RankLostError if one has ended or does not answer."""
        import torch.distributed as dist

        with self._all_answering():
            dist.all_reduce(tensor, group=self.group_for(tensor))

    def copy_first(self, row: Tensor) -> None:
        """Copy a tensor of rank 0, whose values lie in a row, into those of the others; raise as `add_up`."""
        import torch.distributed as dist

        with self._all_answering():
            dist.broadcast(row, group=self.group_for(row), group_src=0)

    def store_failure(self, failure: RankFailure) -> tuple[RankFailure, ...]:
        """Store this rank's failure where ranks that wait for it in a collective find it, without waiting for them."""
        if self.size > 1:
            with suppress(RuntimeError):  # The store was rank 0's, and is gone with it.
                if not self._store.check([f"failed/{self.rank}"]):  # What ended the run came first.
                    self._store.set(f"failed/{self.rank}", pickle.dumps(failure).hex())
        return (failure,)

    def explain(self, error: Exception) -> OtherRanksFailed | RankLostError:
        """Return why the collective of this rank failed with `error`: what other ranks stored, or who is gone."""
        with suppress(RuntimeError):
            names = [f"failed/{rank}" for rank in range(self.size)]
            texts = [self._store.get(name).decode() for name in names if self._store.check([name])]
            if texts:
                return OtherRanksFailed([pickle.loads(bytes.fromhex(text)) for text in texts])
        return self._lost_error(error)

    def leave(self) -> None:
        """Let go of the groups: one that is destroyed as Python ends, held by a traceback, aborts the process."""
        global _ranks
        self.group = _ranks = None
        self.__dict__.pop("_control", None)
        self.__dict__.pop("_store", None)

    @contextmanager
    def _all_answering(self) -> Iterator[None]:
        """Raise what `explain` returns for a collective that fails in here."""
        import torch.distributed as dist

        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise self.explain(error) from error

    def _exchange(self, value: Any) -> list[Any]:
        stream = io.BytesIO()
        TensorPickler(stream, 5).dump(value)
        data = stream.getbuffer()
        header = len(data).to_bytes(8, "little")
        row = _filled(_ROW_BYTES, header, data[: _ROW_BYTES - len(header)])
        with self._all_answering():
            rows = self._gather_rows(row)
            lengths = [int.from_bytes(line[:8].numpy().tobytes(), "little") for line in rows]
            if (longest := max(lengths)) > _ROW_BYTES - len(header):
                rows = self._gather_rows(_filled(longest, data))
            else:
                rows = rows[:, len(header) :]
        return [pickle.loads(row.numpy()[:length]) for row, length in zip(rows, lengths, strict=True)]

    def _gather_rows(self, row: Tensor) -> Tensor:
        import torch.distributed as dist

        rows, began = row.new_empty(self.size, len(row)), time.monotonic()
        work: Any = dist.all_gather(list(rows.unbind()), row, group=self._control, async_op=True)
        try:
            while not work.is_completed():  # Signals are handled between two naps, and not within `wait`.
                time.sleep(min(_LONGEST_NAP_SECONDS, (time.monotonic() - began) / 10))
        except BaseException:  # Destroyed, the group would wait for this work to end: it is kept for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._control))
            raise
        work.wait()
        return rows

    def _lost_error(self, error: Exception) -> RankLostError:
        """Return the error that names the ranks that do not take part any more."""
        missing = None
        try:
            self._store.set(f"here/{self.rank}", "")
            began, waited = time.monotonic(), 0.0
            while missing is None or waited < _GRACE_SECONDS or (missing[1:] and waited < _PATIENCE_SECONDS):
                time.sleep(0.5)
                missing = [str(rank) for rank in range(self.size) if not self._store.check([f"here/{rank}"])]
                waited = time.monotonic() - began
        except RuntimeError:  # The store was rank 0's, and is gone with it.
            pass
        several = "s" if missing and missing[1:] else ""
        who = f"rank{several} {join_words(missing)}" if missing else "a rank"
        return RankLostError(
            f"{who} of {self.size} ended or no longer answer{'' if several else 's'}",
            hint=f"look at its output; nothing was changed here since the last update ({first_line(error)[:200]})",
        )


def interruptibly(meet: Callable[[], _T]) -> _T:
    """Return what `meet` returns, called in a thread: PyTorch's waits for other ranks let no signal be handled."""
    with ThreadPool(1) as pool:  # Of a daemon, which does not keep Python from ending.
        met = pool.apply_async(meet)
        while not met.ready():  # One wait without end would sleep through a signal that arrives as it begins.
            met.wait(_LONGEST_NAP_SECONDS)
        return met.get()


class TensorPickler(pickle.Pickler):
    """Pickles tensors of any device for the host, without what else their storages hold.

    Dense ones by their bytes, in a fraction of the time that their own way takes.
    """

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild `value` if it is a tensor."""
        if not isinstance(value, Tensor):
            return NotImplemented
        value = value.detach().cpu()
        if type(value) is not Tensor or value.layout is not torch.strided:
            return value.__reduce_ex__(5)
        plain = value.resolve_conj().resolve_neg().contiguous()
        return _rebuilt, (plain.flatten().view(torch.uint8).numpy(), plain.dtype, plain.shape)


def _rebuilt(data: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _filled(size: int, *contents: bytes | memoryview) -> Tensor:
    """Return a row of `size` bytes that begins with `contents`."""
    row, start = torch.empty(size, dtype=torch.uint8, device="cpu"), 0
    for content in contents:
        row.numpy()[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
        start += len(content)
    return row


def check_alike(facts: Sequence[Mapping[str, object]]) -> None:
    """Raise UsageError if the ranks, each of which gives `facts` by name, differ in one.

    >>> check_alike([{"micro_batch": 2}, {"micro_batch": 3}])
    Traceback (most recent call last):
    autoaccum.errors.UsageError: micro_batch differs between ranks: (2, 3): set the same on all
    """
    for name in facts[0]:
        values = tuple(of_rank[name] for of_rank in facts)
        if any(value != values[0] for value in values):
            raise UsageError(f"{name} differs between ranks: {values}", hint="set the same on all")


_ranks: tuple[object, Ranks] | None = None


def join_ranks() -> Ranks:
    """Return the ranks of the default process group, or this process alone if there is none or it has one rank.

    All Accumulators of a process share them.
    """
    global _ranks
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or dist.get_world_size(group) == 1:
        return ONE_RANK
    if _ranks is None or _ranks[0] is not group:
        _ranks = group, Ranks(group)
    return _ranks[1]


def replace_ranks(ranks: Ranks) -> None:
    """Let `join_ranks` return `ranks` as those of the default process group, as a simulation of it needs."""
    global _ranks
    _ranks = ranks.group, ranks


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _timeout(group: ProcessGroup) -> Any:
    """Return the time after which `group`, as the user made it, gives up."""
    import torch.distributed as dist

    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)


ONE_RANK = Ranks()
"""This process alone."""
