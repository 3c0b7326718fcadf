from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_plan, message_at
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.errors import PlanFileError, UsageError
from autoaccum.messages import Message
from autoaccum.planning.plan_record import SCHEMA, Plan
from autoaccum.units import GIB, MIB


@pytest.fixture
def a_plan() -> Plan:
    environment = {"torch": "2.13.0", "threads": [1, 2], "nested": {"a": [1]}}
    return make_plan(environment=environment, warnings=(message_at("x"),), notes=(message_at("y"),))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 4), st.text(max_size=20))
def test_round_trip(target: int, ceiling: int, world_size: int, text: str) -> None:
    environment = {text: [text, None, True, 1.5, {"a": 2}]}
    size = make_schedule(target, ceiling, world_size=world_size).micro_batch
    plan = make_plan(target, size, world_size=world_size, environment=environment, warnings=(message_at(text),))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    assert hash(again) == hash(plan)
    assert again.schedule == plan.schedule


def test_is_frozen(a_plan: Plan) -> None:
    with pytest.raises(FrozenInstanceError):
        a_plan.micro_batch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        a_plan.environment["torch"] = "other"  # type: ignore[index]
    with pytest.raises(TypeError):
        a_plan.environment["nested"]["a"] = 3


def test_times_and_what_they_decide_do_not_enter_the_digest(a_plan: Plan) -> None:
    later = replace(a_plan, trials=tuple(replace(trial, seconds=99.0) for trial in a_plan.trials))
    assert later != a_plan
    assert later.digest() == a_plan.digest()
    assert replace(a_plan, warnings=(Message("random_memory"),)).digest() == a_plan.digest()
    assert replace(a_plan, limit_bytes=GIB - 1).digest() != a_plan.digest()


def test_a_learning_rate_is_kept_and_part_of_the_digest(a_plan: Plan) -> None:
    tuned = replace(a_plan, learning_rate=0.0123)
    assert Plan.from_json(tuned.to_json()) == tuned
    assert Plan.from_json(changed(a_plan, learning_rate=1)).learning_rate == 1.0
    assert len({a_plan.digest(), tuned.digest(), replace(a_plan, learning_rate=0.0124).digest()}) == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"micro_batches": (86, 85, 84)}, "target_batch is 256, its parts give 255"),
        ({"micro_batches": (85, 85, 86)}, None),
        ({"micro_batch": 87}, "micro_batch is 87, its parts give 86"),
        ({"iter_size": 4}, "iter_size is 4, its parts give 3"),
        ({"world_size": 2}, "world_size is 2, its parts give 1"),
        ({"ranks": ((86, 85, 85), (86, 85, 85))}, "target_batch is 256, its parts give 512"),
        ({"ranks": ((256, 0), (1,))}, "a schedule of micro-batches"),
        ({"micro_batches": ()}, "a schedule of micro-batches"),
        ({"largest_fit": 101}, "no trial ran at size 101"),
        ({"trials": ()}, "no trial ran at size 86"),
        ({"learning_rate": 0.1}, None),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_contradictions_are_refused(a_plan: Plan, change: dict[str, Any], text: str | None) -> None:
    if text is None:
        assert replace(a_plan, **change)
        return
    with pytest.raises(UsageError, match="contradicts itself") as seen:
        replace(a_plan, **change)
    assert text in str(seen.value)


# --- reading --------------------------------------------------------------------------------------------------------


def changed(plan: Plan, **changes: Any) -> str:
    return json.dumps({**json.loads(plan.to_json()), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": SCHEMA + 1}, "was written by a newer autoaccum (schema 4, this one reads 3): upgrade"),
        ({"schema": "1"}, "is damaged: its schema is '1'"),
        ({"target_batch": "256"}, "is damaged: target_batch: Expected `int`, got `str`"),
        ({"kind": "guessed"}, "is damaged: kind: Invalid enum value 'guessed'"),
        ({"micro_batches": [86, "85", 85]}, "is damaged: micro_batches[1]: Expected `int`, got `str`"),
        ({"trials": [{"parts": [1]}]}, "is damaged: trials[0]: Object missing required field `outcome`"),
        ({"trials": [{"parts": [1], "outcome": "ok", "seconds": 10**400}]}, "trials[0].seconds: Number out of range"),
        ({"trials": [{"parts": [], "outcome": "ok"}]}, "contradicts itself: a trial has no parts"),
        ({"target_batch": 255}, "contradicts itself: target_batch is 255, its parts give 256"),
    ],
)
def test_refuses_what_is_wrong(a_plan: Plan, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanFileError) as seen:
        Plan.from_json(changed(a_plan, **changes), source="plan.json")
    assert str(seen.value).startswith("plan.json ")
    assert text in str(seen.value)
    assert seen.value.hint
    assert seen.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "[" * 100_000])
def test_refuses_what_is_no_json(text: str) -> None:
    with pytest.raises(PlanFileError, match="is not valid JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", '{"kind": "lock", "schema": 1}'])
def test_refuses_what_is_foreign(text: str) -> None:
    with pytest.raises(PlanFileError, match="is not a plan: it has no"):
        Plan.from_json(text)


def test_fields_of_other_versions_are_passed_over_or_get_their_defaults(a_plan: Plan) -> None:
    record = json.loads(changed(a_plan, noise_scale=3.5))
    del record["stopped"], record["min_budget_bytes"], record["learning_rate"]
    for trial in record["trials"]:
        del trial["timed_out"]
    assert Plan.from_json(json.dumps(record)) == a_plan


def test_a_predicted_plan_is_one_with_a_band(a_plan: Plan) -> None:
    known: dict[str, Any] = {"kind": "predicted", "min_budget_bytes": 800 * MIB, "uncertainty_bytes": 40 * MIB}
    plan = replace(a_plan, **known)
    assert Plan.from_json(plan.to_json()) == plan
    assert replace(plan, peak_bytes=GIB + MIB).headroom_bytes == -MIB
    for change in ({"uncertainty_bytes": None}, {"kind": "measured"}, {"min_budget_bytes": None}):
        with pytest.raises(UsageError, match="it is (predicted|measured), with min_budget_bytes"):
            replace(plan, **change)


def test_load_says_what_it_saw(tmp_path: Path, a_plan: Plan) -> None:
    with pytest.raises(PlanFileError, match="there is no file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x80\x81\xff")
    with pytest.raises(PlanFileError, match="since it is not text"):
        Plan.load(tmp_path / "binary")
    a_plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="exists already: add --force"):
        a_plan.save(tmp_path / "plan.json")
    a_plan.save(tmp_path / "plan.json", force=True)
    assert Plan.load(tmp_path / "plan.json") == a_plan
