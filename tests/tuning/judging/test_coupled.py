"""Whether the micro-batch changes the training, by what the plan knows."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.words import ITSELF
from autoaccum.devices.base import Trial
from autoaccum.planning.records import Plan
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.coupled import find_coupling

NORMED = "BatchNorm normalises by the micro-batch, not by the effective batch, in 1: the gradient is not the full one"


def plan(coupling: Coupling | None, *warnings: str) -> Plan:
    return Plan(
        kind="measured",
        target_batch=8,
        micro_batch=4,
        iter_size=2,
        micro_batches=(4, 4),
        world_size=1,
        largest_fit=4,
        capped=False,
        limit_bytes=1,
        peak_bytes=None,
        device={},
        environment={},
        workload={},
        trials=(Trial(parts=(4, 4), outcome="ok"),),
        warnings=warnings,
        coupling=coupling,
    )


def facts(batchnorm: str = "micro") -> Facts:
    known: dict[str, Any] = dict.fromkeys(("name", "digest", "model", "optimizer", "held_out"), "")
    return Facts(
        parameters=1,
        learning_rate=0.1,
        schedule=None,
        precision="fp32",
        batchnorm=batchnorm,
        has_batch=True,
        training_samples=8,
        device="cpu",
        **known,
    )


def test_where_nothing_couples_there_is_nothing_to_say() -> None:
    assert find_coupling(plan(Coupling(loss=False), "another warning"), facts()) == (None, ())


@pytest.mark.parametrize("mode", ["micro", "running"])
def test_a_batchnorm_is_called_by_its_kind(mode: str) -> None:
    clause, notes = find_coupling(plan(Coupling(("1", "4"), loss=False), NORMED), facts(mode))
    assert (clause, notes) == ("BatchNorm in modules 1 and 4 normalises by the micro-batch", ())


def test_other_modules_and_the_loss_by_what_they_do() -> None:
    found = Coupling(("1",), loss=True)
    clause, notes = find_coupling(plan(found, *found.warnings()), facts())
    assert clause == (
        "what module 1 gives for a sample depends on the others of its micro-batch and the loss mixes the samples of"
        " a batch"
    )
    assert notes == ()
    mixed, _ = find_coupling(plan(Coupling(("1", "2"), False), NORMED, *Coupling(("2",)).warnings()), facts())
    assert mixed == "what modules 1 and 2 give for a sample depends on the others of its micro-batch"
    whole, _ = find_coupling(plan(Coupling((ITSELF,), False)), facts())
    assert whole == f"what {ITSELF} gives for a sample depends on the others of its micro-batch"


def test_a_batchnorm_counts_where_the_experiment_could_not_be_made() -> None:
    for coupling in (None, Coupling(reason="the model cannot be copied")):
        assert find_coupling(plan(coupling, NORMED), facts()) == ("BatchNorm normalises by the micro-batch", ())
        assert find_coupling(plan(coupling, NORMED), facts("frozen"))[0] is None


def test_what_was_not_told_is_said() -> None:
    for coupling, said in (
        (None, "was not looked at"),
        (Coupling(reason="the model cannot be copied"), "(the model cannot be copied)"),
        (Coupling(loss=None), "whether the loss mixes the samples of a batch could not be told"),
    ):
        clause, (note,) = find_coupling(plan(coupling), facts())
        assert clause is None
        assert said in note
