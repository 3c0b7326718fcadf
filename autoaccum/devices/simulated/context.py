"""Memory a process takes of a card outside PyTorch's allocator: the CUDA context, and kernels as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoaccum.devices.simulated.catalog import Card
from autoaccum.units import KIB, MIB

_BYTES_PER_THREAD = 2 * KIB
_LATE_BYTES_PER_THREAD = KIB // 2
_UNSEEN_KERNELS = 64 * MIB
_UNMEASURED_SHARE = 8

REPORTED: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "NVIDIA GeForce RTX 3090": (
            256 * MIB,
            "torch 2.7 with driver 610, https://github.com/invoke-ai/InvokeAI/issues/9413",
        ),
        "NVIDIA GeForce RTX 4090": (
            428 * MIB,
            "an empty program, driver 580; 384 MiB for an idle torch elsewhere",
        ),
        "NVIDIA RTX 6000 Ada Generation": (426 * MIB, "torch 2.10, https://github.com/unslothai/unsloth-zoo/pull/1053"),
    }
)
"""Contexts that nvidia-smi showed before anything else was done, by what the driver calls the card."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes of a training process that PyTorch's allocator knows nothing of.

    Attributes:
        start_bytes: The context, before any kernel was needed.
        modules_bytes: By how much it grows as kernels are first used, by the time a training step is done.
        band_bytes: How far their sum may be off, either way.
        source: How they are known.
        measured: Whether `start_bytes` was seen on such a card.
    """

    start_bytes: int
    modules_bytes: int
    band_bytes: int
    source: str
    measured: bool

    @property
    def bytes(self) -> int:
        """Return what a training process holds outside the allocator."""
        return self.start_bytes + self.modules_bytes


def context_bytes(card: Card) -> Outside:
    """Estimate what a process with a context on `card` holds outside PyTorch's allocator.

    The context is, for the most part, local memory for every thread that can be resident: 2 KiB for each gives 246 MiB
    on an RTX 3090 (256 reported), 384 on an RTX 4090 (384 and 428) and 426 on an RTX 6000 Ada (426). It grows as
    kernels are first used, which need more of it and room for their code: by half a KiB for each thread in the forward
    passes of language models (`non_torch_memory` in logs of vLLM 0.6 to 0.10: 10 MiB on a T4, 61 on an RTX 3090, 82 on
    an L40S, 102 on an A100, 164 on an H100). Nobody has told of backward passes and convolutions: a part of the band.
    Kernels are taken to be loaded as they are needed, as PyTorch has it since 1.13, and not all at once.
    """
    threads = card.multiprocessors * card.threads_per_multiprocessor
    start, late = threads * _BYTES_PER_THREAD, threads * _LATE_BYTES_PER_THREAD
    band = late // 2 + min(_UNSEEN_KERNELS, start // 2)
    measured = card.title in REPORTED
    if measured:
        start, report = REPORTED[card.title]
        source = f"reported: {report}"
    else:
        band += start // _UNMEASURED_SHARE
        source = "estimated: 2 KiB for each thread that can be resident, as on three cards where it was reported"
    return Outside(start_bytes=start, modules_bytes=late, band_bytes=band, source=source, measured=measured)
