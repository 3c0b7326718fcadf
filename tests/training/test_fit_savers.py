"""Training with savers, those asked for and those added when not even one sample fits, trains the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_training
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from small_blocks import blocks_source
from small_fit import after_update, fit, of_kind
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.fit_events import Updated


class Block(nn.Module):
    """Holds as many samples as `most`, or eight times as many if it is recomputed."""

    most = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most * (8 if "forward" in vars(self) else 1) // 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tanh(self.linear(x))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *(Block() for _ in range(3)), nn.Linear(8, 4))


def train_crowded(folder: str) -> Any:
    """Train where rank 1 runs out of memory from the third update on."""
    crowd = after_update(2, lambda: setattr(Block, "most", 6) if dist.get_rank() == 1 else None)
    options: dict[str, Any] = {"target_batch": 12, "micro_batch": 3, "run_dir": folder}
    seen = []
    for steps in (4, 6):
        result, weights, events = rank_training.train(model=net, callbacks=[crowd], steps=steps, **options)
        savers = [event.savers for event in of_kind(Updated, events)]
        seen.append((result.oom_retries, result.added_savers, savers))
    return seen, weights


@pytest.mark.slow
def test_all_ranks_add_it_where_one_runs_out_of_memory(tmp_path: Path) -> None:
    (first, weights), (second, _) = on_ranks(2, train_crowded, str(tmp_path))
    assert first[0][1] == second[0][1] == ("recompute",)
    assert first[0][2] == second[0][2] == [None, None, ("recompute",), ("recompute",)]
    assert first[0][0] == second[0][0] == 3  # With micro-batches of 3, 2 and 1.
    assert first[1] == second[1] == (first[0][0], ("recompute",), [("recompute",)] * 2)
    _, expected, _ = rank_training.train(model=net, target_batch=12, micro_batch=3, steps=6)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))


def train_with(run_dir: Path | None = None, steps: int = 6, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(36, 8, dtype=dtype), torch.randint(0, 8, (36,)))
    model = nn.Sequential(*(Layer() for _ in range(3))).to(dtype)
    options = {"optimizer": "AdamW", "loss": nn.CrossEntropyLoss(), "micro_batch": 5, "seed": 3, **options}
    result, _ = fit(model, data, target_batch=12, steps=steps, run_dir=run_dir, **options)
    return result, model.state_dict()


def test_weights_are_those_of_a_training_without_savers(tmp_path: Path) -> None:
    savers = ["recompute=2", "offload-gradients", "offload-optimizer"]
    _, expected = train_with()
    train_with(tmp_path / "run", steps=3, savers=savers)
    result, weights = train_with(tmp_path / "run", savers=savers)
    assert result.resumed_from is not None
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
    result, weights = train_with(tmp_path / "run", steps=7)  # Without them, from the same folder.
    assert result.updates == 7


def test_weights_that_a_checkpoint_would_round_are_refused() -> None:
    with pytest.raises(UsageError, match="offload-optimizer keeps half-precision weights in float32"):
        train_with(dtype=torch.bfloat16, savers="offload-optimizer")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_a_plan_chooses_savers_and_the_training_has_them(tmp_path: Path) -> None:
    (tmp_path / "many_layers.py").write_text(
        f"{blocks_source(2, hidden=256, length=4096, width=16)}dataset = [torch.randn(4096, 16)] * 4\n"
    )
    options: dict[str, Any] = {"target_batch": 1, "savers": "auto", "device": "cpu", "progress": False}
    run: dict[str, Any] = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    result = autoaccum.fit(tmp_path / "many_layers.py", steps=1, memory="15MiB", **options, **run)
    planned = autoaccum.Plan.load(tmp_path / "run" / "plan.json")
    (word,) = planned.spec.savers
    assert word.startswith("recompute=")
    assert (result.updates, result.warnings) == (1, ())
    again = autoaccum.fit(tmp_path / "many_layers.py", steps=2, **options, **run)
    assert again.updates == 2
