"""The workspace of cuDNN's recurrent networks, whose size cuDNN reports only on a card (`cudnnGetRNNTempSpaceSizes`).

The formulas were derived from the answers of cuDNN 9.19 on an H100 for some 4,000 networks, a part of which is in
tests/simulation/operators/recurrent_spaces.csv. Of 2,315 that train with the usual kernels, 93 in 100 are right to
3 %; those further off have packed steps, projections, or more than 300 steps.
"""

from __future__ import annotations

from typing import NamedTuple

from autoaccum.simulation.cards import Card

_MOST_STEPS = 300
"""The steps up to which forward lays out all inputs and gates of a layer: 256 among what was asked, and not 400."""
_OF_LAYER = 8 << 20


class RecurrentCall(NamedTuple):
    """A training call, for steps x samples = `rows`, with a projection if `projected` is above 0.

    `mode` is an index of `rnn.MODES`; `drops` and `packed` are 0 or 1. `persistent` is 1 for kernels for few hidden
    units, and 2 for aligned sizes: then some cards keep the weights of the one layer in their processors.
    """

    rows: int
    samples: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    directions: int
    mode: int
    element_bytes: int
    drops: int
    packed: int
    persistent: int

    @property
    def gates(self) -> int:
        """Return the gates of a layer."""
        return (1, 1, 4, 3)[self.mode]

    @property
    def steps(self) -> int:
        """Return the steps of a sample, on average."""
        return self.rows // max(1, self.samples)


def is_persistent(call: RecurrentCall, card: Card) -> bool:
    """Return whether PyTorch asks for kernels that keep the weights (`use_persist_device_heuristics` in RNN.cpp)."""
    if call.persistent < 2:
        return bool(call.persistent)
    (major, minor), samples = card.capability, call.samples
    if major == 7:
        often = samples == 8 or (samples % 16 == 0 and samples not in (80, 112))
        least = 10 if samples <= 32 else 20 if samples <= 96 else 40
        return minor != 5 and often and samples <= 128 and call.steps >= least
    fits = major >= 8 and minor != 6 and card.multiprocessors >= 98 and call.gates != 3
    return fits and samples % 8 == 0 and samples <= 128 and (call.gates == 4 or samples < 96 or call.hidden < 896)


def recurrent_bytes(call: RecurrentCall, *, persistent: bool = False) -> int:
    """Return 8 MiB for each layer and direction, copies of weights and states, and the largest of several passes."""
    units, outputs, gates, is_lstm = call.hidden, call.projected or call.hidden, call.gates, call.gates == 4
    weights = gates * units * (call.inputs + outputs + (call.layers - 1) * (call.directions + 1) * outputs)
    weights += call.layers * call.projected * units
    if persistent:
        states, values = (8 if is_lstm else 6) * units, _persistent_values(call)
    else:
        states, values = 8 * units + 2 * outputs if is_lstm else 5 * units, _usual_values(call)
        states -= call.packed * (4 if is_lstm else 2) * units
    copied = call.directions * (weights + call.layers * call.samples * states)
    return _OF_LAYER * call.layers * call.directions + call.element_bytes * (copied + values) + 768


def _persistent_values(call: RecurrentCall) -> int:
    read, hidden, several = call.rows * call.inputs, call.rows * call.hidden, call.layers > 1
    if call.gates == 4:
        return max(read + 21 * hidden, 3 * read + (15 + several) * hidden)
    gates = 5 * (call.gates == 3)
    return max(2 * read + (13 + gates) * hidden, 3 * read + (12 + gates) * hidden) + several * hidden


def _usual_values(call: RecurrentCall) -> int:
    """Return the largest of forward, the gradients of values, and those of weights, and what goes between layers."""
    read, hidden, state = call.rows * call.inputs, call.rows * call.hidden, call.samples * call.hidden
    projected = call.rows * call.projected * call.directions
    dropped = call.drops * call.rows * (call.projected or call.hidden) * call.directions
    padding = call.packed * (read + call.directions * hidden)  # Packed steps need no copies without their padding.
    several, is_lstm = call.layers > 1, call.gates == 4
    if call.directions == 2:
        between = 4 * call.layers * state
        forward = read + (2 * call.gates + 6) * hidden + dropped
        data, weight = 2 * read + (12 if several else 10) * hidden, 6 * read + (8 if several else 6) * hidden
    else:
        kept = min((9 if is_lstm else 8) * call.layers + 8, call.steps + call.layers)
        between = kept * state if several else hidden
        forward = (read + (call.gates + 1) * hidden + dropped) * (call.steps <= _MOST_STEPS) - between
        data, weight = 4 * hidden if is_lstm else 2 * read + 3 * hidden, 3 * read + 2 * hidden
    return max(forward - padding, data - 2 * padding, weight - 2 * padding) + between + projected
