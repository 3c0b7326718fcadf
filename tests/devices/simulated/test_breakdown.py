"""The peak in parts: they add up to it, to the byte, and what is planted in a model is found where it was planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from held_bytes import most_held
from planted_net import DEPTH, NET, PARAMETERS, WEIGHT, WIDTH

from autoaccum.devices.explanation import CATEGORIES
from autoaccum.devices.simulated.breakdown import break_down, largest, module_shares
from autoaccum.devices.simulated.explaining import draw_timeline
from autoaccum.units import MIB

CONVOLUTIONAL = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    def forward(self, x):
        return x + self.two(self.act(self.norm(self.one(x))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*(Block(16) for _ in range(3)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4))
    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))
model = Net
def batch(n): return torch.randn(n, 3, 32, 32), torch.randint(0, 4, (n,))
"""
TRANSFORMER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3))
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers: x = self.run(layer, x)
        return self.head(x)
    def run(self, layer, x):
        return layer(x)
model = Net
def batch(n): return torch.randint(0, 500, (n, 32))
def loss(model, tokens): return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
del globals()["criterion"]
"""
RECURRENT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(32, 64, 2, batch_first=True, dropout=0.1), nn.Linear(64, 4)
    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])
model = Net
def batch(n): return torch.randn(n, 50, 32), torch.randint(0, 4, (n,))
"""
AGAIN = "Net.run = lambda net, layer, x: checkpoint(layer, x, use_reentrant={})\n"
HALF = "whole = Net\ndef model(): return whole().to(torch.bfloat16)\n"
WORKLOADS: Mapping[str, tuple[str, str | None]] = {
    "convolutional": (CONVOLUTIONAL, None),
    "convolutional-bf16": (CONVOLUTIONAL, "bf16"),
    "transformer": (TRANSFORMER, None),
    "transformer-bf16": (TRANSFORMER, "bf16"),
    "transformer-fp16": (TRANSFORMER, "fp16"),
    "transformer-half": (TRANSFORMER + HALF, None),
    "transformer-checkpointed": (TRANSFORMER + AGAIN.format(False), "bf16"),
    "transformer-checkpointed-reentrant": (TRANSFORMER + AGAIN.format(True), None),
    "transformer-kept": (TRANSFORMER + "keeps = ['outputs', 'ema']\nevaluation_batch = 4\n", None),
    "recurrent": (RECURRENT, None),
    "recurrent-bf16": (RECURRENT, "bf16"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_categories_and_modules_add_up_to_the_peak(explained: Callable[..., Any], name: str) -> None:
    lines, precision = WORKLOADS[name]
    found = explained(lines, precision, size=8)
    explanation, trace = found.explanation, found.labelled.trace
    assert tuple(explanation.categories) == CATEGORIES
    assert all(held >= 0 for held in explanation.categories.values())
    assert sum(explanation.categories.values()) == explanation.peak_bytes == found.replays.peak_bytes(trace)
    shares = module_shares(found.ledger, found.ledger.peak_at)
    held = sum(share.bytes for share in shares)
    assert (
        held
        == explanation.peak_bytes - explanation.categories["unused"]
        == most_held(found.labelled.trace.events, found.ledger.demand.sizes)
    )
    for category in CATEGORIES[:-1]:
        assert sum(share.categories.get(category, 0) for share in shares) == explanation.categories[category]
    assert explanation.modules == largest(shares)
    assert len(explanation.modules) <= 10


@pytest.mark.parametrize("name", ["convolutional", "transformer-bf16"])
def test_the_timeline_shows_the_peak_that_is_explained(explained: Callable[..., Any], name: str) -> None:
    found = explained(*WORKLOADS[name], size=8)
    timeline = draw_timeline(found.ledger, found.replays.reserved_bytes(found.labelled.trace), points=50)
    categories = {category: held[timeline.peak_at] for category, held in timeline.categories.items()}
    assert {**categories, "unused": found.explanation.categories["unused"]} == found.explanation.categories
    assert max(timeline.reserved_bytes) == found.explanation.peak_bytes
    assert len(timeline.reserved_bytes) <= 50


SAMPLES = 1024
ACTIVATION = 4 * SAMPLES * WIDTH
Held = dict[tuple[str, str], int]


def by_module(found: Any) -> Held:
    """What each module holds at the peak by category, not joined."""
    held: Held = {}
    for block, category in found.ledger.alive(found.ledger.peak_at):
        key = found.path(found.ledger.purposes[block].module), category
        held[key] = held.get(key, 0) + found.ledger.demand.sizes[block]
    return held


def moved(explained: Callable[..., Any], lines: str) -> Held:
    """What `lines` change of what the modules of `NET` hold at the peak."""
    plain, changed = explained(NET, size=SAMPLES), explained(NET + lines, size=SAMPLES)
    assert (plain.explanation.phase, plain.explanation.op) == (changed.explanation.phase, changed.explanation.op)
    before, after = by_module(plain), by_module(changed)
    found = {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}
    for category in CATEGORIES[:-1]:
        difference = changed.explanation.categories[category] - plain.explanation.categories[category]
        assert difference == sum(held for (_, kind), held in found.items() if kind == category)
    return {key: held for key, held in found.items() if held}


def changing(what: str) -> str:
    return f"def model():\n    net = Net()\n    {what}\n    return net\n"


def test_one_more_buffer_is_its_module_s_parameter(explained: Callable[..., Any]) -> None:
    buffer = changing(f"net.deep[2].register_buffer('table', torch.zeros({5 * MIB}))")
    assert moved(explained, buffer) == {("deep.2", "parameters"): 20 * MIB}
    plain, changed = explained(NET, size=SAMPLES), explained(NET + buffer, size=SAMPLES)
    assert changed.explanation.peak_bytes - plain.explanation.peak_bytes == 20 * MIB  # A segment of its own.


def test_another_optimizer_adds_state_to_who_has_parameters(explained: Callable[..., Any]) -> None:
    momentum = "def optimizer(params):\n    return torch.optim.SGD(params, lr=0.1, momentum=0.9)\n"
    found = moved(explained, momentum)
    assert sum(found.values()) == PARAMETERS
    layers = {(f"deep.{layer}.0", "optimizer_state"): WEIGHT for layer in range(DEPTH)}
    ends = {("first", "optimizer_state"): 4 * 9 * WIDTH, ("last", "optimizer_state"): 4 * (4 * WIDTH + 4)}
    assert found == {**layers, **ends}


def test_a_wider_layer_is_found_in_its_weights_and_what_it_gives(explained: Callable[..., Any]) -> None:
    wide = 64

    def with_bottleneck(width: int) -> str:
        layers = f"nn.Linear({WIDTH}, {width}, bias=False), nn.Sigmoid(), nn.Linear({width}, {WIDTH}, bias=False)"
        return changing(f"net.deep[1] = Block({layers}, nn.Tanh())")

    narrow, wider = (moved(explained, with_bottleneck(width)) for width in (32, 32 + wide))
    found = {key: wider[key] - narrow.get(key, 0) for key in wider}
    weights = {
        (f"deep.1.{layer}", category): 4 * WIDTH * wide for layer in (0, 2) for category in ("parameters", "gradients")
    }
    given = {("deep.1.1", "activations"): 4 * SAMPLES * wide}
    assert {key: held for key, held in found.items() if held and key[0].startswith("deep.1.")} == {**weights, **given}
    assert {key: held for key, held in found.items() if held and not key[0].startswith("deep.1.")} == {}


def test_one_more_saved_activation_is_found_in_the_module_that_made_it(explained: Callable[..., Any]) -> None:
    saved = "class Saves(nn.Module):\n    def forward(self, x): return torch.sigmoid(x)\n"
    planted = saved + changing("net.deep[3].append(Saves())")
    assert moved(explained, planted) == {("deep.3.2", "activations"): ACTIVATION}


def test_a_module_without_memory_of_its_own_holds_nothing(explained: Callable[..., Any]) -> None:
    assert moved(explained, changing("net.deep[3].append(nn.Identity())")) == {}


def test_the_moment_is_told_with_its_operator_and_module(explained: Callable[..., Any]) -> None:
    found = explained(NET, size=SAMPLES).explanation
    assert found.phase == "backward"
    assert found.op.startswith("aten.")
    assert found.module.startswith("deep.5")
    assert found.card == "rtx3090 (simulated)"
    assert found.parts == (SAMPLES, SAMPLES)


def test_shares_grow_as_blocks_do(explained: Callable[..., Any]) -> None:
    small, large, asked = (explained(NET, size=size) for size in (512, 768, 1024))
    growth = (small.ledger.demand, large.ledger.demand)
    explanation = break_down(asked.ledger, card="any", peak_bytes=1 << 30, context_bytes=0, growth=growth)
    by_name = {share.name: share for share in explanation.modules}
    tanh, linear = by_name["deep.*.1"], by_name["deep.*.0"]
    assert (tanh.count, tanh.bytes_per_sample) == (5, 5 * 4 * WIDTH)
    assert linear.bytes_per_sample == 0
    assert linear.count >= DEPTH - 1  # One may hold the workspace of its product.
    assert linear.categories == dict.fromkeys(("parameters", "gradients"), linear.count * WEIGHT)
    # Of other events, and of a single size, nothing is known.
    other = explained(NET + changing("net.deep[3].append(nn.Tanh())"), size=512).ledger.demand
    for unusable in ((small.ledger.demand, other), (small.ledger.demand, small.ledger.demand)):
        found = break_down(asked.ledger, card="any", peak_bytes=1 << 30, context_bytes=0, growth=unusable)
        assert {share.bytes_per_sample for share in found.modules} == {None}


@pytest.mark.parametrize("parts", [[8], [8, 3], [4, 4, 4]], ids=str)
def test_any_schedule_can_be_broken_down(explained: Callable[..., Any], parts: list[int]) -> None:
    found = explained(*WORKLOADS["transformer-half"], parts=parts)
    assert sum(found.explanation.categories.values()) == found.explanation.peak_bytes
    # Sums in float32 are for more than one micro-batch; otherwise a gradient is as its parameter is.
    held = found.before("clip")
    assert held["gradients"] == held["parameters"] * (1 if len(parts) == 1 else 2)
    assert found.before("backward")["outputs"] == 0
