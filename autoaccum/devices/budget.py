"""How much of the host's memory trials may use."""

from __future__ import annotations

from autoaccum.devices.host_memory import HostMemory
from autoaccum.errors import UsageError
from autoaccum.units import MIB, MemorySize, format_bytes

_LEAST_RESERVE_BYTES = 256 * MIB
_RESERVE_SHARE = 0.05


def choose_budget(host: HostMemory, memory: MemorySize | None = None, reserve: MemorySize | None = None) -> int:
    """The budget in bytes: `memory`, or else what is free, less `reserve`.

    A budget beyond what is free is refused, not tried: the kernel would kill something in the end, and under
    `memory.oom.group` that is the whole container.

    Args:
        host: Read with the workload loaded.
        memory: A size, or a share of all there is.
        reserve: Kept free; None: nothing where `memory` is given, else the larger of 5 % of what is free and 256 MiB,
            so that the kernel does not begin to kill.

    Raises:
        UsageError: Nothing is left, or `memory` is more than what is free.

    >>> host = HostMemory(total_bytes=16 * 1024**3, free_bytes=10 * 1024**3, bound="the machine")
    >>> format_bytes(choose_budget(host))
    '9.5 GiB'
    >>> format_bytes(choose_budget(host, MemorySize(fraction=0.5), MemorySize(bytes=1024**3)))
    '7.0 GiB'
    """
    wanted = host.free_bytes if memory is None else memory.resolve(host.total_bytes)
    kept = _reserve_bytes(host, memory, reserve)
    budget = wanted - kept
    if budget <= 0:
        whole = f"{format_bytes(wanted)} {'that are free' if memory is None else 'of --memory'}"
        raise UsageError(
            f"a reserve of {format_bytes(kept)} leaves nothing of the {whole}",
            hint="lower --reserve, or free some memory",
        )
    if budget > host.free_bytes:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is more than the {format_bytes(host.free_bytes)} that {host.bound}"
            " has free",
            hint="lower --memory, leave it away to use what is free, or end other programs",
        )
    return budget


def _reserve_bytes(host: HostMemory, memory: MemorySize | None, reserve: MemorySize | None) -> int:
    if reserve is not None:
        return reserve.resolve(host.total_bytes)
    return 0 if memory is not None else max(int(host.free_bytes * _RESERVE_SHARE), _LEAST_RESERVE_BYTES)
