"""Running out of memory during training changes no result (tests/accumulation has it with a real limit)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import assert_close
from small_fit import after_update, fit, metrics, newest_checkpoint, of_kind
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import DoesNotFitError
from autoaccum.training.fit_events import Evaluated, Started, Updated

X = torch.linspace(-1, 1, 64 * 3, dtype=torch.float64).reshape(64, 3)
DATA = TensorDataset(X, X[:, :2])


class Crowded(nn.Linear):
    """Runs out of memory above a number of samples, as on a GPU that others use."""

    most = 10**9

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def fit_crowded(model: Crowded, **options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    settings: dict[str, Any] = {"target_batch": 64, "loss": nn.MSELoss(), "micro_batch": 32}
    return fit(model, DATA, eval_data=DATA, eval_every=5, **settings | options)


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

    options: dict[str, Any] = {"steps": 120, "run_dir": tmp_path, "checkpoint_every": 10, "callbacks": [listen]}
    with pytest.raises(KeyboardInterrupt):
        fit_crowded(model, **options)
    assert sizes[:3] == [32, 32, 7]
    result, _ = fit_crowded(model, **options)
    assert [event.micro_batch for event in of_kind(Started, events)] == [32, 7]
    assert sizes[-1] == 32, "after a while without OOM all of it is used again"
    assert len(of_kind(Evaluated, events)) == 24, "the evaluation shrinks, too"
    assert sum(line.get("retries") or 0 for line in metrics(tmp_path)) == result.oom_retries > 0
    fit_crowded(plain, steps=120)
    assert_close(model, plain, 1e-9)


def test_if_not_even_one_sample_fits_it_says_so_and_saves_its_state(tmp_path: Path) -> None:
    model = Crowded(3, 2, dtype=torch.float64)
    crowd = after_update(5, lambda: setattr(model, "most", 0))
    with pytest.raises(DoesNotFitError, match="not even one sample at a time fits"):
        fit_crowded(model, callbacks=[crowd], steps=9, run_dir=tmp_path)
    assert newest_checkpoint(tmp_path).name == "checkpoint-00000005.pt"
