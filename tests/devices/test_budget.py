from __future__ import annotations

import pytest

from autoaccum.devices.budget import AvailableMemory, choose_budget
from autoaccum.errors import UsageError
from autoaccum.units import GIB, MemorySize

HOST = AvailableMemory(total_bytes=16 * GIB, free_bytes=10 * GIB, bound="the machine")


def size(count: int) -> MemorySize:
    return MemorySize(bytes=count)


@pytest.mark.parametrize(
    ("memory", "reserve", "budget"),
    [
        (None, None, 10 * GIB - int(10 * GIB * 0.05)),
        (None, size(GIB), 9 * GIB),
        (size(3 * GIB), None, 3 * GIB),
        (size(3 * GIB), size(GIB), 2 * GIB),
        (MemorySize(fraction=0.5), None, 8 * GIB),
        (size(8 * GIB), MemorySize(fraction=0.125), 6 * GIB),
        (size(10 * GIB), None, 10 * GIB),
        (size(11 * GIB), size(2 * GIB), 9 * GIB),
    ],
)
def test_takes_the_requested_or_the_free_memory(
    memory: MemorySize | None, reserve: MemorySize | None, budget: int
) -> None:
    assert choose_budget(HOST, memory, reserve) == budget


@pytest.mark.parametrize(
    ("memory", "reserve", "message"),
    [
        (size(12 * GIB), None, r"a budget of 12\.0 GiB is more than the 10\.0 GiB that the machine has free"),
        (MemorySize(fraction=0.9), None, r"14\.4 GiB is more than"),
        (size(GIB), size(GIB), r"a reserve of 1\.0 GiB leaves nothing of the 1\.0 GiB of --memory"),
        (None, size(12 * GIB), r"leaves nothing of the 10\.0 GiB that are free"),
    ],
)
def test_refuses_what_is_not_possible(memory: MemorySize | None, reserve: MemorySize | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_budget(HOST, memory, reserve)
