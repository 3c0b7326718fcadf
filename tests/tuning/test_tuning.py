"""A study from the file to the plan: what it finds, what it keeps, and how it is gone on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.events import Started
from autoaccum.tuning.ceiling import check_plan
from autoaccum.tuning.events import Noted, SpeedMeasured, StudyOpened, ThroughputKnown, TrialBegan, TrialEnded
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest, read_batches
from autoaccum.tuning.tuning import tune

LINE = """
import torch
from torch import nn
drawn = torch.Generator().manual_seed(0)
inputs = torch.randn(480, 4, generator=drawn)
targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * torch.randn(480, 1, generator=drawn)
dataset = torch.utils.data.TensorDataset(inputs[:400], targets[:400])
evaluation_dataset = torch.utils.data.TensorDataset(inputs[400:], targets[400:])
criterion = nn.MSELoss()
def model():
    return nn.Linear(4, 1)
def optimizer(params):
    return torch.optim.SGD(params, lr=1e-3)
"""


class Heard:
    """Listens, and keeps all."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def run(folder: Path, **changed: Any) -> tuple[Tuning, Heard]:
    asked: dict[str, Any] = {
        "reference": str(folder / "line.py"),
        "target_batch": read_batches(32),
        "trials": 3,
        "confirm": 1,
        "budget_samples": 800,
        "storage": str(folder / "studies.db"),
        "device": "cpu",
    } | changed
    heard = Heard()
    return tune(TuneRequest(**asked), on_event=heard, on_output=lambda line: None), heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "line.py").write_text(LINE)
    return folder


@pytest.fixture(scope="module")
def studied(folder: Path) -> tuple[Tuning, Heard]:
    return run(folder)


def test_the_own_rate_comes_first_and_a_better_one_is_found(studied: tuple[Tuning, Heard]) -> None:
    found, _ = studied
    first = found.rows[0]
    assert first.own
    assert first.setting is not None
    assert first.setting.learning_rate == 1e-3
    assert found.best is not None
    assert found.own is not None
    assert found.best.losses[0] < found.own.losses[0]
    assert found.space.learning_rates.low == pytest.approx(1e-5)
    assert found.space.learning_rates.high == pytest.approx(1e-1)


def test_every_trial_is_told_and_kept(studied: tuple[Tuning, Heard]) -> None:
    found, heard = studied
    searched = [row for row in found.rows if row.confirms is None]
    assert [row.number for row in searched] == [0, 1, 2]
    assert {row.state for row in found.rows} <= {"complete", "pruned", "diverged"}
    assert [event.row for event in heard.of(TrialEnded)] == list(found.rows)
    assert len(heard.of(TrialBegan)) == len(found.rows)
    assert all(row.samples == 800 for row in found.rows if row.state == "complete")


def test_the_best_is_run_with_other_seeds(studied: tuple[Tuning, Heard]) -> None:
    found, _ = studied
    again = [row for row in found.rows if row.confirms is not None]
    assert [row.seed for row in again] == [1, 2]
    assert found.best is not None
    assert {row.setting for row in again} == {found.best.setting}
    assert len(found.best.losses) == 3
    assert found.bracket is not None
    assert found.bracket.noise is not None


def test_nothing_above_the_ceiling_ran_and_trials_have_the_plan_s_micro_batch(studied: tuple[Tuning, Heard]) -> None:
    found, heard = studied
    assert found.plan is not None
    assert max(speed.micro_batch for speed in found.throughput.speeds) <= found.plan.largest_fit
    assert found.space.coupled is None
    assert {row.setting.micro_batch for row in found.rows if row.setting} == {found.space.micro_batch}
    assert found.space.micro_batch <= found.plan.largest_fit
    assert [event.speed for event in heard.of(SpeedMeasured)] == list(found.throughput.speeds)


def test_the_plan_of_the_best_trains(studied: tuple[Tuning, Heard], folder: Path, tmp_path: Path) -> None:
    found, _ = studied
    assert found.plan is not None
    assert found.best is not None
    found.plan.save(tmp_path / "best.json")
    heard = Heard()
    result = autoaccum.fit(
        folder / "line.py",
        target_batch=32,
        steps=2,
        plan=tmp_path / "best.json",
        progress=False,
        device="cpu",
        callbacks=[heard],
    )
    assert result.updates == 2
    assert heard.of(Started)[0].optimizer.param_groups[0]["lr"] == found.best.setting.learning_rate
    assert found.plan.micro_batches == dataclasses.replace(found.best.setting, micro_batch=found.throughput.knee).parts


def test_the_same_request_goes_on_and_measures_nothing_again(studied: tuple[Tuning, Heard], folder: Path) -> None:
    before, _ = studied
    after, heard = run(folder, trials=4)
    assert heard.of(StudyOpened)[0].finished == 3
    assert [event.remembered for event in heard.of(ThroughputKnown)] == [True]
    assert not heard.of(SpeedMeasured)
    assert after.throughput == before.throughput
    searched = [row for row in after.rows if row.confirms is None]
    assert searched[:3] == [row for row in before.rows if row.confirms is None]
    assert len(searched) == 4
    begun = [(event.setting, event.seed) for event in heard.of(TrialBegan)]
    run_before = {(row.setting, row.seed) for row in before.rows}
    assert not run_before & set(begun), "no completed trial is repeated"


def test_a_study_of_other_terms_is_refused_and_stays(studied: tuple[Tuning, Heard], folder: Path) -> None:
    kept = (folder / "studies.db").read_bytes()
    with pytest.raises(UsageError, match="800"):
        run(folder, budget_samples=400)
    assert (folder / "studies.db").read_bytes() == kept


def test_a_plan_whose_ceiling_says_nothing_here_is_refused(studied: tuple[Tuning, Heard], folder: Path) -> None:
    found, _ = studied
    assert found.plan is not None
    given = {name: value for name, value in found.workload.items() if name != "reference"}
    plan, facts = found.plan, Facts(**given)
    request = TuneRequest(reference=str(folder / "line.py"), target_batch=read_batches(32))
    check_plan(plan, request, facts)
    check_plan(plan, request, dataclasses.replace(facts, name="renamed"))
    with pytest.raises(UsageError, match="the plan is for updates of 32 samples, the study has such of up to 64"):
        check_plan(plan, dataclasses.replace(request, target_batch=read_batches("16..64")), facts)
    elsewhere = dataclasses.replace(plan, device={**plan.device, "kind": "cuda", "name": "a card"})
    with pytest.raises(UsageError, match="the plan is for a card; here is cpu"):
        check_plan(elsewhere, request, facts)
    for name, own in (("precision", "bf16"), ("optimizer", "AdamW"), ("batchnorm", "frozen")):
        other = dataclasses.replace(plan, workload={**plan.workload, name: own})
        with pytest.raises(UsageError, match=f"the plan is for {own}; here is "):
            check_plan(other, request, facts)
    with pytest.raises(UsageError, match="the plan is for another workload than line"):
        check_plan(plan, request, dataclasses.replace(facts, digest="ab" * 32))


def test_what_is_warned_of_is_kept(studied: tuple[Tuning, Heard]) -> None:
    found, heard = studied
    assert set(found.warnings) == {event.text for event in heard.of(Noted) if event.warns}
    assert torch.isfinite(torch.tensor([loss for one in found.standings for loss in one.losses])).all()
