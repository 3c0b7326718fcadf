"""The random draws of one accumulated run, given to other runs of the same batch.

Equality of a full batch with its parts can only be stated for the draws made: dropout's masks of the whole batch and
of its parts differ under one seed. So what the parts drew is joined along the samples and given to the full run.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.random_ops import CallSite, RandomCall, RandomCallMode, unfused_kernels
from autoaccum.accumulation.rng_state import Generator, generator_state, has_readable_state, set_generator_state


class HostRngReplay:
    """Where these generators begin each part: the global ones, and others.

    Rewound, all parts are given what the first one drew, as is right for what is drawn once per forward and serves all
    samples. Onward, each part goes on where the one before has ended, as is right for what is drawn for each sample:
    the whole batch then draws the same.

    `named` are others beside the global ones; torch's among them are passed over: `RngRecording` replays
    what those draw.

    Attributes:
        ends: Where they were as each part ended, to be compared: rewound, equal ends mean equal draws.
    """

    def __init__(self, named: Iterable[Generator] = (), *, onward: bool = False) -> None:
        self._named, self._onward = host_generators(named), onward
        self._starts: dict[int, list[Any]] = {}
        self.ends: list[bytes] = []
        self._is_open = False

    def begin(self, index: int, own: Iterable[Generator] = ()) -> None:
        """Put generators to where this part begins, and `own` ones: of this run alone, as of a model's copy."""
        self.finish()
        self._is_open = True
        generators = [*self._named, *host_generators(own)]
        if index not in self._starts:
            now = host_rng_states(generators)
            self._starts[index] = now if self._onward else next(iter(self._starts.values()), now)
        _put(generators, self._starts[index])

    def finish(self) -> None:
        """The part that began last, if any, is over."""
        if self._is_open:
            self.ends.append(pickle.dumps(host_rng_states(self._named)))
        self._is_open = False


def host_generators(generators: Iterable[Generator]) -> list[Generator]:
    """Those of Python and NumPy whose state can be told."""
    return [one for one in generators if not isinstance(one, torch.Generator) and has_readable_state(one)]


def host_rng_states(generators: Sequence[Generator]) -> list[Any]:
    """Where Python's and NumPy's global generators are, and these."""
    return [random.getstate(), np.random.get_state(), *map(generator_state, generators)]


def _put(generators: Sequence[Generator], places: Sequence[Any]) -> None:
    random.setstate(places[0])
    np.random.set_state(places[1])
    for generator, place in zip(generators, places[2:], strict=False):  # Runs without a copy of the model have fewer.
        set_generator_state(generator, place)


class ReplayMismatch(Exception):  # noqa: N818 -- no error of a command: whoever compares goes on without chance
    """The draws of one run cannot be given to another; says which, in which line, and why."""


@dataclass(frozen=True)
class RecordedCall:
    """What one random op drew.

    Attributes:
        site: Which op, in which line.
        rows: How many things the drawn indices choose among; None where they are no indices.
        is_fused: Whether its kernel keeps what it drew to itself.
        values: Copies without a graph.
    """

    site: CallSite
    rows: int | None
    is_fused: bool
    values: tuple[Tensor, ...]

    def check(self, call: RandomCall) -> None:
        """Raise ReplayMismatch unless `call` is of the same op, and an open one."""
        if self.site.op != call.op:
            raise ReplayMismatch(f"{call.site} draws where {self.site} drew when it was recorded")
        if self.is_fused or call.is_fused:
            raise ReplayMismatch(f"{call.site} draws within its kernel, which does not give its draws out")


