"""Reproducible requests to an allocator, and the settings and capacities of the comparison with PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

MIB = 1 << 20
SIZES = (1, 512, 513, 3000, 100 << 10, MIB - 1, MIB, MIB + 1, 3 * MIB, 5 * MIB + 77, 9 * MIB + 7, 10 * MIB)
LARGE_SIZES = (11 * MIB + 5, 21 * MIB, 22 * MIB - 512, 33 * MIB, 47 * MIB + 1, 64 * MIB)
CASES = {
    "": 0,
    "expandable_segments:True": 1,
    "max_split_size_mb:20": 4,
    "roundup_power2_divisions:4": 6,
    "expandable_segments:True,max_split_size_mb:24": 12,
    "expandable_segments:True,roundup_power2_divisions:8": 13,
}
"""Settings, with the number from which the seeds of their requests follow."""
CAPACITIES = ((None, 1000 * MIB), (500 * MIB, 1000 * MIB), (200 * MIB, 400 * MIB), (61 * MIB, 400 * MIB))
"""The bytes that CUDA can allocate (None is no limit), and the total of the card."""


STREAMS = 4


def stream_of(block: int, streams: int) -> int:
    """Return the stream of a block: half of all blocks are on the default one, if there are several."""
    return 0 if streams == 1 or block * 7 % 11 % 2 else 1 + block % (streams - 1)


def make_requests(seed: int, count: int = 600) -> list[tuple[int, int | None]]:
    """Return requests: a block with the size to allocate, or with None to free it."""
    numbers = _random_numbers(seed)
    sizes = [size for size in SIZES + LARGE_SIZES if next(numbers) % 3] or list(SIZES)
    requests: list[tuple[int, int | None]] = []
    live: list[int] = []
    for block in range(count):
        if live and (len(live) > 60 or next(numbers) % 100 < 46):
            requests.append((live.pop(next(numbers) % len(live)), None))
        else:
            requests.append((block, sizes[next(numbers) % len(sizes)]))
            live.append(block)
    return requests


def _random_numbers(seed: int) -> Iterator[int]:
    """Yield random numbers that no release of Python changes (Knuth's MMIX)."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        yield state >> 33
