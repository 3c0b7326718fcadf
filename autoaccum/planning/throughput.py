"""Samples per second over micro-batches: timed, or estimated from what an update costs, for comparing; and the knee."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.messages import Message, message
from autoaccum.simulation.cards import CardRates
from autoaccum.simulation.trace_records import Amount, UpdateCost

KNEE_SHARE = 0.02
"""The share of the highest throughput that the knee may lose."""

_WARM_UP_UPDATES = 2
"""Updates before anything is timed: the very first creates the optimizer's state, guarded by a copy."""
_LEAST, _MOST, _ENOUGH_SECONDS = 3, 200, 0.5
_FAR_BEHIND, _IN_A_ROW = 2.0, 2

_LINK_BYTES: Final[Mapping[int, float]] = {7: 12e9, 8: 24e9}
_LATER_LINK_BYTES: Final = 48e9
"""Bytes per second in one direction by 16 lanes of PCIe 3, 4 and (from capability 9 on) 5: three quarters of the 15.75,
31.5 and 63 GB/s that the standard allows, as copies from pinned memory reach. Not pinned, they reach about half."""

_HOST_BYTES: Final = 20e9
"""Bytes per second that element-wise operators read and write in host memory; two to eight channels of DDR4 or DDR5
have 40 to 300, of which PyTorch's, one operator after the other, reach a part."""

_LAUNCH_SECONDS: Final = 7e-6
"""What the host takes for an operator of an eager model, autograd and the interpreter included: PyTorch's overhead is
5 to 10 us an operator, and a kernel takes no less than 3 to 5 us to start."""

_REACHED: Final = 0.6
"""The part of its FLOPs that a card reaches in products. All of training reaches 43 to 64 % on A100s and 30 to 46 % on
H100s by the tables of MosaicML (`scripts/train/benchmarking/README.md` in mosaicml/llm-foundry), and products are the
better part of it."""
_REACHED_BYTES: Final = 0.8
"""The same of its memory's bandwidth, in operators that read and write whole tensors."""

BAND: Final = 2.5
"""The factor by which a number of seconds may be off; two ways to run the same workload on one card err alike."""
RATIO_BAND: Final = 1.6
"""The factor by which a ratio between two cards may be off, for the same workload: cards with little power for their
size (L4, RTX 6000 Ada, H100 PCIe) reach less of their rates than others do."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Updates with one micro-batch size.

    Attributes:
        samples_per_second: Median over updates, between the quartiles `low` and `high`; None: not measured, since the
            next larger ones were far from the best. Or an estimate, with its band.
        updates: How many were timed.
    """

    micro_batch: int
    iter_size: int
    samples_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    updates: int = 0

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a share of the median."""
        if self.samples_per_second is None or self.low is None or self.high is None:
            return 0.0
        return (self.high - self.low) / self.samples_per_second


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples per second by ascending micro-batch.

    Attributes:
        kind: `measured` by timed updates, or `estimated` for a card that is not here.
    """

    target_batch: int
    device: str
    speeds: tuple[Speed, ...]
    kind: Literal["measured", "estimated"] = "measured"

    @property
    def fastest(self) -> int:
        """The fastest micro-batch; of several, the smallest."""
        rates = self._rates
        return max(rates, key=lambda size: rates[size])

    @property
    def knee(self) -> int:
        """The smallest micro-batch within 2 % of the fastest."""
        rates = self._rates
        return min(size for size, rate in rates.items() if rate >= max(rates.values()) * (1 - KNEE_SHARE))

    @property
    def at_knee(self) -> Speed:
        """The speed of the knee."""
        knee = self.knee
        return next(speed for speed in self.speeds if speed.micro_batch == knee)

    @property
    def note(self) -> Message:
        """The note on the choice of the knee, and on how sure it is."""
        rates, compared = self._rates, (self.knee, self.fastest)
        return message(
            "fastest",
            kind=self.kind,
            fastest=self.fastest,
            chosen=self.knee,
            rates={str(size): rate for size, rate in rates.items()},
            share=KNEE_SHARE,
            largest=max(rates),
            spread=max(speed.spread for speed in self.speeds if speed.micro_batch in compared),
        )

    @property
    def _rates(self) -> dict[int, float]:
        """Samples per second by micro-batch, of those that were timed or estimated."""
        rates = ((speed.micro_batch, speed.samples_per_second) for speed in self.speeds)
        return {size: rate for size, rate in rates if rate is not None}