def join_recorded(call: RandomCall, parts: Sequence[RecordedCall], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The values for a call of the whole batch: those of its parts, one after the other along the samples.

    Raises:
        ReplayMismatch: When another op drew, shapes tell no samples, or what was drawn are indices into a part's rows.
    """
    for part in parts:
        part.check(call)
        if part.rows != call.rows:
            raise ReplayMismatch(
                f"{call.site} draws indices of {part.rows} rows in a part, of {call.rows} in the whole"
            )
    chance = call.chance
    return tuple(_join(call, whole, [part.values[at] for part in parts], sizes) for at, whole in enumerate(chance))


def _join(call: RandomCall, whole: Tensor, drawn: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    dims = [dim for dim in range(whole.ndim) if _adds_up(whole.shape, [value.shape for value in drawn], dim)]
    if len(dims) > 1:
        dims = [dim for dim in dims if [value.shape[dim] for value in drawn] == list(sizes)]
    if len(dims) == 1:
        return torch.cat([value.to(whole) for value in drawn], dim=dims[0])
    if len(drawn) == 1 and drawn[0].shape == whole.shape:
        return drawn[0]
    listed = ", ".join(dict.fromkeys(str(list(value.shape)) for value in drawn))
    raise ReplayMismatch(
        f"{call.site} draws {list(whole.shape)} for the whole batch and {listed} for its parts: no dimension is the"
        " samples'"
    )


def _adds_up(whole: Sequence[int], parts: Sequence[Sequence[int]], dim: int) -> bool:
    """Whether the lengths of `dim` add up to the whole's, and all else is alike."""
    if any(len(part) != len(whole) for part in parts) or sum(part[dim] for part in parts) != whole[dim]:
        return False
    return all([*part[:dim], *part[dim + 1 :]] == [*whole[:dim], *whole[dim + 1 :]] for part in parts)


class RngRecording:
    """Records what the parts of one accumulated run draw, and gives it to other runs.

    The k-th draw of a run is matched with the k-th of each part, backward included, since checkpointing draws again
    there. Generators are used up as without it; putting them back is the caller's.

    Not joined is what is drawn once for all samples, and indices whose range grows with the batch (a permutation of
    the samples): a part's would point at other rows of the whole batch. Shapes cannot tell (B*T, ...) from (T*B, ...),
    nor what packed sequences hold: runs that differ under joined draws and agree under `calm` may differ by these.

    A run that is given draws raises ReplayMismatch when it draws otherwise than was recorded.

    Attributes:
        tracks: What each part has drawn, by its index; None: the update.
        host: What Python's and NumPy's generators do; the global ones are rewound for each part where none is given.
    """

    def __init__(self, sizes: Sequence[int], *, host: HostRngReplay | None = None) -> None:
        self._sizes = tuple(sizes)
        self.calls_by_part: dict[int | None, list[RecordedCall]] = {}
        self.host = HostRngReplay() if host is None else host
        self._part: int | None = None
        self._made = 0
        self._expects: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """Where the recorded run has drawn; empty where nothing is random."""
        return tuple(dict.fromkeys(str(draw.site) for track in self.calls_by_part.values() for draw in track))

    @property
    def is_per_sample(self) -> bool:
        """Whether all that parts drew has a dimension of their samples, so that joined rows are surely theirs."""
        drawn = [(size, draw) for index, size in enumerate(self._sizes) for draw in self.calls_by_part.get(index, [])]
        return all(size in value.shape for size, draw in drawn for value in draw.values)

    def begin_part(self, index: int, own: Iterable[Generator] = ()) -> None:
        """Draws belong to this part from now on; those of an earlier attempt at it are forgotten."""
        self.host.begin(index, own)
        self._part = index
        self.calls_by_part[index] = []

    def end_part(self) -> None:
        """The last backward is over: later draws are the update's, and given as they were, not joined."""
        self._finish()
        self.host.finish()
        self._part = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Around the accumulated run, which draws as without it; on a card attention and RNNs change their kernels."""
        self.calls_by_part, self._part = {None: []}, None
        with unfused_kernels(), RandomCallMode(self._record):
            yield
        self.host.finish()
        self._part = None

    @contextmanager
    def replay_whole(self) -> Iterator[None]:
        """Around the full run; where its update draws, call `end_part` before."""
        tracks = [self.calls_by_part.get(index, []) for index in range(len(self._sizes))]
        with self._giving(0, lambda call: self._join(tracks, call), max(map(len, tracks), default=0)):
            yield

    @contextmanager
    def replay_part(self, index: int) -> Iterator[None]:
        """Around a run of one part alone, likewise."""
        track = self.calls_by_part.get(index, [])
        with self._giving(index, lambda call: self._give(track, call), len(track)):
            yield

    @contextmanager
    def _giving(self, index: int, give: Callable[[RandomCall], None], expects: int) -> Iterator[None]:
        def answer(call: RandomCall) -> None:
            if self._part is None:
                self._give(self.calls_by_part[None], call)
            else:
                give(call)
            self._made += 1

        self.host.begin(index)
        self._part, self._made, self._expects = index, 0, expects
        try:
            with unfused_kernels(), RandomCallMode(answer):
                yield
            if self._part is not None:
                self._finish()
        finally:
            self._part = self._expects = None

    def _finish(self) -> None:
        """Raise ReplayMismatch unless what is under way drew all that is recorded of it."""
        if self._expects not in (None, self._made):
            raise ReplayMismatch(f"{self._expects} random draws were recorded, a later run made {self._made} of them")
        self._made = 0

    def _record(self, call: RandomCall) -> None:
        values = () if call.is_fused else tuple(value.detach().clone() for value in call.chance)
        self.calls_by_part[self._part].append(RecordedCall(call.site, call.rows, call.is_fused, values))

    def _join(self, tracks: Sequence[Sequence[RecordedCall]], call: RandomCall) -> None:
        call.give(join_recorded(call, [self._recorded(track, call) for track in tracks], self._sizes))

    def _give(self, track: Sequence[RecordedCall], call: RandomCall) -> None:
        draw = self._recorded(track, call)
        draw.check(call)
        if [value.shape for value in draw.values] != [value.shape for value in call.chance]:
            raise ReplayMismatch(f"{call.site} draws another shape than when it was recorded")
        call.give(draw.values)

    def _recorded(self, track: Sequence[RecordedCall], call: RandomCall) -> RecordedCall:
        if self._made >= len(track):
            raise ReplayMismatch(f"{call.site} draws once more than the {len(track)} times that were recorded")
        return track[self._made]
