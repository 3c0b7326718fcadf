"""An interrupted and resumed run ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_data import StatefulSamples
from small_fit import Interrupted, fit, interrupt_after, metrics
from state_digests import digest as digest_of
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.fit_events import CheckpointWritten, EpochEnded, Updated

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch")
SAMPLES, TARGET, EPOCHS = 44, 12, 2
UPDATES = EPOCHS * 4  # three windows of 12 and one of 8


class Augmented(Dataset[Any]):
    """Draws from all three generators for every sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(5) + index / SAMPLES + random.random() + float(np.random.rand()), torch.tensor(index % 3)


class Noise(nn.Module):
    """Draws from a generator of its own, and counts in a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(7)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls: Tensor = self.calls + 1
        return x + 0.1 * torch.randn(x.shape, generator=self.draw) + 0.01 * self.calls


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), Noise(), nn.Dropout(0.3), nn.Linear(8, 3))


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)], [3]
    )


def run(folder: Path, stop_after: int = 0, data: Any = None, **options: Any) -> autoaccum.FitResult:
    settings: dict[str, Any] = {
        "target_batch": TARGET,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "scheduler": schedule,
        "micro_batch": 5,
        "epochs": EPOCHS,
        "clip_norm": 1.0,
        "run_dir": folder,
        "eval_data": [(torch.ones(4, 5), torch.zeros(4, dtype=torch.long))],
        "eval_every": 3,
        "callbacks": [interrupt_after(stop_after)],
    }
    return fit(build(), Augmented() if data is None else data, **settings | options)[0]


def digest(result: autoaccum.FitResult) -> str:
    """Hash everything that was trained, including non-persistent buffers."""
    buffers = dict(result.model.named_buffers())
    return digest_of([result.model.state_dict(), buffers, result.optimizer.state_dict()])


def lines(folder: Path) -> list[dict[str, Any]]:
    """Read the log without measured values."""
    measured = ("samples_per_second", "peak_bytes")
    return [{name: value for name, value in line.items() if name not in measured} for line in metrics(folder)]


def interrupted(folder: Path, stops: list[int], data: Callable[[], Any] = Augmented, **options: Any) -> Any:
    for stop in stops:
        with pytest.raises(Interrupted):
            run(folder, stop, data(), **options)
    return run(folder, data=data(), **options)


def resumable() -> StatefulSamples:
    return StatefulSamples([(torch.full((5,), place / SAMPLES), torch.tensor(place % 3)) for place in range(SAMPLES)])


@pytest.mark.slow
@pytest.mark.parametrize(("data", "stops"), [(Augmented, [3, 6]), (resumable, [1, 3, 4, 7, UPDATES])])
def test_a_run_stopped_anywhere_ends_where_it_would_have_ended(tmp_path: Path, data: Any, stops: list[int]) -> None:
    whole = run(tmp_path / "whole", data=data())
    resumed = interrupted(tmp_path / "parts", stops, data)
    assert resumed.resumed_from is not None
    assert (resumed.updates, resumed.epochs, resumed.samples) == (UPDATES, EPOCHS, EPOCHS * SAMPLES)
    assert digest(resumed) == digest(whole)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert resumed.evaluation == whole.evaluation


def test_fp16_resumes_with_its_scale(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", precision="fp16")
    resumed = interrupted(tmp_path / "parts", [2, 5], precision="fp16")
    assert digest(resumed) == digest(whole)


def test_a_longer_goal_resumes_from_the_end(tmp_path: Path) -> None:
    run(tmp_path / "a")
    further = run(tmp_path / "a", epochs=EPOCHS + 1, scheduler=schedule)
    whole = run(tmp_path / "b", epochs=EPOCHS + 1)
    assert further.updates == UPDATES + 4
    assert digest(further) == digest(whole)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    first = run(tmp_path / "a", checkpoint_every=1, max_checkpoints=2)
    names = sorted(path.name for path in (tmp_path / "a" / "checkpoints").glob("*.pt"))
    assert names == ["checkpoint-00000007.pt", "checkpoint-00000008.pt"]
    assert first.checkpoint == tmp_path / "a" / "checkpoints" / names[-1]
    assert digest_of(torch.load(tmp_path / "a" / "model.pt", weights_only=True)) == digest_of(
        dict(first.model.state_dict())
    )
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    again = run(tmp_path / "a")
    assert digest(again) == digest(first)
    assert (again.updates, again.evaluation) == (first.updates, first.evaluation)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("where", [EpochEnded, Updated])
def test_an_evaluation_after_an_epoch_is_made_once(tmp_path: Path, where: type[EpochEnded | Updated]) -> None:
    run(tmp_path / "whole", eval_every=None)

    def stop(event: Any) -> None:
        if isinstance(event, where) and event.update == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path / "parts", eval_every=None, callbacks=[stop])
    run(tmp_path / "parts", eval_every=None)
    evaluated = [
        [line["update"] for line in lines(tmp_path / name) if "evaluation" in line] for name in ("parts", "whole")
    ]
    assert evaluated == [[4, 8], [4, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_batch": 11}, "target batch was 12, is 11"),
        ({"seed": 5}, "seed was 0, is 5"),
        ({"optimizer": "SGD"}, "optimizer was 'AdamW', is 'SGD'"),
        ({"data": TensorDataset(torch.ones(40, 5), torch.zeros(40))}, "data: samples was 44, is 40"),
        ({"precision": "bf16"}, "precision was 'fp32', is 'bf16'"),
        ({"accumulate_in": "parameters"}, "accumulate_in was 'fp32', is 'parameters'"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=0.02)}, "initial_lr was 0.01, is 0.02"),
        ({"scheduler": None}, "schedule was 'SequentialLR', is None"),
        ({"resume": "never"}, "already holds a run, and resume is never"),
    ],
)
def test_another_training_is_not_resumed_by_mistake(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, 2, max_checkpoints=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(UsageError, match=message):
        run(tmp_path, **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before


def test_must_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint to resume"):
        run(tmp_path, resume="must")
    assert run(tmp_path).updates == UPDATES
    assert run(tmp_path, resume="must").updates == UPDATES


def test_a_checkpoint_is_the_first_thing_written(tmp_path: Path) -> None:
    names: list[list[str]] = []

    def look(event: Any) -> None:
        if isinstance(event, CheckpointWritten):
            names.append(sorted(path.name for path in tmp_path.iterdir()))

    run(tmp_path, callbacks=[look])
    assert names[0] == ["checkpoints", "run.lock"]
