"""Estimate how long an update takes on a card from what it costs: for comparing ways to run it, not for a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from autoaccum.devices.update_cost import Amount, CardRates, UpdateCost
from autoaccum.planning.throughput import Speed, Throughput, find_knee

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
"""The factor by which a number of seconds may be off."""
RATIO_BAND: Final = 1.6
"""The factor by which a ratio between two cards may be off, for the same workload: cards with little power for their
size (L4, RTX 6000 Ada, H100 PCIe) reach less of their rates than others do."""


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """The estimated seconds of an update: a number to compare with others, and the band that contains a real one.

    The band is that of one number. Two ways to run the same workload err alike: their ratio is better known than either
    on one card, and to `RATIO_BAND` between cards.
    """

    seconds: float
    least_seconds: float
    most_seconds: float


def estimate_seconds(
    cost: UpdateCost, rates: CardRates, parts: Sequence[int], *, precision: str = "fp32"
) -> SpeedEstimate:
    """Estimate the seconds of an update by `parts`: its work on the card, what it moves, and its work on the host.

    Products take time by their FLOPs, all else on the card by the bytes that it reads and writes; where the host takes
    longer to launch the operators of a micro-batch, that counts. Transfers may run while the card computes, which is
    the lower end of the band.

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
    on_host = cost.host_bytes.of(parts) / _HOST_BYTES
    seconds = computing + moving + on_host
    least = max(computing, moving) + on_host
    return SpeedEstimate(seconds=seconds, least_seconds=least / BAND, most_seconds=seconds * BAND)


def estimate_throughput(
    cost: UpdateCost, rates: CardRates, schedules: Sequence[Sequence[int]], *, device: str, precision: str
) -> Throughput:
    """Estimate samples per second by the largest micro-batch, and the knee.

    Args:
        cost: As of `estimate_seconds`, like `rates` and `precision`.
        rates: What the card can do.
        schedules: The parts of an update by ascending micro-batch.
        device: The name of the card.
        precision: `fp32`, `bf16` or `fp16`.
    """
    speeds = []
    for parts in schedules:
        samples, update = sum(parts), estimate_seconds(cost, rates, parts, precision=precision)
        speeds.append(
            Speed(
                micro_batch=max(parts),
                iter_size=len(parts),
                samples_per_second=samples / update.seconds,
                low=samples / update.most_seconds,
                high=samples / update.least_seconds,
            )
        )
    fastest, knee = find_knee(speeds)
    return Throughput(
        target_batch=sum(schedules[-1]),
        device=device,
        speeds=tuple(speeds),
        fastest=fastest,
        knee=knee,
        kind="estimated",
    )
