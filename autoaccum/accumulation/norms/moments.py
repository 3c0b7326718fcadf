"""Mean and variance of a whole, from those of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """The first two moments of what was seen of some channels, in the widest precision their device has.

    Attributes:
        count: Values of each channel.
        mean: Their mean; of shape [channels], like the next.
        squares: The sum of their squared deviations from it.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, count: int, mean: Tensor, variance: Tensor) -> Moments:
        """From a mean and an unbiased variance, which may change afterwards."""
        return cls(count, _widened(mean), _widened(variance).mul_(count - 1))

    def add(self, other: Moments) -> None:
        """Take in what `other` has seen, in place.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        Stanford CS-TR-79-773, 1979.
        """
        both = self.count + other.count
        apart = other.mean - self.mean
        self.mean.add_(apart, alpha=other.count / both)
        self.squares.add_(other.squares).add_(apart.square_(), alpha=self.count * other.count / both)
        self.count = both

    @property
    def variance(self) -> Tensor:
        """Unbiased; there are two values of each channel at least."""
        return self.squares / (self.count - 1)


@dataclass
class Averages:
    """The averages over samples of each sample's own mean and unbiased variance, as InstanceNorm keeps them.

    Attributes:
        count: Samples.
        mean: The average of their means; of shape [channels], like the next.
        variance: The average of their variances.
    """

    count: int
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, count: int, mean: Tensor, variance: Tensor) -> Averages:
        """From averages over `count` samples, which may change afterwards."""
        return cls(count, _widened(mean), _widened(variance))

    def add(self, other: Averages) -> None:
        """Take in what `other` has seen, in place."""
        self.count += other.count
        share = other.count / self.count
        self.mean.lerp_(other.mean, share)
        self.variance.lerp_(other.variance, share)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64, copy=True)
