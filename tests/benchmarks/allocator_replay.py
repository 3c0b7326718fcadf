"""How fast traces are replayed, and how long the least capacity takes: `python tests/benchmarks/allocator_replay.py`.

The traces are of a made-up net: per layer a weight, its gradient, three activations of which two are kept, and a
temporary in backward.
"""

from __future__ import annotations

import random
import time

from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.devices.simulated.replay import least_capacity, replay
from autoaccum.units import KIB, MIB, format_bytes

UNITS = (8 * KIB, 700 * KIB, MIB, 3 * MIB, 5 * MIB, 33 * MIB)


def make_events(layers: int) -> tuple[list[int], list[int], int]:
    """Two updates of two micro-batches each, and where the second begins."""
    dice = random.Random(layers)
    events, sizes, last_update = list[int](), list[int](), 0

    def take(size: int) -> int:
        sizes.append(size)
        events.append(len(sizes) - 1)
        return events[-1]

    widths = [dice.randint(1, 4) * dice.choice(UNITS) + 512 * dice.randrange(4) for _ in range(layers)]
    for width in widths:
        take(width)
    for _ in range(2):
        last_update = len(events)
        for _ in range(2):
            kept = [[take(width // share + 100) for share in (1, 2, 3)] for width in widths]
            for (first, second, third), width in zip(reversed(kept), reversed(widths), strict=True):
                passed, temporary = take(width), take(3 * width)
                events.extend(~block for block in (temporary, first, second, third, passed))
    return events, sizes, last_update


def main() -> None:
    """Print events a second, by length and settings."""
    for layers in (120, 250, 1250, 2500):
        events, sizes, last_update = make_events(layers)
        for expandable in (False, True):
            settings = AllocatorSettings(expandable_segments=expandable)
            start = time.perf_counter()
            done = replay(events, sizes, settings=settings)
            replayed = time.perf_counter()
            least = least_capacity(events, sizes, settings, last_update)
            searched = time.perf_counter()
            print(
                f"{len(events):7,} events, {'expandable' if expandable else 'fixed':>10} segments: "
                f"{replayed - start:.3f} s, {len(events) / (replayed - start):,.0f}/s; peak "
                f"{format_bytes(done.peak_reserved_bytes)}, least {format_bytes(least)} in {searched - replayed:.2f} s"
            )


if __name__ == "__main__":
    main()
