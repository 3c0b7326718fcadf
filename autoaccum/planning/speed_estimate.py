"""Estimate how long an update takes on a card from what it costs: for comparing ways to run it, not for a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autoaccum.devices.update_cost import UpdateCost

_TENSOR_FLOPS: Final[Mapping[tuple[int, int], int]] = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 512,
    (8, 7): 1024,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
    (12, 1): 512,
}
"""FLOPs per clock and multiprocessor of dense products in fp16 or bf16, summed in fp32, by capability: tensor cores as
in NVIDIA's whitepapers (Volta: 8 of 64 multiply-adds; Ampere GA100: 4 of 256; Hopper: 4 of 512; Blackwell: twice that).
GeForce cards of 8.6, 8.9 and 12.0 sum in fp32 at half the rate; workstation cards of these capabilities do not."""

_PLAIN_FLOPS: Final[Mapping[tuple[int, int], int]] = {(7, 0): 128, (7, 5): 128, (8, 0): 128}
_MOST_PLAIN_FLOPS: Final = 256
"""The same in fp32: 64 or else 128 multiply-adds per clock (CUDA C++ Programming Guide, "Arithmetic Instructions",
"Throughput of Native Arithmetic Instructions"). PyTorch's products in fp32 use no tensor cores unless told to."""

_CLOCK_HZ: Final[Mapping[int, float]] = {7: 1.5e9, 8: 1.4e9, 9: 1.8e9, 10: 1.9e9, 12: 2.4e9}
_CLOCK_BY_CAPABILITY: Final[Mapping[tuple[int, int], float]] = {(8, 6): 1.7e9, (8, 9): 2.5e9}
_OTHER_CLOCK_HZ: Final = 1.8e9
"""Typical boost clocks: V100 1.53 GHz, A100 1.41, RTX 3090 1.70, RTX 4090 2.52, H100 1.83, B200 1.97, RTX 5090 2.41."""

_LINK_BYTES: Final[Mapping[int, float]] = {7: 12e9, 8: 24e9}
_LATER_LINK_BYTES: Final = 48e9
"""Bytes per second in one direction by 16 lanes of PCIe 3, 4 and (from capability 9 on) 5: three quarters of the 15.75,
31.5 and 63 GB/s that the standard allows, as copies from pinned memory reach. Not pinned, they reach about half."""

_HOST_BYTES: Final = 20e9
"""Bytes per second that element-wise operators read and write in host memory; two to eight channels of DDR4 or DDR5
have 40 to 300, of which PyTorch's, one operator after the other, reach a part."""

_REACHED: Final = 0.4
"""The part of the card's rate that training reaches: 46 % for PaLM, 21 % for GPT-3 (Chowdhery et al.,
2022, table 3), nanoGPT about 40 % of an A100; small models and large vocabularies less."""
_BAND: Final = 2.5


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """The estimated seconds of an update: a number to compare with others, and the band that contains a real one.

    The band is that of one number. Two ways to run the same workload on the same card err alike: their ratio is better
    known than either.
    """

    seconds: float
    least_seconds: float
    most_seconds: float


def estimate_seconds(
    cost: UpdateCost, device: Mapping[str, Any], parts: Sequence[int], *, precision: str = "fp32"
) -> SpeedEstimate:
    """Estimate the seconds of an update by `parts`: its FLOPs, what it moves, and its work on the host, in turn.

    Transfers may run while the card computes, which is the lower end of the band.

    Args:
        cost: What the update costs.
        device: The record of the card (`Device.describe`): its `capability` and `multiprocessors`.
        parts: The micro-batches of the update, in samples.
        precision: `fp32`, `bf16` or `fp16`.
    """
    major, minor = device["capability"]
    card = major, minor
    rate = float(_PLAIN_FLOPS.get(card, _MOST_PLAIN_FLOPS))
    # Volta and Turing have tensor cores for fp16 alone: they compute bf16 as fp32.
    if precision == "fp16" or (precision == "bf16" and major >= 8):
        rate = _TENSOR_FLOPS.get(card, 1024)
    clock = _CLOCK_BY_CAPABILITY.get(card) or _CLOCK_HZ.get(major, _OTHER_CLOCK_HZ)
    computing = cost.flops.of(parts) / (_REACHED * rate * clock * device["multiprocessors"])
    moving = cost.moved_bytes.of(parts) / _LINK_BYTES.get(major, _LATER_LINK_BYTES)
    on_host = cost.host_bytes.of(parts) / _HOST_BYTES
    seconds = computing + moving + on_host
    least = max(computing, moving) + on_host
    return SpeedEstimate(seconds=seconds, least_seconds=least / _BAND, most_seconds=seconds * _BAND)
