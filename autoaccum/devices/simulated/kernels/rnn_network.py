"""The form of a recurrent network: what `torch.lstm` and its kin are told besides tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """In the order of their parameters.

    Attributes:
        has_biases: Whether each linear map has one.
        num_layers: How many layers.
        dropout: Probability between layers.
        train: Whether it is in training mode.
        bidirectional: Whether each layer has a second direction.
        batch_first: Whether the first dimension is the batch, which packed sequences are not asked.
    """

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @property
    def directions(self) -> int:
        """How many each layer has."""
        return 2 if self.bidirectional else 1
