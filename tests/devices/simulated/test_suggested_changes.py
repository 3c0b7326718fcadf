"""Suggested changes: which ones, and the traces with one applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices.simulated.simulation_requests import SuggestChanges, TraceParts
from autoaccum.devices.simulated.workload_variants import suggest_changes
from autoaccum.simulation.cards import find_card
from autoaccum.sources.workload import Workload

PARTS = (6, 5)

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inner, self.head, self.run = nn.Linear(8, 64), nn.Linear(64, 4), run
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        x = self.inner(x[:, None].expand(-1, 50, -1))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean(1))

def plain(block, x):
    return block(x, scale=0.5)

def saved(block, x):
    return checkpoint(block, x, scale=0.5, use_reentrant=False)

def model():
    return Model(plain)
"""
BY_HAND = {
    "bf16": 'precision = "bf16"\n',
    "checkpoint": "def model():\n    return Model(saved)\n",
    "foreach=False": "def optimizer(params):\n    return torch.optim.AdamW(params, lr=0.1, foreach=False)\n",
    "SGD": 'optimizer = "SGD"\n',
}
OWN = "def optimizer(params):\n    return torch.optim.AdamW(params, lr=0.1)\n"


@pytest.mark.parametrize("change", BY_HAND)
def test_an_applied_change_equals_one_made_by_hand(simulated: Any, change: str) -> None:
    changed = simulated(BLOCKS + OWN)(TraceParts(parts=PARTS, change=change))
    assert changed == simulated(BLOCKS + OWN + BY_HAND[change])(TraceParts(parts=PARTS))


def test_the_suggested_blocks_are_checkpointed(simulated: Any) -> None:
    frozen = "    net.blocks[2].requires_grad_(False)\n    net.blocks[3].requires_grad_(False)\n    return net\n"
    plain = f"def model():\n    net = Model(plain)\n{frozen}"
    some = f"""
def some(block, x):
    return saved(block, x) if block.up.weight.requires_grad else plain(block, x)

def model():
    net = Model(some)
{frozen}"""
    ask = simulated(BLOCKS + OWN + plain)
    suggestions = {suggestion.name: suggestion.what for suggestion in ask(SuggestChanges())}
    assert suggestions["checkpoint"].startswith("run the 2 blocks blocks.{0,1} again")
    changed = ask(TraceParts(parts=PARTS, change="checkpoint"))
    assert changed == simulated(BLOCKS + OWN + some)(TraceParts(parts=PARTS))


COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(8, 8)), 0
    def forward(self, x):
        self.calls += 1
        times = 1 + self.calls % 2
        return torch.tanh(x.repeat(1, times)) @ self.weight.repeat(times, 1)

def model():
    return nn.Sequential(Counting(), Counting(), nn.Linear(8, 4))
"""


def test_a_change_that_fails_says_why(simulated: Any) -> None:
    failed = simulated(COUNTING)(TraceParts(parts=PARTS, change="checkpoint"))
    assert failed.message.startswith("micro-batch 6 with checkpoint on the simulated card, in backward raised Checkp")


# --- suggestions -------------------------------------------------------------------------------------------------


def suggestions(
    model: nn.Module, optimizer: Callable[..., Any] = torch.optim.AdamW, *, card: str = "rtx3090", **fields: Any
) -> dict[str, str]:
    workload = Workload(model=model, batch=lambda size: None, criterion=nn.MSELoss(), **fields)
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    return {suggestion.name: suggestion.what for suggestion in suggest_changes(workload, model, made, find_card(card))}


class Wide(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.norm(self.layer(x)))


def test_all_suggestions_for_plain_training() -> None:
    assert suggestions(nn.Sequential(Wide(), Wide(), nn.Linear(8, 8))) == {
        "bf16": "forward and backward in bf16 by autocast (--precision bf16)",
        "checkpoint": "run the 2 blocks {0,1} again in backward (--savers recompute)",
        "foreach=False": "AdamW(..., foreach=False), which updates one parameter after the other",
        "SGD": "SGD without momentum in place of AdamW (--optimizer SGD)",
    }


@pytest.mark.parametrize(
    ("fields", "card", "half"),
    [
        ({}, "rtx3090", ["bf16"]),
        ({}, "t4", ["fp16"]),
        ({"precision": "fp16"}, "rtx3090", ["bf16"]),
        ({"precision": "fp16"}, "t4", []),
        ({"precision": "bf16"}, "rtx3090", []),
        ({"precision": "bf16"}, "t4", []),
    ],
)
def test_the_suggested_precision_follows_the_card(fields: dict[str, Any], card: str, half: list[str]) -> None:
    found = suggestions(nn.Linear(2, 2), card=card, **fields)
    assert [name for name in found if name in ("bf16", "fp16")] == half


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (torch.optim.AdamW, ["foreach=False", "SGD"]),
        (torch.optim.SGD, ["foreach=False"]),
        (lambda params: torch.optim.SGD(params, momentum=0.9), ["foreach=False", "SGD"]),
        (torch.optim.RMSprop, ["foreach=False", "SGD"]),
        (torch.optim.Adafactor, ["SGD"]),
        (lambda params: torch.optim.AdamW(params, foreach=False), ["SGD"]),
        (lambda params: torch.optim.AdamW(params, fused=True), ["SGD"]),
        (lambda params: torch.optim.SGD(params, fused=True), []),
        (type("Own", (torch.optim.AdamW,), {}), ["SGD"]),
    ],
    ids=["AdamW", "SGD", "momentum", "RMSprop", "Adafactor", "one by one", "fused", "fused SGD", "subclass"],
)
def test_changes_that_are_made_already_are_not_suggested(optimizer: Callable[..., Any], names: list[str]) -> None:
    assert [name for name in suggestions(nn.Linear(2, 2), optimizer) if name != "bf16"] == names
