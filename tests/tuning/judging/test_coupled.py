"""Whether the micro-batch changes the training, by what the plan knows."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.accumulation.coupling import ITSELF, Coupling
from autoaccum.devices.base import Trial
from autoaccum.planning.records import Plan
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.coupled import find_coupling


def plan(coupling: Coupling | None) -> Plan:
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
        coupling=coupling,
    )


def facts(*batchnorms: str, mode: str = "micro") -> Facts:
    known: dict[str, Any] = dict.fromkeys(("name", "digest", "model", "optimizer", "held_out"), "")
    return Facts(
        parameters=1,
        learning_rate=0.1,
        schedule=None,
        precision="fp32",
        batchnorm=mode,
        has_batch=True,
        training_samples=8,
        device="cpu",
        batchnorms=batchnorms,
        **known,
    )


def test_where_nothing_couples_there_is_nothing_to_say() -> None:
    assert find_coupling(plan(Coupling(loss=False)), facts()) == (None, ())


@pytest.mark.parametrize("mode", ["micro", "running"])
def test_a_batchnorm_is_called_by_its_kind(mode: str) -> None:
    """Whatever the plan warns of: one that needs no accumulation has no such warning."""
    clause, notes = find_coupling(plan(Coupling(("1", "4"), loss=False)), facts("1", "4", mode=mode))
    assert (clause, notes) == ("BatchNorm in modules 1 and 4 normalises by the micro-batch", ())


def test_other_modules_and_the_loss_by_what_they_do() -> None:
    clause, notes = find_coupling(plan(Coupling(("1",), loss=True)), facts())
    depends = "for a sample depends on the others of its micro-batch"
    assert clause == f"what module 1 gives {depends} and the loss mixes the samples of a batch"
    assert notes == ()
    mixed, _ = find_coupling(plan(Coupling(("1", "2", "3"), False)), facts("1"))
    assert mixed == f"BatchNorm in module 1 normalises by the micro-batch and what modules 2 and 3 give {depends}"
    whole, _ = find_coupling(plan(Coupling((ITSELF,), False)), facts())
    assert whole == f"what {ITSELF} gives {depends}"


@pytest.mark.parametrize(
    "coupling",
    [None, Coupling(reason="the model cannot be copied"), Coupling(loss=False)],
    ids=["not-looked", "not-told", "weights-of-zero"],
)
def test_a_batchnorm_counts_where_the_experiment_has_not_seen_it(coupling: Coupling | None) -> None:
    clause, notes = find_coupling(plan(coupling), facts("2"))
    assert (clause, notes) == ("BatchNorm in module 2 normalises by the micro-batch", ())
    assert find_coupling(plan(coupling), facts("2", mode="frozen"))[0] is None


def test_what_was_not_told_is_said() -> None:
    for coupling, said in (
        (None, "was not looked at"),
        (Coupling(reason="the model cannot be copied"), "(the model cannot be copied)"),
        (Coupling(loss=None), "whether the loss mixes the samples of a batch could not be told"),
    ):
        clause, (note,) = find_coupling(plan(coupling), facts())
        assert clause is None
        assert said in note
