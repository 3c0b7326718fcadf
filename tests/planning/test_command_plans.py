"""Plans of a training command: what they say of it, what cannot be asked, and where they are of no use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import change_facts, make_plan
from planned import plan_on
from scripted_device import ScriptedDevice
from small_script import LARGEST_BATCH, SCRIPT, WORDS
from torch import nn
from torch.optim import SGD

import autoaccum
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan


def plan_command(target: int, device: ScriptedDevice | None = None, **asked: Any) -> Plan:
    device = device or ScriptedDevice(command=WORDS)
    return plan_on(device, target, equal=True, **asked)


def test_a_target_without_divisors_is_told_of_a_nearby_one() -> None:
    facts = {"target_batch": 257, "micro_batch": 1, "above": 257, "nearby": 256}
    assert plan_command(257).notes[0] == Message("nearby_target", facts)
    of_ranks = plan_command(514, world_size=2).notes[0]
    assert {**facts, "target_batch": 514, "nearby": 512} == of_ranks.facts
    assert plan_command(257, max_micro_batch=2).notes[0].code == "not_verified", "larger ones are not wanted"


def test_notes_are_true_of_a_command() -> None:
    codes = [note.code for note in plan_command(256).notes]
    assert codes == ["not_verified", "learning_rate"]
    assert [note.code for note in plan_command(64).notes] == ["learning_rate"], "one micro-batch is the whole update"
    with pytest.raises(DoesNotFitError) as error:
        plan_command(64, ScriptedDevice(lambda size: "oom", command=WORDS))
    assert error.value.hint == "take a smaller model, half precision, activation checkpointing, or more memory"


def test_a_command_that_fails_with_a_single_sample_is_told_of_multiples() -> None:
    with pytest.raises(WorkloadError) as error:
        plan_command(64, ScriptedDevice(lambda size: "error" if size == 1 else "ok", command=WORDS))
    assert "--multiple-of 2" in str(error.value.hint)


@pytest.mark.parametrize(
    ("words", "asked", "told"),
    [
        (LARGEST_BATCH, {"target_batch": 8}, r"the command has no \{iter_size\}: an update is one micro-batch"),
        (LARGEST_BATCH, {"gpu": "t4", "prefer": "fastest"}, r"the command has no \{iter_size\}"),
        (WORDS, {"target_batch": 8, "model": nn.Linear(2, 2)}, "model is given, and plan runs a command"),
    ],
    ids=["no iter_size", "fastest of one", "a model"],
)
def test_what_cannot_be_asked(words: tuple[str, ...], asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        autoaccum.plan(words, **asked)


def test_a_launcher_belongs_into_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="this process is one of several: write the launcher into the command"):
        autoaccum.plan(WORDS, target_batch=8)


def test_its_plan_trains_nothing_else(tmp_path: Path) -> None:
    plan = change_facts(make_plan(8, 4), command=WORDS, reference="python train.py {micro_batch}")
    told = r"the plan is of a command, python train.py \{micro_batch\}, which trains by itself: run it with"
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=told):
        autoaccum.Accumulator(model, optimizer, criterion=nn.MSELoss(), plan=plan)
    plan.save(tmp_path / "plan.json")
    fit: dict[str, Any] = {"target_batch": 8, "steps": 1, "criterion": nn.MSELoss(), "optimizer": optimizer}
    with pytest.raises(UsageError, match=told):
        autoaccum.fit(
            model, [(torch.zeros(8, 2), torch.zeros(8, 2))], plan=tmp_path / "plan.json", progress=False, **fit
        )
    takers: tuple[Any, ...] = (autoaccum.fit, autoaccum.tune)
    for take in takers:
        with pytest.raises(UsageError, match="for a workload|trains a workload"):
            take(list(WORDS), target_batch=8)


@pytest.mark.slow
def test_cards_are_compared_by_estimates_of_its_cost(
    warm_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    table = autoaccum.compare(list(LARGEST_BATCH), gpu="t4,l4,a100-80gb", max_micro_batch=4096, sort="speed")
    assert [row.card for row in table.rows] == ["a100-80gb", "l4", "t4"]
    assert all(row.plan is not None and row.plan.micro_batch > 100 for row in table.rows)