def measure_throughput(
    time_update: Callable[[int], float], target_batch: int, sizes: Sequence[int], device: str
) -> Throughput:
    """Time real updates with each of `sizes`, none of which is above the plan's ceiling.

    Args:
        time_update: Makes one update in micro-batches of the given size, and returns its seconds.
        target_batch: Samples per update.
        sizes: The micro-batches, ascending.
        device: The name of the device.
    """
    timed = _time_sizes(time_update, sizes[::-1])
    speeds = []
    for size in sizes:
        speed = Speed(micro_batch=size, iter_size=len(split_evenly(target_batch, size)))
        if size in timed:
            rates = [target_batch / seconds for seconds in timed[size]]
            low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
            speed = replace(speed, samples_per_second=median, low=low, high=high, updates=len(rates))
        speeds.append(speed)
    return Throughput(target_batch=target_batch, device=device, speeds=tuple(speeds))


def _time_sizes(time_update: Callable[[int], float], sizes: Sequence[int]) -> dict[int, list[float]]:
    """Return seconds of updates by size: at least three of each, and more if they are short.

    The largest come first; after two in a row that are far behind the best, smaller ones are omitted. Then the sizes
    take turns, so that a drifting clock affects all of them alike.
    """
    timed: dict[int, list[float]] = {}
    behind = 0
    for size in sizes:
        for _ in range(1 if timed else _WARM_UP_UPDATES):
            time_update(size)
        timed[size] = [time_update(size)]
        behind = behind + 1 if timed[size][0] > _FAR_BEHIND * min(taken[0] for taken in timed.values()) else 0
        if behind >= _IN_A_ROW:
            break

    def needs_more(seconds: Sequence[float]) -> bool:
        return len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _ENOUGH_SECONDS)

    while waiting := [size for size, seconds in timed.items() if needs_more(seconds)]:
        for size in waiting:
            timed[size].append(time_update(size))
    return timed


def estimate_seconds(cost: UpdateCost, rates: CardRates, parts: Sequence[int], *, precision: str = "fp32") -> float:
    """Estimate the seconds of an update by `parts`: its work on the card, what it moves, and its work on the host.

    Products take time by their FLOPs, all else on the card by the bytes that it reads and writes; where the host takes
    longer to launch the operators of a micro-batch, that counts. The number is one to compare with others: a real one
    may differ by a factor of `BAND`, and a ratio between cards by `RATIO_BAND`.

    Args:
        cost: What the update costs.
        rates: What the card can do.
        parts: The micro-batches of the update, in samples.
        precision: `fp32`, `bf16` or `fp16`.
    """
    major, _ = rates.capability
    # Volta and Turing have tensor cores for fp16 alone: they compute bf16 as fp32.
    in_half = precision == "fp16" or (precision == "bf16" and major >= 8)
    flops = _REACHED * (rates.tensor_flops if in_half else rates.fp32_flops)

    def busy(take: Callable[[Amount], float]) -> float:
        computing = take(cost.flops) / flops + take(cost.card_bytes) / (_REACHED_BYTES * rates.memory_bytes)
        return max(computing, take(cost.kernels) * _LAUNCH_SECONDS)

    computing = busy(lambda amount: amount.update)
    for size, count in Counter(parts).items():
        computing += count * busy(partial(Amount.of_part, size=size))
    moving = cost.moved_bytes.of(parts) / _LINK_BYTES.get(major, _LATER_LINK_BYTES)
    return computing + moving + cost.host_bytes.of(parts) / _HOST_BYTES


def estimate_throughput(
    cost: UpdateCost, rates: CardRates, schedules: Sequence[Sequence[int]], *, device: str, precision: str
) -> Throughput:
    """Estimate samples per second by the largest micro-batch.

    Args:
        cost: As of `estimate_seconds`, like `rates` and `precision`.
        rates: What the card can do.
        schedules: The parts of an update by ascending micro-batch.
        device: The name of the card.
        precision: `fp32`, `bf16` or `fp16`.
    """
    speeds = []
    for parts in schedules:
        rate = sum(parts) / estimate_seconds(cost, rates, parts, precision=precision)
        size, iter_size = max(parts), len(parts)
        speed = Speed(micro_batch=size, iter_size=iter_size, samples_per_second=rate, low=rate / BAND, high=rate * BAND)
        speeds.append(speed)
    return Throughput(target_batch=sum(schedules[-1]), device=device, speeds=tuple(speeds), kind="estimated")
