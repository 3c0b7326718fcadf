"""What the parts drew, put together for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autoaccum.accumulation.draws.random_calls import RandomCall
from autoaccum.accumulation.draws.sites import DrawSite
from autoaccum.accumulation.rows import find_layouts


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
