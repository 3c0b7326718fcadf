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

from autoaccum.accumulation.random_calls import DrawSite, RandomCall, RandomCalls, open_kernels
from autoaccum.accumulation.randomness import Generator, generator_state, has_known_state, set_generator_state
from autoaccum.accumulation.rows import find_layouts


class HostDraws:
    """Where these generators begin each part: the global ones, and others.

    Rewound, all parts are given what the first one drew, as is right for what is drawn once per forward and serves all
    samples. Onward, each part goes on where the one before has ended, as is right for what is drawn for each sample:
    the whole batch then draws the same.

    Args:
        named: Others, beside the global ones; torch's among them are passed over, whose draws can be given (`Draws`).
        onward: See above.

    Attributes:
        ends: Where they were as each part ended, to be compared: rewound, equal ends mean equal draws.
    """

    def __init__(self, named: Iterable[Generator] = (), *, onward: bool = False) -> None:
        self._named, self._onward = of_host(named), onward
        self._starts: dict[int, list[Any]] = {}
        self.ends: list[bytes] = []
        self._is_open = False

    def forget(self) -> None:
        """The next part to begin is the first again."""
        self._starts.clear()

    def begin(self, index: int, own: Iterable[Generator] = ()) -> None:
        """Put generators to where this part begins, and `own` ones: of this run alone, as of a model's copy."""
        self.finish()
        self._is_open = True
        generators = [*self._named, *of_host(own)]
        if index not in self._starts:
            now = host_places(generators)
            self._starts[index] = now if self._onward else next(iter(self._starts.values()), now)
        _put(generators, self._starts[index])

    def finish(self) -> None:
        """The part that began last, if any, is over."""
        if self._is_open:
            self.ends.append(pickle.dumps(host_places(self._named)))
        self._is_open = False


def of_host(generators: Iterable[Generator]) -> list[Generator]:
    """Those of Python and NumPy whose state can be told."""
    return [one for one in generators if not isinstance(one, torch.Generator) and has_known_state(one)]


def host_places(generators: Sequence[Generator]) -> list[Any]:
    """Where Python's and NumPy's global generators are, and these."""
    return [random.getstate(), np.random.get_state(), *map(generator_state, generators)]


def _put(generators: Sequence[Generator], places: Sequence[Any]) -> None:
    random.setstate(places[0])
    np.random.set_state(places[1])
    for generator, place in zip(generators, places[2:], strict=False):  # Runs without a copy of the model have fewer.
        set_generator_state(generator, place)


_CHAIN, _TAKEN = -1, -2
"""Stand for all parts: one after the other, and whichever is taken."""


class DrawMismatch(Exception):  # noqa: N818 -- no error of a command: whoever compares goes on without chance
    """The draws of one run cannot be given to another; says which, in which line, and why."""


class IndexMismatch(DrawMismatch):
    """What is drawn are indices of the samples themselves: chance mixes them."""


@dataclass(frozen=True)
class Draw:
    """What one random op drew.

    Attributes:
        site: Which op, in which line.
        rows: How many things the drawn indices choose among; None where they are no indices.
        is_sealed: Whether its kernel keeps what it drew to itself.
        values: Copies without a graph.
    """

    site: DrawSite
    rows: int | None
    is_sealed: bool
    values: tuple[Tensor, ...]

    def check(self, call: RandomCall) -> None:
        """Raise DrawMismatch unless `call` is of the same op, and an open one."""
        if self.site.op != call.op:
            raise DrawMismatch(f"{call.site} draws where {self.site} drew when it was recorded")
        if self.is_sealed or call.is_sealed:
            raise DrawMismatch(f"{call.site} draws within its kernel, which does not give its draws out")


@dataclass(frozen=True)
class Joined:
    """The values for one random op of the whole batch.

    Attributes:
        values: One for each of its outputs.
        is_sure: Whether shapes leave no doubt on whose is what: rows of a flattened dimension may go by samples or by
            time, and ragged ones may be packed.
    """

    values: tuple[Tensor, ...]
    is_sure: bool


