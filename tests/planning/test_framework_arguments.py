"""The arguments of other frameworks: their product is the target, and what they cannot do is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from factories import recorded
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Trial
from autoaccum.errors import UsageError
from autoaccum.planning.framework_arguments import FRAMEWORKS, code_lines, for_framework, framework_notes
from autoaccum.planning.plan_record import Plan
from autoaccum.units import GIB

WORKLOAD: dict[str, Any] = {"precision": "bf16", "batchnorm": "micro", "reduction": "mean", "accumulate_in": "fp32"}


def make_plan(target: int, ceiling: int, world_size: int = 1, *, equal: bool = True, **fields: Any) -> Plan:
    schedule = make_schedule(target, ceiling, world_size=world_size, equal=equal)
    made: dict[str, Any] = {"kind": "measured", "capped": True, "limit_bytes": GIB, "peak_bytes": None}
    made |= {"device": {"kind": "cuda"}, "environment": {}, "largest_fit": schedule.micro_batch}
    made |= {"trials": (Trial(parts=schedule.micro_batches, outcome="ok"),)}
    workload = WORKLOAD | fields.pop("workload", {})
    return Plan.of_schedule(schedule, **made | fields, **recorded(workload))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_each_framework_multiplies_to_the_target(share: int, ceiling: int, ranks: int) -> None:
    plan = make_plan(share * ranks, ceiling, ranks)
    given, target = plan.training_arguments(), plan.target_batch
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * ranks == target
    light = plan.lightning_arguments()
    trainer, loader = light["trainer"], light["dataloader"]
    assert loader["batch_size"] * trainer["accumulate_grad_batches"] * trainer["devices"] == target
    found = plan.accelerate_arguments()
    assert found["dataloader"]["batch_size"] * found["plugin"]["num_steps"] * ranks == target
    config = plan.deepspeed_config()
    per_card = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert per_card * ranks == config["train_batch_size"] == target
    titan = plan.torchtitan_arguments()
    assert titan["training"]["global_batch_size"] == target
    degrees = titan["parallelism"]["data_parallel_replicate_degree"], titan["parallelism"]["data_parallel_shard_degree"]
    assert degrees == (ranks, 1)
    assert target % (titan["training"]["local_batch_size"] * ranks) == 0
    most = {given["per_device_train_batch_size"], loader["batch_size"], titan["training"]["local_batch_size"]}
    assert most == {config["train_micro_batch_size_per_gpu"]} == {found["dataloader"]["batch_size"]}
    assert max(most) <= ceiling


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_uneven_parts_are_refused_with_what_would_be_trained(framework: str) -> None:
    uneven = make_plan(256, 20, equal=False)
    with pytest.raises(
        UsageError, match=r"would train with 13 x 20 = 260 samples per update, not 256: plan with"
    ) as no:
        for_framework(uneven, framework)
    assert no.value.hint == f"plan with equal=True (--for {framework}), which gives 16 x 16"
    with pytest.raises(UsageError, match="256 does not divide equally over them: plan a target batch that does, or"):
        for_framework(make_plan(256, 100, 3, equal=False), framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ({"savers": ["recompute"]}, r"does not know autoaccum's savers \(recompute\): plan without that"),
        ({"batchnorm": "exact"}, 'has no batchnorm mode "exact"'),
        ({"coupled": True}, "this one needs the whole batch: plan without that, or train with autoaccum.Accumulator"),
        ({"joining": "lockstep"}, "this one needs the whole batch"),
    ],
)
def test_what_only_the_accumulator_does_is_refused(framework: str, workload: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        for_framework(make_plan(8, 4, workload=workload), framework)


def test_what_single_frameworks_cannot_do() -> None:
    summed = make_plan(8, 4, workload={"reduction": "sum"})
    assert summed.torchtitan_arguments()
    with pytest.raises(UsageError, match="the loss is a sum, and Lightning divides it by the number of micro-batches"):
        summed.lightning_arguments()
    half = make_plan(8, 4, workload={"precision": "fp16"})
    assert half.training_arguments()["fp16"] is True
    with pytest.raises(UsageError, match="torchtitan trains in fp32 or bf16"):
        half.torchtitan_arguments()
    sharded = make_plan(8, 1, 4, parallel="fsdp2", mesh=(2, 2))
    assert sharded.torchtitan_arguments()["parallelism"] == dict(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=2
    )
    with pytest.raises(UsageError, match="no arguments that make accelerate train on a mesh of 2x2"):
        sharded.accelerate_arguments()
    with pytest.raises(UsageError, match="DeepSpeed shards by ZeRO"):
        sharded.deepspeed_config()


def test_sharded_gradients_are_summed_as_the_plan_has_it() -> None:
    for reduce in ("each", "last"):
        plan = make_plan(8, 1, 4, parallel="fsdp2", reduce=reduce)
        assert plan.accelerate_arguments()["plugin"]["sync_each_batch"] is (reduce == "each")
        assert ("accelerator_config" in plan.training_arguments()) is (reduce == "each")
        assert plan.training_arguments()["fsdp"] is True


def test_what_else_the_plan_decides() -> None:
    found = make_plan(8, 4, multiple_of=2, learning_rate=0.5, workload={"evaluation_batch": 6}).training_arguments()
    assert (found["dataloader_drop_last"], found["learning_rate"], found["per_device_eval_batch_size"]) == (
        True,
        0.5,
        6,
    )
    on_cpu = make_plan(8, 4, device={"kind": "cpu"}, workload={"precision": "fp32"})
    assert on_cpu.training_arguments()["use_cpu"] is True
    trainer = on_cpu.lightning_arguments()["trainer"]
    assert (trainer["accelerator"], trainer["precision"], on_cpu.accelerate_arguments()["accelerator"]["cpu"]) == (
        *("cpu", "32-true"),
        True,
    )


def test_differences_are_noted() -> None:
    weighted = make_plan(8, 4, workload={"weight": "the workload's weight()", "recipe": {"divisor": "weight"}})
    assert "counts the mean of each micro-batch alike" in framework_notes(weighted, "accelerate")[0]
    assert framework_notes(weighted, "transformers") == framework_notes(weighted, "torchtitan") == ()
    replicated = make_plan(8, 2, 2, workload={"parameter_bytes": 2 * GIB})
    assert "holds another copy of the gradients, up to 2.0 GiB" in framework_notes(replicated, "lightning")[0]
    assert framework_notes(replicated, "deepspeed") == ()
    assert framework_notes(make_plan(8, 2, 2, parallel="fsdp2"), "transformers") == ()
    halves = make_plan(8, 4, workload={"recipe": {"half": ["bfloat16"]}})
    assert "sums the gradients of bfloat16 parameters in bfloat16" in framework_notes(halves, "deepspeed")[0]


def test_the_guide_shows_what_is_printed() -> None:
    guide = (Path(__file__).parents[2] / "examples" / "frameworks.md").read_text(encoding="utf-8")
    lines = code_lines("transformers", make_plan(256, 16).training_arguments())
    assert f"train with   {lines[0]}\n             {lines[1]}\n" in guide
    methods = re.findall(r"plan\.(\w+)\(\)", guide)
    assert len(methods) >= len(FRAMEWORKS)
    assert [name for name in methods if not hasattr(Plan, name)] == []


def test_flags_hold_what_a_shell_reads() -> None:
    arguments = {"bf16": True, "gradient_accumulation_steps": 2, "accelerator_config": {"a": {"sync": True}}}
    assert code_lines("transformers", arguments) == [
        'TrainingArguments(bf16=True, gradient_accumulation_steps=2, accelerator_config={"a": {"sync": True}})',
        """--bf16 --gradient_accumulation_steps 2 --accelerator_config '{"a": {"sync": true}}'""",
    ]
