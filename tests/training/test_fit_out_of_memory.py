"""Running out of memory during training changes no result (tests/accumulation has it with a real limit)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import DoesNotFitError
from autoaccum.training.fit_events import Evaluated, Started, Updated


class Crowded(nn.Linear):
    """Runs out of memory above a number of samples, as on a GPU that others use."""

    most = 10**9

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def fit_crowded(model: Crowded, listen: Any, **options: Any) -> autoaccum.FitResult:
    x = torch.linspace(-1, 1, 64 * 3, dtype=torch.float64).reshape(64, 3)
    data = TensorDataset(x, x[:, :2])
    settings: dict[str, Any] = {"target_batch": 64, "loss": nn.MSELoss(), "micro_batch": 32, "progress": False}
    settings |= {"eval_data": data, "eval_every": 5}
    return autoaccum.fit(model, data, callbacks=[listen], **settings | options)


def test_no_result_changes_and_the_ceiling_falls_rises_and_survives_a_stop(tmp_path: Path) -> None:
    sizes: list[int] = []
    events: list[Any] = []
    model = Crowded(3, 2, dtype=torch.float64)
    plain = copy.deepcopy(model)

    def listen(event: Any) -> None:
        events.append(event)
        if isinstance(event, Updated):
            sizes.append(event.micro_batch)
            model.most = 9 if 2 <= event.update < 20 else 10**9
            if event.update == 30 and len(sizes) == 30:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_crowded(model, listen, steps=120, run_dir=tmp_path, checkpoint_every=10)
    assert sizes[:3] == [32, 32, 7]
    result = fit_crowded(model, listen, steps=120, run_dir=tmp_path, checkpoint_every=10)
    started = [event for event in events if isinstance(event, Started)]
    assert [event.micro_batch for event in started] == [32, 7]
    assert sizes[-1] == 32, "after a while without OOM all of it is used again"
    assert sum(isinstance(event, Evaluated) for event in events) == 24, "the evaluation shrinks, too"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("retries") or 0 for line in lines) == result.oom_retries > 0
    fit_crowded(plain, lambda event: None, steps=120)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_if_not_even_one_sample_fits_it_says_so_and_saves_its_state(tmp_path: Path) -> None:
    model = Crowded(3, 2, dtype=torch.float64)

    def listen(event: Any) -> None:
        model.most = 0 if isinstance(event, Updated) and event.update == 5 else model.most

    with pytest.raises(DoesNotFitError, match="not even one sample at a time fits"):
        fit_crowded(model, listen, steps=9, run_dir=tmp_path)
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    assert newest.name == "checkpoint-00000005.pt"
