"""What an update costs beside memory of the device, and the rates of a card that turn it into time; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from autoaccum.devices.base import Device


@dataclass(frozen=True, kw_only=True)
class Amount:
    """An amount that grows with each sample of an update and each micro-batch, beside what each update has once."""

    sample: float = 0.0
    part: float = 0.0
    update: float = 0.0

    def of(self, parts: Sequence[int]) -> float:
        """Return the amount of an update by `parts`, in samples.

        >>> Amount(sample=10, part=3, update=1).of([4, 4])
        87.0
        """
        return float(self.sample * sum(parts) + self.part * len(parts) + self.update)

    def of_part(self, size: int) -> float:
        """Return the amount of one micro-batch."""
        return float(self.sample * size + self.part)


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """The cost of an update, counted while the Accumulator that trains makes one on a simulated card.

    Attributes:
        flops: Floating-point operations, as `torch.utils.flop_counter` counts them: of matrix products, convolutions
            and attention, those of recomputed blocks included.
        moved_bytes: The bytes that are copied from the card to the host, or back: of batches, and by savers.
        host_bytes: The bytes that operators read and write in host memory, as an optimizer that updates there.
        card_bytes: The bytes that operators without FLOPs read and write in the card's memory.
        kernels: Operators that the host launches on the card.
    """

    flops: Amount
    moved_bytes: Amount
    host_bytes: Amount
    card_bytes: Amount = Amount()
    kernels: Amount = Amount()


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """The most that a card can do in a second, by its maker; training reaches a part of it.

    Attributes:
        capability: The compute capability.
        tensor_flops: FLOPs of dense products in fp16 or bf16 that are summed in fp32.
        fp32_flops: The same in fp32, without TF32.
        memory_bytes: Bytes from and to its memory.
        source: Where the numbers are from.
    """

    capability: tuple[int, int]
    tensor_flops: float
    fp32_flops: float
    memory_bytes: float
    source: str


@runtime_checkable
class SavingDevice(Protocol):
    """A device that can run the workload with other savers than its own."""

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        """Use these savers (`options.read_savers`) in all that follows; None: the workload's own."""


@runtime_checkable
class InstalledCard(Protocol):
    """A card of this machine, which can be simulated."""

    def simulation(self) -> Device:
        """Return a device that predicts trials on this card, within the same budget; the caller closes it.

        Raises:
            UsageError: A setting of PyTorch's allocator cannot be simulated.
        """


@runtime_checkable
class CountingDevice(Protocol):
    """A device that can count what an update costs."""

    @property
    def rates(self) -> CardRates:
        """The rates of the card."""

    def count_cost(self, *, limit_seconds: float | None = None) -> UpdateCost:
        """Count the cost of an update with the savers in use.

        Raises:
            WorkloadError, NotMeasuredError: As `Device.inspect`.
        """
