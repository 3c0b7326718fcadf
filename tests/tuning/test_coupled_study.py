"""A workload with a real BatchNorm, from its file to the study: what couples is found, and searched jointly."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.tuning.events import SearchBegan
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.orders import TrainOrder
from autoaccum.tuning.running.training_job import train_setting
from autoaccum.tuning.settings import BatchSpan, Budget, Setting, Space
from autoaccum.tuning.tuning import tune
from autoaccum.workload.loading import load_workload
from autoaccum.workload.samples import replace_given
from autoaccum.workload.spec import Workload

TARGET, SAMPLES, RATE = 8, 32, 0.05

NORMED = """
import torch
from torch import nn
drawn = torch.Generator().manual_seed(0)
inputs = torch.randn(80, 3, generator=drawn)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
criterion = nn.MSELoss()
def model():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coupled")
    (folder / "normed.py").write_text(NORMED)
    return folder


@pytest.fixture(scope="module")
def studied(folder: Path) -> tuple[Tuning, Space]:
    spaces = list[Space]()
    request = TuneRequest(
        reference=str(folder / "normed.py"),
        target_batch=BatchSpan(TARGET, TARGET),
        trials=3,
        confirm=0,
        budget_samples=SAMPLES,
        storage=str(folder / "studies.db"),
        device="cpu",
    )

    def hear(event: object) -> None:
        if isinstance(event, SearchBegan):
            spaces.append(event.space)

    return tune(request, on_event=hear, on_output=lambda line: None), spaces[0]


def test_a_batchnorm_is_found_and_its_micro_batches_are_searched(studied: tuple[Tuning, Space]) -> None:
    found, space = studied
    assert space.coupled is not None
    assert space.coupled.startswith("BatchNorm in module 1 ")
    assert space.micro_batches == (2, 4, 8)  # One sample is nothing to normalise by.
    settings = [row.setting for row in found.rows if row.setting is not None]
    assert len(settings) == 3
    assert {row.state for row in found.rows} <= {"complete", "pruned"}
    assert {setting.micro_batch for setting in settings} <= {2, 4, 8}
    assert len({setting.micro_batch for setting in settings}) >= 2


def test_the_plan_of_the_best_has_its_micro_batch(studied: tuple[Tuning, Space]) -> None:
    found, _ = studied
    assert found.best is not None
    assert found.plan is not None
    assert found.plan.micro_batches == found.best.setting.parts


def test_losses_differ_by_the_micro_batch_and_only_where_it_couples(folder: Path) -> None:
    """The same weights, data, order and rate; in fp32, so that sums by parts differ in their last digits."""

    def losses(mode: str) -> list[float]:
        workload = replace_given(load_workload(str(folder / "normed.py")), batchnorm=mode)
        return [_loss(workload, micro_batch) for micro_batch in (2, 4, 8)]

    two, four, eight = losses("micro")
    assert len({round(loss, 3) for loss in (two, four, eight)}) == 3
    assert losses("frozen") == [pytest.approx(losses("frozen")[0], rel=1e-4)] * 3


def _loss(workload: Workload, micro_batch: int) -> float:
    order = TrainOrder(
        setting=Setting(learning_rate=RATE, target_batch=TARGET, micro_batch=micro_batch),
        seed=0,
        budget=Budget(SAMPLES, "samples"),
        evaluation_batch=8,
        device="cpu",
    )
    outcome = train_setting(workload, order, lambda percent, loss: True)
    assert outcome.loss is not None, outcome
    return outcome.loss
