"""What a loss divides by on a card that is not there: counted from what the host held before anything was moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoaccum
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.simulation import simulate

LAYERS = "nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))"
TABLE = "table = torch.tensor([1.0, 2.0, 0.5, 3.0])\n"
ATTRIBUTE = f"""
del criterion
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.criterion = {LAYERS}, nn.CrossEntropyLoss(weight=table.clone())
    def forward(self, x, y):
        return self.criterion(self.layers(x), y)
model = M
def loss(model, batch):
    return model(*batch) + F.cross_entropy(model.layers(batch[0]), batch[1], weight=table.to(batch[0].device))
def weight(batch): return table[batch[1]].sum()
"""
WEIGHTED = {
    "a table": f"model = {LAYERS}\ncriterion = nn.CrossEntropyLoss(weight=table)",
    "a table on the card": f"model = {LAYERS}\ncriterion = nn.CrossEntropyLoss(weight=table.cuda())",
    "a moved criterion, smoothed": f"model = {LAYERS}\n"
    "criterion = nn.CrossEntropyLoss(weight=table, label_smoothing=0.1, ignore_index=2).to('cuda')",
    "ignored targets": f"model = {LAYERS}\ncriterion = nn.CrossEntropyLoss(ignore_index=2)",
    "a criterion of the model": ATTRIBUTE,
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_counted_and_no_trace_leaves_a_criterion_on_the_card(
    simulated: Callable[..., Any], name: str
) -> None:
    ask = simulated(TABLE + WEIGHTED[name])
    assert "failure" not in (seen := ask("inspect")), seen
    two, five = ask("trace", parts=(2, 2))["trace"], ask("trace", parts=(5, 5))["trace"]
    assert two["events"] == five["events"]
    assert two["phases"] == five["phases"]


def test_a_card_gives_back_what_it_was_given_until_that_is_written_to() -> None:
    with simulate(find_card("rtx3090")):
        table = torch.tensor([1.0, 2.0])
        moved = table.cuda()
        table.zero_()
        assert moved.cpu().tolist() == [1.0, 2.0]
        assert moved.to("cpu", torch.float64).dtype == torch.float64
        moved.mul_(2)
        with pytest.raises(Exception, match="a value is read"):
            moved.cpu().tolist()


def test_a_plan_of_a_loss_with_class_weights(tmp_path: Path) -> None:
    file = tmp_path / "weighted.py"
    head = "import torch\nfrom torch import nn\ndef batch(n): return torch.randn(n, 8), torch.randint(0, 4, (n,))\n"
    file.write_text(head + TABLE + WEIGHTED["a table"])
    plan = autoaccum.plan(file, target_batch=64, gpu="rtx3090", max_micro_batch=16)
    assert plan.micro_batches == (16, 16, 16, 16)
    assert plan.workload["weight"] == "class weights of the targets != -100 (CrossEntropyLoss)"
    assert not [note for note in plan.notes if "traced by itself" in note]
