"""Record the random numbers of an accumulated run, and replay them in other runs of the same batch.

A full batch and its parts draw different dropout masks from one seed, and so can only be compared under the same random
numbers. Those of the parts are recorded, joined along the samples, and replayed in the full run.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.random_ops import CallSite, RandomCall, RandomCallMode, unfused_kernels
from autoaccum.accumulation.rng_state import Generator, generator_state, has_readable_state, set_generator_state


class HostRngReplay:
    """Sets the generators of Python and NumPy to where each part begins.

    By default every part begins where the first one began, and so draws the same numbers. That is right for numbers
    that are drawn once per forward and serve all samples. If `sequential`, each part begins where the one before ended.
    That is right for numbers that are drawn for each sample, since the whole batch then draws the same ones.

    `generators` are added to the global ones. PyTorch's among them are left out, since `RngRecording` replays those.

    Parts may take turns, as they do in lock step: each goes on with its own states, or where the one before stopped.

    Attributes:
        ends: The states at the end of each part, by its index. Equal ends of parts that began alike mean equal numbers.
    """

    def __init__(self, generators: Iterable[Generator] = (), *, sequential: bool = False) -> None:
        self._generators, self._sequential = host_generators(generators), sequential
        self._starts: dict[int, list[Any]] = {}
        self._stopped: dict[int, list[Any]] = {}
        self.ends: dict[int, bytes] = {}
        self._part: int | None = None

    def begin(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Set the generators to where part `index` begins; `extra` are those of this run's model copy."""
        generators = [*self._generators, *host_generators(extra)]
        self._stop(generators)
        self._part = index
        if index not in self._starts:
            now = host_rng_states(generators)
            self._starts[index] = now if self._sequential else next(iter(self._starts.values()), now)
        _set_host_states(generators, self._starts[index])

    def go_on(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Set the generators to where part `index` stopped as another began or went on."""
        generators = [*self._generators, *host_generators(extra)]
        self._stop(generators)
        self._part = index
        if not self._sequential:
            _set_host_states(generators, self._stopped[index])

    def finish(self) -> None:
        """End the part that runs, if there is one."""
        self._stop(self._generators)
        self._part = None

    def _stop(self, generators: Sequence[Generator]) -> None:
        if self._part is not None:
            self._stopped[self._part] = host_rng_states(generators)
            self.ends[self._part] = pickle.dumps(self._stopped[self._part][: 2 + len(self._generators)])


def host_generators(generators: Iterable[Generator]) -> list[Generator]:
    """Return those of `generators` that are Python's or NumPy's and whose state can be read."""
    return [one for one in generators if not isinstance(one, torch.Generator) and has_readable_state(one)]


def host_rng_states(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of Python's and NumPy's global generators and of `generators`."""
    return [random.getstate(), np.random.get_state(), *map(generator_state, generators)]


def _set_host_states(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    python, numpy, *others = states
    random.setstate(python)
    np.random.set_state(numpy)
    for generator, state in zip(generators, others, strict=False):  # A run without a model copy has fewer.
        set_generator_state(generator, state)


class ReplayMismatch(Exception):  # noqa: N818 -- no failure of a command: the comparison continues with a neutral RNG
    """Recorded random numbers cannot be replayed in another run; the message names operator, line and reason."""


@dataclass(frozen=True)
class RecordedCall:
    """The random values of one recorded call.

    Attributes:
        site: The operator and its line.
        index_range: The number of items that drawn indices choose from; None if the values are no indices.
        is_fused: True if the kernel does not return its random values.
        values: Copies of the values without a graph.
    """

    site: CallSite
    index_range: int | None
    is_fused: bool
    values: tuple[Tensor, ...]

    def check(self, call: RandomCall) -> None:
        """Raise ReplayMismatch unless `call` is of the same operator, and neither is fused."""
        if self.site.op != call.op:
            raise ReplayMismatch(f"{call.site} draws where {self.site} drew in the recorded run")
        if self.is_fused or call.is_fused:
            raise ReplayMismatch(f"{call.site} draws within a fused kernel, which does not return its random numbers")


def join_recorded(call: RandomCall, parts: Sequence[RecordedCall], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the random values for `call` in the whole batch: those of its parts, joined along the samples.

    Raises:
        ReplayMismatch: Another operator drew, no dimension is the samples', or the values are indices into a part.
    """
    for part in parts:
        part.check(call)
        if part.index_range != call.index_range:
            raise ReplayMismatch(
                f"{call.site} draws from {part.index_range} indices in a part and from {call.index_range} in the whole"
                " batch"
            )
    return tuple(
        _join(call, whole, [part.values[index] for part in parts], sizes)
        for index, whole in enumerate(call.random_values)
    )


def _join(call: RandomCall, whole: Tensor, drawn: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    dims = [dim for dim in range(whole.ndim) if _adds_up(whole.shape, [value.shape for value in drawn], dim)]
    if len(dims) > 1:
        dims = [dim for dim in dims if [value.shape[dim] for value in drawn] == list(sizes)]
    if len(dims) == 1:
        return torch.cat([value.to(whole) for value in drawn], dim=dims[0])
    if len(drawn) == 1 and drawn[0].shape == whole.shape:
        return drawn[0]
    shapes = ", ".join(dict.fromkeys(str(list(value.shape)) for value in drawn))
    raise ReplayMismatch(
        f"{call.site} draws {list(whole.shape)} for the whole batch and {shapes} for its parts: no dimension is that"
        " of the samples"
    )


def _adds_up(whole: Sequence[int], parts: Sequence[Sequence[int]], dim: int) -> bool:
    """Return whether the parts' lengths of `dim` add up to the whole's, and all other dimensions are equal."""
    if any(len(part) != len(whole) for part in parts) or sum(part[dim] for part in parts) != whole[dim]:
        return False
    return all([*part[:dim], *part[dim + 1 :]] == [*whole[:dim], *whole[dim + 1 :]] for part in parts)


class RngRecording:
    """Records the random numbers that the parts of one accumulated run draw, and replays them in other runs.

    The k-th random call of the full run gets the values of the k-th calls of all parts. Calls in backward count, since
    checkpointing draws again there. Generators advance as they would anyway; the caller restores them.

    Two kinds of values cannot be joined: values drawn once for all samples, and indices whose range grows with the
    batch (a permutation of the samples), since a part's indices mean other rows in the whole batch. Shapes do not tell
    (B*T, ...) from (T*B, ...), nor show what packed sequences hold. Such values may be the cause if runs differ under
    replayed numbers and agree under `neutral_rng`.

    A replaying run raises ReplayMismatch if it draws otherwise than the recorded one.

    Attributes:
        calls_by_part: The calls of each part, by its index; None is the update.
        host: The replay of Python's and NumPy's generators; by default every part begins with the same global states.
    """

    def __init__(self, sizes: Sequence[int], *, host: HostRngReplay | None = None) -> None:
        self._sizes = tuple(sizes)
        self.calls_by_part: dict[int | None, list[RecordedCall]] = {}
        self.host = HostRngReplay() if host is None else host
        self._part: int | None = None
        self._count = 0
        self._expected: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """The operators and lines of the recorded run that drew random numbers."""
        return tuple(dict.fromkeys(str(call.site) for calls in self.calls_by_part.values() for call in calls))

    @property
    def is_per_sample(self) -> bool:
        """True if all recorded values have a dimension of the samples, so that joined rows surely match them."""
        calls = [(size, call) for index, size in enumerate(self._sizes) for call in self.calls_by_part.get(index, [])]
        return all(size in value.shape for size, call in calls for value in call.values)

    def begin_part(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Begin part `index`, which later calls belong to, and forget the calls of an earlier attempt at it."""
        self.host.begin(index, extra)
        self._part = index
        self.calls_by_part[index] = []

    def go_on_with_part(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Go on with part `index`, which has begun and waited for others: later calls belong to it again."""
        self.host.go_on(index, extra)
        self._part = index

    def end_part(self) -> None:
        """End the last part; later calls are the update's, whose values are replayed without joining them."""
        self._finish()
        self.host.finish()
        self._part = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the accumulated run within it; on a GPU, attention and RNNs run with other kernels."""
        self.calls_by_part, self._part = {None: []}, None
        with unfused_kernels(), RandomCallMode(self._record):
            yield
        self.host.finish()
        self._part = None

    @contextmanager
    def replay_whole(self) -> Iterator[None]:
        """Replay joined values in the full run within it; call `end_part` before the update if that draws, too."""
        parts = [self.calls_by_part.get(index, []) for index in range(len(self._sizes))]

        def replay(call: RandomCall) -> None:
            if self._part is None:
                self._replay(self.calls_by_part[None], call)
            else:
                call.replace(join_recorded(call, [self._next_recorded(calls, call) for calls in parts], self._sizes))
            self._count += 1

        self.host.begin(0)
        self._part, self._count, self._expected = 0, 0, max(map(len, parts), default=0)
        try:
            with unfused_kernels(), RandomCallMode(replay):
                yield
            if self._part is not None:
                self._finish()
        finally:
            self._part = self._expected = None

    def _finish(self) -> None:
        """Raise ReplayMismatch unless the running part made all calls that were recorded."""
        if self._expected not in (None, self._count):
            raise ReplayMismatch(f"{self._expected} random calls were recorded, a later run made {self._count} of them")
        self._count = 0

    def _record(self, call: RandomCall) -> None:
        values = () if call.is_fused else tuple(value.detach().clone() for value in call.random_values)
        self.calls_by_part[self._part].append(RecordedCall(call.site, call.index_range, call.is_fused, values))

    def _replay(self, calls: Sequence[RecordedCall], call: RandomCall) -> None:
        recorded = self._next_recorded(calls, call)
        recorded.check(call)
        if [value.shape for value in recorded.values] != [value.shape for value in call.random_values]:
            raise ReplayMismatch(f"{call.site} draws another shape than in the recorded run")
        call.replace(recorded.values)

    def _next_recorded(self, calls: Sequence[RecordedCall], call: RandomCall) -> RecordedCall:
        if self._count >= len(calls):
            raise ReplayMismatch(f"{call.site} draws once more than the {len(calls)} times that were recorded")
        return calls[self._count]