def join_draws(
    call: RandomCall, parts: Sequence[Draw | None], sizes: Sequence[int], *, innermost: bool
) -> Joined | None:
    """The values for a call of the whole batch; None where any part's own serve all samples alike.

    Args:
        call: The full run's.
        parts: What each part drew in its place; None for a part that was not run, since nothing of it counts: its
            rows stay as the call drew them.
        sizes: The samples of each part.
        innermost: Prefer layouts where samples are not the outermost of a flattened dimension.

    Raises:
        DrawMismatch: When another op drew, shapes tell no samples, or what was drawn are indices into a part's rows.
    """
    run = [part for part in parts if part is not None]
    if not run:
        raise DrawMismatch(f"{call.site} draws, and no part was recorded")
    for part in run:
        part.check(call)
        if part.rows != call.rows:
            raise IndexMismatch(f"{call.site} draws indices of {part.rows} rows in a part, of {call.rows} in the whole")
    chance = call.chance
    if all(_shapes(part.values) == _shapes(chance) for part in run):
        return None
    joined = []
    for index, whole in enumerate(chance):
        drawn = [None if part is None else part.values[index] for part in parts]
        joined.append(_join(call, whole, drawn, sizes, innermost))
    return Joined(tuple(values for values, _ in joined), all(is_sure for _, is_sure in joined))


def _join(
    call: RandomCall, whole: Tensor, drawn: Sequence[Tensor | None], sizes: Sequence[int], innermost: bool
) -> tuple[Tensor, bool]:
    shapes = _known_shapes(list(whole.shape), [None if value is None else list(value.shape) for value in drawn], sizes)
    layouts = [] if shapes is None else find_layouts(whole.shape, shapes, sizes)
    if shapes is None or not layouts:
        listed = ", ".join(dict.fromkeys(str(list(value.shape)) for value in drawn if value is not None))
        raise DrawMismatch(
            f"{call.site} draws {list(whole.shape)} for the whole batch and {listed} for its parts: "
            "no dimension is the samples'"
        )
    layout = next((layout for layout in layouts if innermost and layout.outer > 1), layouts[0])
    lengths = [shape[layout.dim] for shape in shapes]
    own = layout.cut(whole, lengths)
    values = layout.join([mine if value is None else value.to(mine) for value, mine in zip(drawn, own, strict=True)])
    is_even = all(length * sum(sizes) == size * sum(lengths) for length, size in zip(lengths, sizes, strict=True))
    return values, len(layouts) == 1 and is_even


