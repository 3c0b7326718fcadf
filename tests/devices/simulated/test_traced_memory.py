"""What people do to save memory, and what costs some, moves the traced bytes by what it should."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from planted_net import DEPTH, NET, WEIGHT, WIDTH

from autoaccum.devices.simulated.trace import Trace

SAMPLES = 64
ACTIVATION = 4 * SAMPLES * WIDTH


@pytest.fixture
def trace(simulated: Callable[..., Any]) -> Callable[..., Trace]:
    def make(lines: str = "", precision: str | None = None) -> Trace:
        reply = simulated(NET + lines, precision)("trace", parts=[SAMPLES, SAMPLES])
        assert "failure" not in reply, reply["failure"]
        return Trace.from_record(reply["trace"])

    return make


def held(trace: Trace) -> list[int]:
    """The bytes of tensors that are alive after each event."""
    sizes = [size if isinstance(size, int) else 0 for size in trace.sizes]
    return list(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in trace.events))


def peak(trace: Trace) -> int:
    return max(held(trace))


def count(trace: Trace, size: int) -> int:
    return trace.sizes.count(size)


def test_checkpointing_keeps_no_activation_but_computes_them_again(trace: Callable[..., Trace]) -> None:
    plain = trace()
    for reentrant in (False, True):
        call = f"checkpoint(self.deep, x, use_reentrant={reentrant})"
        spared = trace(f"def run(self, x):\n    return {call}\nNet.run = run\n")
        assert after_forward(plain) - after_forward(spared) >= (DEPTH - 1) * ACTIVATION
        assert count(spared, ACTIVATION) >= count(plain, ACTIVATION) + 3 * (2 * DEPTH - 1)


def after_forward(trace: Trace) -> int:
    """The most that is held when the last forward ends."""
    ends = [index for index, phase in trace.phases if phase == "backward"]
    return held(trace)[ends[-1] - 1]


def test_what_is_saved_on_the_host_is_not_on_the_card(trace: Callable[..., Trace]) -> None:
    plain = trace()
    saved = "with torch.autograd.graph.save_on_cpu(pin_memory=True): return self.deep(x)"
    spared = trace(f"def run(self, x):\n    {saved}\nNet.run = run\n")
    assert after_forward(plain) - after_forward(spared) >= (DEPTH - 1) * ACTIVATION


def test_an_average_of_the_weights_takes_their_bytes(trace: Callable[..., Trace]) -> None:
    plain = trace()
    averaged = trace(
        "class Averaged(Net):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.mean = copy.deepcopy(self.deep).requires_grad_(False)\n"
        "model = Averaged\n"
    )
    assert peak(averaged) - peak(plain) == DEPTH * WEIGHT


def test_tied_weights_are_there_once(trace: Callable[..., Trace]) -> None:
    plain = trace()
    tied = trace(
        "class Tied(Net):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        for layer in self.deep: layer[0].weight = self.deep[0][0].weight\n"
        "model = Tied\n"
    )
    # A weight and its gradient each; one weight's further gradients are added up as they come.
    assert (DEPTH - 2) * 2 * WEIGHT <= peak(plain) - peak(tied) <= (DEPTH - 1) * 2 * WEIGHT


def test_frozen_weights_have_no_gradients(trace: Callable[..., Trace]) -> None:
    plain = trace()
    frozen = trace(
        "class Frozen(Net):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first.requires_grad_(False); self.deep.requires_grad_(False)\n"
        "model = Frozen\n"
    )
    assert peak(plain) - peak(frozen) >= DEPTH * WEIGHT
    assert count(frozen, WEIGHT) == DEPTH


def test_optimizers_keep_what_they_are_known_to_keep(trace: Callable[..., Trace]) -> None:
    names = {"SGD(params, lr=0.1)": 0, "SGD(params, lr=0.1, momentum=0.9)": 1, "AdamW(params)": 2, "Adagrad(params)": 1}
    for made, states in names.items():
        found = trace(f"def optimizer(params):\n    return torch.optim.{made}\n")
        resident = held(found)[found.last_update - 1]
        assert resident // WEIGHT == DEPTH * (1 + states)


def test_half_precision_halves_what_is_saved_and_casts_weights_once(trace: Callable[..., Trace]) -> None:
    plain, half = trace(), trace(precision="bf16")
    assert count(half, WEIGHT // 2) >= 3 * DEPTH  # Of every micro-batch: a weight cast, kept until the forward ends.
    assert after_forward(plain) - after_forward(half) >= DEPTH * ACTIVATION // 2 - DEPTH * WEIGHT // 2
    scaled = trace(precision="fp16")
    assert len(scaled.events) > len(half.events)
