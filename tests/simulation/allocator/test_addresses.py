"""Segments lie where they lay on an H100 under driver 580 (cudaMalloc by torch 2.11.0, one process, 2026-11-27).

Sizes in MiB; addresses in MiB below the end of the range in which the first of these segments lay.
"""

from __future__ import annotations

import random

from autoaccum.simulation.allocator.addresses import SegmentAddresses
from autoaccum.units import MIB

ASCENDING_SIZES = [
    (20, 32), (20, 64), (20, 96), (20, 128), (20, 160), (22, 192), (22, 224), (24, 256), (26, 288), (28, 320),
    (30, 352), (32, 384), (2, 322), (2, 292), (32, 416), (2, 290), (2, 262), (34, 480), (36, 544), (40, 608), (48, 672),
    (62, 736), (62, 800), (64, 864), (64, 928), (66, 1024), (66, 1120), (100, 1248), (128, 1376), (2, 1148), (2, 1146),
    (128, 1504), (2, 1144), (2, 1142), (130, 1664), (200, 1888), (254, 2144), (256, 2400), (256, 2656), (258, 2944),
    (512, 3456), (2, 2686), (2, 2684), (512, 3968), (2, 2682), (2, 2680), (1024, 4992), (1024, 6016), (2050, 8096),
    (20, 6046), (22, 2678), (34, 8160), (66, 8256),
]  # fmt: skip
WITH_FREES: list[tuple[str, int, int] | str] = [
    ("a", 20, 32), ("b", 20, 64), ("c", 34, 128), ("d", 64, 192), ("e", 100, 320), ("f", 200, 544), ("g", 400, 960),
    ("h", 400, 1376), ("i", 800, 2176), ("j", 100, 2304), ("k", 64, 2368), ("l", 34, 2432), ("m", 20, 2398),
    ("n", 20, 2204), "g", ("o", 400, 2848), "o", ("p", 100, 672), ("q", 100, 800), ("r", 300, 2752), "a", "d",
    ("s", 20, 2452), ("t", 22, 700), ("u", 34, 864), ("v", 64, 928), "h", "i", ("w", 1200, 2144), *"bcefjklmnpqrstuvw",
    ("x", 400, 416), ("y", 100, 544), ("z", 20, 444), ("A", 34, 608), ("B", 64, 672), ("C", 800, 1472), ("D", 2, 574),
    ("E", 2, 572), ("F", 2, 570),
]  # fmt: skip
"""Segments by name, and the names of those freed by `torch.cuda.empty_cache`."""


def test_segments_lie_where_they_lay_on_a_card() -> None:
    addresses = SegmentAddresses()
    found = [addresses.reserve(size * MIB) for size, _ in ASCENDING_SIZES]
    top = found[0] + 32 * MIB
    assert [(top - address) // MIB for address in found] == [below for _, below in ASCENDING_SIZES]


def test_freed_addresses_are_used_again_as_on_a_card() -> None:
    addresses = SegmentAddresses()
    live: dict[str, tuple[int, int]] = {}
    top = 0
    for step in WITH_FREES:
        if isinstance(step, str):
            addresses.release(*live.pop(step))
            continue
        name, size, below = step
        live[name] = addresses.reserve(size * MIB), size * MIB
        top = top or live[name][0] + 32 * MIB
        assert (top - live[name][0]) // MIB == below, name


def test_no_two_segments_overlap() -> None:
    numbers, addresses = random.Random(0), SegmentAddresses()
    live: list[tuple[int, int]] = []
    for _ in range(2000):
        if live and numbers.random() < 0.48:
            addresses.release(*live.pop(numbers.randrange(len(live))))
        else:
            size = numbers.choice([2, 20, 22, 34, 64, 100]) * MIB
            live.append((addresses.reserve(size), size))
        ordered = sorted(live)
        assert all(start + size <= other for (start, size), (other, _) in zip(ordered, ordered[1:], strict=False))
    for segment in live:
        addresses.release(*segment)
    assert addresses.reserve(32 * MIB) == SegmentAddresses().reserve(32 * MIB), "nothing is lost"
