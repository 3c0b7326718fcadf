"""Failures around a training: one clear message each, and earlier checkpoints stay."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import codes
from small_fit import fit as fit_small
from small_fit import interrupt_after, metrics, newest_checkpoint, of_kind
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autoaccum
from autoaccum.errors import AutoaccumError, NonFiniteError, UpdateInterrupted
from autoaccum.messages import Message
from autoaccum.training.fit_events import CheckpointWritten, Updated
from autoaccum.training.run_folder import read_checkpoint

X = torch.linspace(-1, 1, 64 * 3).reshape(64, 3)
DATA = TensorDataset(X, X[:, :2])


def fit(data: Any = DATA, **options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    torch.manual_seed(0)
    return fit_small(nn.Linear(3, 2), data, **{"loss": nn.MSELoss(), "steps": 6} | options)


class Poisoned(Dataset[Any]):
    """One sample that is not finite, in the third window."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), math.inf if index == 20 else 1.0), torch.zeros(2)


IN_ORDER = DataLoader(Poisoned(), batch_size=4)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_update(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"update 3: .* not made: lower the learning rate") as caught:
        fit(IN_ORDER, run_dir=tmp_path)
    assert caught.value.exit_code == 1
    record = read_checkpoint(newest_checkpoint(tmp_path))
    assert record["progress"]["update"] == 2
    weights = record["training"]["model"]
    assert set(weights) == {"model.weight", "model.bias"}
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_it_is_skipped_on_request(tmp_path: Path) -> None:
    result, events = fit(IN_ORDER, run_dir=tmp_path, skip_nonfinite=True)
    assert (result.updates, result.skipped) == (6, 1)
    assert [event.updated for event in of_kind(Updated, events)] == [True, True, False, True, True, True]
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())
    assert metrics(tmp_path)[2]["loss"] is None, "JSON has no infinity"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Of TensorBoard's writer.
def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = tmp_path / "metrics.jsonl"

    def fill(event: Any) -> None:
        if isinstance(event, Updated) and event.update in (2, 4):
            full = (log.stat().st_size + 20, limits[1])  # There is room for a part of the next line.
            resource.setrlimit(resource.RLIMIT_FSIZE, full if event.update == 2 else limits)

    try:
        result, events = fit(run_dir=tmp_path, checkpoint_every=1, callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [event.update for event in of_kind(CheckpointWritten, events)] == [0, 1, 4, 5, 6]
    assert result.unsaved is None
    assert codes(result.warnings).count("checkpoint_not_written") == 2
    error = "No space left on device"
    assert Message("metrics_not_written", {"path": str(log), "error": error}) in result.warnings
    assert [line["update"] for line in metrics(tmp_path)] == [1, 2, 5, 6]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


class Late(LRScheduler):
    """Raises after the fourth update has been made."""

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch == 4:
            raise ValueError("no more of it")
        return [0.1 for _ in self.base_lrs]


class Unsavable(LRScheduler):
    def get_lr(self) -> list[float | Tensor]:
        return [0.1 for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"rule": os.getcwd}


def test_state_that_could_run_code_is_refused_before_training(tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(AutoaccumError, match="scheduler.rule: it is a builtin"):
        fit(run_dir=tmp_path, scheduler=Unsavable, callbacks=[events.append])
    assert not of_kind(Updated, events)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [interrupt_after(4, SystemExit(7))]},
        {"callbacks": [interrupt_after(4, KeyboardInterrupt())]},
        {"scheduler": Late, "checkpoint_every": 3, "optimizer": "SGD"},
    ],
    ids=["exit", "Ctrl-C", "scheduler"],
)
def test_the_update_before_an_error_or_exit_of_the_users_counts(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises((SystemExit, KeyboardInterrupt, ValueError)):
        fit(run_dir=tmp_path, **options)
    assert newest_checkpoint(tmp_path).name == "checkpoint-00000004.pt"


class Breaking(torch.optim.SGD):
    """Its fourth step fails half-way."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()
        if self.steps == 4:
            raise RuntimeError("CUDA error: out of memory")


def test_half_an_update_is_not_saved_and_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "optimizer": lambda params: Breaking(params, lr=0.1)}
    with pytest.raises(UpdateInterrupted, match=r"the same command resumes from .*checkpoint-00000002\.pt"):
        fit(checkpoint_every=2, **options)
    assert newest_checkpoint(tmp_path).name == "checkpoint-00000002.pt"
    assert fit(steps=5, **options)[0].updates == 5
