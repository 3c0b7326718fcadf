"""Cards made up for a test, and what tensors take of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from autoaccum.simulation.cards import Card
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate


def make_card(capability: tuple[int, int] = (8, 6), multiprocessors: int = 82, name: str = "c") -> Card:
    return Card(
        name=name,
        title=name.upper(),
        total_bytes=24 << 30,
        capability=capability,
        multiprocessors=multiprocessors,
        source="made up for a test",
    )


@contextmanager
def on_card(capability: tuple[int, int] = (8, 6)) -> Iterator[Recorder]:
    """Simulate such a card, and give what records its memory."""
    with simulate(make_card(capability)) as mode:
        yield mode.recorder


def sizes_of(recorder: Recorder, run: Callable[[], Any], above: int = 0) -> list[int]:
    """Return the bytes of the tensors that `run` makes, those of at most `above` left out."""
    start = len(recorder.sizes)
    kept = run()
    del kept
    return [size for size in recorder.sizes[start:] if isinstance(size, int) and size > above]


def held_bytes(events: Sequence[int], sizes: Sequence[Any]) -> list[int]:
    """The bytes that tensors hold after each event, without workspaces."""
    tensors = [size if isinstance(size, int) else 0 for size in sizes]
    return list(accumulate(tensors[event] if event >= 0 else -tensors[~event] for event in events))


def most_held(events: Sequence[int], sizes: Sequence[Any]) -> int:
    """The most of them; 0 if nothing happens."""
    return max(held_bytes(events, sizes), default=0)
