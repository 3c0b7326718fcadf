"""Failures around a training: one clear message each, and earlier checkpoints stay."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import autoaccum
from autoaccum.errors import AutoaccumError, NonFiniteError, UpdateInterrupted
from autoaccum.training.fit_events import CheckpointWritten, Updated


def samples(count: int) -> TensorDataset:
    x = torch.linspace(-1, 1, max(count, 1) * 3)[: count * 3].reshape(count, 3)
    return TensorDataset(x, x[:, :2])


def fit(data: Any, **options: Any) -> autoaccum.FitResult:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(3, 2)
    settings: dict[str, Any] = {"target_batch": 8, "loss": nn.MSELoss(), "micro_batch": 4, "steps": 6}
    return autoaccum.fit(model, data, **settings | {"progress": False} | options)


class Poisoned(Dataset[Any]):
    """One sample that is not finite, in the third window."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), math.inf if index == 20 else 1.0), torch.zeros(2)


def in_order(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=4)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_update(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"update 3: .* not made: lower the learning rate") as caught:
        fit(in_order(Poisoned()), run_dir=tmp_path)
    assert caught.value.exit_code == 1
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    record = torch.load(newest, weights_only=True)["record"]
    assert record["progress"]["update"] == 2
    weights = record["training"]["model"]
    assert set(weights) == {"model.weight", "model.bias"}
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_it_is_skipped_on_request(tmp_path: Path) -> None:
    events: list[Any] = []
    result = fit(in_order(Poisoned()), run_dir=tmp_path, skip_nonfinite=True, callbacks=[lambda e: events.append(e)])
    assert (result.updates, result.skipped) == (6, 1)
    assert [event.update for event in events if isinstance(event, Updated) and not event.updated] == [3]
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["updated"] for line in lines] == [True, True, False, True, True, True]
    assert lines[2]["loss"] is None, "JSON has no infinity"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Of TensorBoard's writer.
def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path: Path) -> None:
    events: list[Any] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def listen(event: Any) -> None:
        events.append(event)
        if isinstance(event, Updated) and event.update == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        if isinstance(event, Updated) and event.update == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    try:
        result = fit(samples(64), run_dir=tmp_path, checkpoint_every=1, callbacks=[listen])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [event.update for event in events if isinstance(event, CheckpointWritten)] == [0, 1, 4, 5, 6]
    assert result.unsaved is None
    assert len([text for text in result.warnings if "no checkpoint was written" in text]) == 2
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


class Late(torch.optim.lr_scheduler.LRScheduler):
    """Raises after the fourth update has been made."""

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch == 4:
            raise ValueError("no more of it")
        return [0.1 for _ in self.base_lrs]


def test_the_update_before_a_scheduler_that_raises_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more of it"):
        fit(samples(64), run_dir=tmp_path, scheduler=Late, checkpoint_every=2, optimizer="SGD")
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    assert newest.name == "checkpoint-00000004.pt"


class Unsavable(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float | Tensor]:
        return [0.1 for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"rule": os.getcwd}


def test_state_that_could_run_code_is_refused_before_training(tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(AutoaccumError, match="scheduler.rule: it is a builtin"):
        fit(samples(64), run_dir=tmp_path, scheduler=Unsavable, callbacks=[lambda e: events.append(e)])
    assert not any(isinstance(event, Updated) for event in events)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last_word", [SystemExit(7), KeyboardInterrupt()])
def test_the_user_s_own_exit_loses_nothing(tmp_path: Path, last_word: BaseException) -> None:
    def leave(event: Any) -> None:
        if isinstance(event, Updated) and event.update == 4:
            raise last_word

    with pytest.raises(type(last_word)):
        fit(samples(64), run_dir=tmp_path, callbacks=[leave])
    assert max((tmp_path / "checkpoints").glob("*.pt")).name == "checkpoint-00000004.pt"


class Breaking(torch.optim.SGD):
    """Its fourth step fails half-way."""

    made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        super().step()
        if self.made == 4:
            raise RuntimeError("CUDA error: out of memory")


def test_half_an_update_is_not_saved_and_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UpdateInterrupted, match=r"the same command resumes from .*checkpoint-00000002\.pt"):
        fit(samples(64), run_dir=tmp_path, optimizer=lambda params: Breaking(params, lr=0.1), checkpoint_every=2)
    assert max((tmp_path / "checkpoints").glob("*.pt")).name == "checkpoint-00000002.pt"
    assert fit(samples(64), run_dir=tmp_path, optimizer=lambda params: Breaking(params, lr=0.1), steps=5).updates == 5
