"""Training with savers is training without them, and what is saved resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import UsageError


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))


def train(run_dir: Path | None = None, steps: int = 6, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(36, 8, dtype=dtype), torch.randint(0, 8, (36,)))
    model = nn.Sequential(*(Block() for _ in range(3))).to(dtype)
    options = {"optimizer": "AdamW", "loss": nn.CrossEntropyLoss(), "micro_batch": 5, "seed": 3, **options}
    result = autoaccum.fit(model, data, target_batch=12, steps=steps, run_dir=run_dir, progress=False, **options)
    return result, model.state_dict()


def test_weights_are_those_of_a_training_without_savers(tmp_path: Path) -> None:
    savers = ["recompute=2", "offload-gradients", "offload-optimizer"]
    _, expected = train()
    train(tmp_path / "run", steps=3, savers=savers)
    result, weights = train(tmp_path / "run", savers=savers)
    assert result.resumed_from is not None
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
    result, weights = train(tmp_path / "run", steps=7)  # Without them, from the same folder.
    assert result.updates == 7


def test_weights_that_a_checkpoint_would_round_are_refused() -> None:
    with pytest.raises(UsageError, match="offload-optimizer keeps half-precision weights in float32"):
        train(dtype=torch.bfloat16, savers="offload-optimizer")


DEEP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(2)))

def batch(size):
    return torch.randn(size, 4096, 16)

def loss(model, batch):
    return model(batch).square().mean()

dataset = [torch.randn(4096, 16) for _ in range(4)]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_a_plan_chooses_savers_and_the_training_has_them(tmp_path: Path) -> None:
    (tmp_path / "many_layers.py").write_text(DEEP)
    options: dict[str, Any] = {"target_batch": 1, "savers": "auto", "device": "cpu", "progress": False}
    run: dict[str, Any] = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    result = autoaccum.fit(tmp_path / "many_layers.py", steps=1, memory="15MiB", **options, **run)
    planned = autoaccum.Plan.load(tmp_path / "run" / "plan.json")
    (word,) = planned.workload["savers"]
    assert word.startswith("recompute=")
    assert (result.updates, result.warnings) == (1, ())
    again = autoaccum.fit(tmp_path / "many_layers.py", steps=2, **options, **run)
    assert again.updates == 2


def test_what_is_known_already_is_not_chosen() -> None:
    with pytest.raises(UsageError, match="and a plan or a micro-batch is given"):
        train(savers="auto")