def _known_shapes(whole: list[int], shapes: Sequence[list[int] | None], sizes: Sequence[int]) -> list[list[int]] | None:
    """The parts' shapes; a missing one is as if each sample had equally many rows. None where that fits nowhere."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) == len(shapes):
        return known
    for dim, length in enumerate(whole):
        expected = [[*whole[:dim], length * size // sum(sizes), *whole[dim + 1 :]] for size in sizes]
        if all(shape in (None, wanted) for shape, wanted in zip(shapes, expected, strict=True)):
            return expected
    return None


def _shapes(values: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


class Draws:
    """Records what the parts of one accumulated run draw, and gives it to other runs.

    The k-th draw of a run is matched with the k-th of each part, backward included, since checkpointing draws again
    there. Generators are used up as without it; putting them back is the caller's.

    Not joined are indices whose range grows with the batch (a permutation of the samples, random negatives): a part's
    would point at other rows of the whole batch. Shapes cannot tell (B*T, ...) from (T*B, ...), nor what packed
    sequences hold: runs that differ under joined draws and agree under `calm` differ by their draws alone.

    A run that is given draws raises DrawMismatch when it draws otherwise than was recorded.

    Args:
        sizes: The samples of each part.
        innermost: Take samples as the inner part of a flattened dimension, (T*B, ...), wherever shapes allow that.
        host: What Python's and NumPy's generators do; the global ones are rewound for each part when None.
    """

    def __init__(self, sizes: Sequence[int], *, innermost: bool = False, host: HostDraws | None = None) -> None:
        self._sizes = tuple(sizes)
        self._indices = range(len(self._sizes))
        self._innermost = innermost
        self._tracks: dict[int | None, list[Draw]] = {}
        self._shared: dict[int, DrawSite] = {}
        self._unsure: dict[DrawSite, None] = {}
        self._host = HostDraws() if host is None else host
        self._taken: int | None = None
        self._drawn: dict[int, int] = {}
        self._part: int | None = None
        self._made = 0
        self._expects: Callable[[], int] | None = None

    @property
    def _first(self) -> int | None:
        """The part that was recorded first: those without weight come later, or never."""
        return next((index for index in self._tracks if index is not None), None)

    @property
    def shared(self) -> tuple[str, ...]:
        """The draws that serve all samples alike (one noise for all, a dropped layer), as the full run met them."""
        return tuple(dict.fromkeys(str(site) for site in self._shared.values()))

    @property
    def sites(self) -> tuple[str, ...]:
        """Where the recorded run has drawn; empty where nothing is random."""
        return tuple(dict.fromkeys(str(draw.site) for track in self._tracks.values() for draw in track))

    @property
    def unsure(self) -> tuple[str, ...]:
        """The draws of the full run whose shapes do not tell for certain whose is what; see `Joined`."""
        return tuple(map(str, self._unsure))

    @property
    def is_plain(self) -> bool:
        """Whether the run `as_taken` has drawn for each part once, or not at all."""
        return all(made in (0, len(self._tracks.get(index, ()))) for index, made in self._drawn.items())

    def begin_part(self, index: int, own: Iterable[Generator] = ()) -> None:
        """Draws belong to this part from now on; those of an earlier attempt at it are forgotten."""
        self._finish()
        self._host.begin(index, own)
        self._part = index
        if self._expects is None:
            self._tracks[index] = []

    def end_part(self) -> None:
        """The last backward is over: later draws are the update's, and given as they were, not joined."""
        self._finish()
        self._host.finish()
        self._part = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the accumulated run, which draws as without it; on a card attention and RNNs change their kernels.

        Done again after `joined` told which draws are shared (even if it then failed), all parts get the first's.
        """
        self._tracks, self._part, self._expects = {None: []}, None, None
        self._host.forget()
        with open_kernels(), RandomCalls(self._record):
            yield
        self._host.finish()
        self._part = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Around the full run; where its update draws, call `end_part` before."""
        self._shared, self._unsure = {}, {}
        with self._giving(self._give_joined, self._count_joined):
            self.begin_part(0)
            yield

    @contextmanager
    def joined_elsewhere(self) -> Iterator[None]:
        """As `joined`, around a run of which nothing is to be learned of what is shared."""
        shared, unsure = self._shared, self._unsure
        try:
            with self.joined():
                yield
        finally:
            self._shared, self._unsure = shared, unsure

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Around a run that takes the parts in their order, and does not tell where each begins; `end_part` does."""
        chain = [draw for index in self._indices for draw in self._given(index)]
        self._tracks[_CHAIN] = chain
        with self._giving(lambda call: self._give_recorded(self._part, call), lambda: len(chain)):
            self.begin_part(_CHAIN)
            yield

    @contextmanager
    def as_taken(self) -> Iterator[None]:
        """Around a run that tells by `take` which part comes next; one that is run again draws the same."""
        self._taken, self._drawn = None, {}
        self._tracks[_TAKEN] = []
        with self._giving(self._give_taken, self._count_taken):
            self._part = _TAKEN
            yield

    def take(self, index: int, own: Iterable[Generator] = ()) -> None:
        """What is drawn next is for this part; arguments are those of `begin_part`."""
        self._taken = index
        self._host.begin(index, own)

    @contextmanager
    def of_part(self, index: int) -> Iterator[None]:
        """Around a run of one part alone, likewise."""
        with self._giving(self._give_own, self._count_own):
            self.begin_part(index)
            yield

    @contextmanager
    def _giving(self, give: Callable[[RandomCall], None], count: Callable[[], int]) -> Iterator[None]:
        def answer(call: RandomCall) -> None:
            give(call)
            self._made += 1

        self._part, self._made, self._expects = None, 0, count
        try:
            with open_kernels(), RandomCalls(answer):
                yield
            if self._part is not None:
                self._finish()
        finally:
            self._part, self._expects = None, None

    def _finish(self) -> None:
        """Raise DrawMismatch unless what is under way drew all that is recorded of it."""
        if self._expects is not None and self._part is not None and self._made != self._expects():
            raise DrawMismatch(f"{self._expects()} random draws were recorded, a later run made {self._made} of them")
        self._made = 0

    def _record(self, call: RandomCall) -> None:
        first = self._first_shared(call) if self._part not in (None, self._first) else None
        if first is not None:
            call.give(first.values)
        values = () if call.is_sealed else tuple(value.detach().clone() for value in call.chance)
        self._tracks[self._part].append(Draw(call.site, call.rows, call.is_sealed, values))

    def _first_shared(self, call: RandomCall) -> Draw | None:
        """What the first part drew in its place, where a full run showed the site to be shared.

        Places are counted per site: a draw that decides which layers run moves those that follow.
        """
        if call.site not in self._shared.values() or call.is_sealed:
            return None
        place = sum(draw.site == call.site for draw in self._tracks[self._part])
        firsts = [draw for draw in self._tracks.get(self._first, ()) if draw.site == call.site]
        found = firsts[place] if place < len(firsts) else None
        shapes = [value.shape for value in call.chance]
        return found if found is not None and shapes == [value.shape for value in found.values] else None

    def _give_joined(self, call: RandomCall) -> None:
        if self._part is None:
            self._give_own(call)
            return
        parts = [self._recorded(index, call.site) if index in self._tracks else None for index in self._indices]
        joined = join_draws(call, parts, self._sizes, innermost=self._innermost)
        if joined is None:
            self._shared.update({self._made: call.site} if len(self._sizes) > 1 else {})
            call.give(self._recorded(self._first, call.site).values)
            return
        if not joined.is_sure:
            self._unsure[call.site] = None
        call.give(joined.values)

    def _give_own(self, call: RandomCall) -> None:
        is_shared = self._part is not None and self._made in self._shared
        self._give_recorded(self._first if is_shared else self._part, call)

    def _give_taken(self, call: RandomCall) -> None:
        if self._part is None:
            self._give_own(call)
            return
        track = [] if self._taken is None else self._given(self._taken)
        if self._taken is None or not track:
            raise DrawMismatch(f"{call.site} draws for no part, or for one that drew nothing when it was recorded")
        made = self._drawn.get(self._taken, 0)
        self._drawn[self._taken] = made + 1
        self._give_draw(track[made % len(track)], call)

    def _given(self, index: int) -> list[Draw]:
        """What a part is given: what it drew, and what the first one drew where that is shared."""
        first = self._tracks.get(self._first, [])
        return [first[k] if k in self._shared else draw for k, draw in enumerate(self._tracks.get(index, []))]

    def _give_recorded(self, source: int | None, call: RandomCall) -> None:
        self._give_draw(self._recorded(source, call.site), call)

    def _give_draw(self, draw: Draw, call: RandomCall) -> None:
        draw.check(call)
        if [value.shape for value in draw.values] != [value.shape for value in call.chance]:
            raise DrawMismatch(f"{call.site} draws another shape than when it was recorded")
        call.give(draw.values)

    def _recorded(self, part: int | None, site: DrawSite) -> Draw:
        track = self._tracks.get(part, [])
        if self._made >= len(track):
            raise DrawMismatch(f"{site} draws once more than the {len(track)} times that were recorded")
        return track[self._made]

    def _count_joined(self) -> int:
        return max((len(self._tracks.get(index, ())) for index in self._indices), default=0)

    def _count_taken(self) -> int:
        """As many as whole runs of the parts would have drawn."""
        whole = [(made, len(self._tracks[index])) for index, made in self._drawn.items()]
        return sum(made + -made % length for made, length in whole)

    def _count_own(self) -> int:
        return len(self._tracks.get(self._part, ()))
