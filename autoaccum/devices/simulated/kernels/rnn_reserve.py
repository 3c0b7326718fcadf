"""What cuDNN keeps of a recurrent network between forward and backward: a rule without PyTorch."""

from __future__ import annotations

from typing import Literal, TypeAlias

Cell: TypeAlias = Literal["lstm", "gru", "rnn"]

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""As cuDNN numbers them (`cudnnRNNMode_t`)."""

CELLS: tuple[Cell, ...] = ("rnn", "rnn", "lstm", "gru")
"""Which of them are alike."""

STORED = {"lstm": 5, "gru": 6, "rnn": 1}
"""Values a layer stores for each hidden unit and step: for `lstm` four gates and the cell. `rnn` is a guess."""

MEASURED_PERCENT = 25
"""By how much of it the reserve may be off in the form that was measured, with an older cuDNN."""

GUESSED_PERCENT = 50
"""Likewise with dropout, a projection or a second direction, which were not."""

PLAIN_PERCENT = 100
"""Likewise of `rnn`, for which nothing was."""


def reserve_bytes(
    cell: Cell,
    *,
    rows: int,
    hidden_size: int,
    num_layers: int,
    directions: int,
    element_bytes: int,
    dropout: bool = False,
    projection: int = 0,
) -> int:
    """The bytes of `reserveSpaceSize` (`cudnnGetRNNTempSpaceSizes`, whose source is closed).

    Derived from two measurements in pytorch/pytorch#2895 (cuDNN on a P100, fp32, 4 layers of 320 units, 25,000 rows):
    736,000,000 bytes for an LSTM and 864,000,000 for a GRU, which are 5 and 6 values per unit, row and layer, and the
    outputs of all layers but the last.

    Args:
        cell: What kind of network.
        rows: Steps times samples; the sum of the batch sizes when packed.
        hidden_size: Units of a direction.
        num_layers: Layers.
        directions: 2 when bidirectional.
        element_bytes: Bytes of a value.
        dropout: Whether outputs between layers are dropped, which stores them once more.
        projection: Size of an LSTM's projection, 0 without one.
    """
    outputs = (projection or hidden_size) * (num_layers - 1) * (2 if dropout else 1)
    projected = projection * num_layers
    return rows * directions * element_bytes * (STORED[cell] * hidden_size * num_layers + outputs + projected)


def band_percent(cell: Cell, *, layers: int, directions: int, dropout: bool, projection: int) -> int:
    """How far off `reserve_bytes` may be, either way, in percent of it."""
    if cell == "rnn":
        return PLAIN_PERCENT
    measured = directions == 1 and not projection and not (dropout and layers > 1)
    return MEASURED_PERCENT if measured else GUESSED_PERCENT
