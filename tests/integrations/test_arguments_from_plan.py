"""The arguments of other frameworks: their product is the target, and what they cannot do is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import factories
import pytest
from factories import codes, make_token_budget
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.integrations.arguments_from_plan import FRAMEWORKS, arguments_for, for_framework, framework_notes
from autoaccum.planning.plan_record import Plan, TokenBudget
from autoaccum.reporting.plan_report import code_lines
from autoaccum.spec import DeviceFacts
from autoaccum.units import GIB


def make_plan(target: int, ceiling: int, world_size: int = 1, *, equal: bool = True, **fields: Any) -> Plan:
    workload = {"precision": "bf16"} | fields.pop("workload", {})
    given = {"device": DeviceFacts(kind="cuda"), **fields}
    return factories.make_plan(target, ceiling, world_size=world_size, equal=equal, workload=workload, **given)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_each_framework_multiplies_to_the_target(share: int, ceiling: int, ranks: int) -> None:
    plan = make_plan(share * ranks, ceiling, ranks)
    given, target = arguments_for(plan, "transformers"), plan.target_batch
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * ranks == target
    light = arguments_for(plan, "lightning")
    trainer, loader = light["trainer"], light["dataloader"]
    assert loader["batch_size"] * trainer["accumulate_grad_batches"] * trainer["devices"] == target
    found = arguments_for(plan, "accelerate")
    assert found["dataloader"]["batch_size"] * found["plugin"]["num_steps"] * ranks == target
    config = arguments_for(plan, "deepspeed")
    per_card = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert per_card * ranks == config["train_batch_size"] == target
    titan = arguments_for(plan, "torchtitan")
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
        ({"whole_batch": "lockstep"}, "this one needs the whole batch"),
    ],
)
def test_what_only_the_accumulator_does_is_refused(framework: str, workload: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        for_framework(make_plan(8, 4, workload=workload), framework)


def test_what_single_frameworks_cannot_do() -> None:
    summed = make_plan(8, 4, workload={"reduction": "sum"})
    assert arguments_for(summed, "torchtitan")
    with pytest.raises(UsageError, match="the loss is a sum, and Lightning divides it by the number of micro-batches"):
        arguments_for(summed, "lightning")
    half = make_plan(8, 4, workload={"precision": "fp16"})
    assert arguments_for(half, "transformers")["fp16"] is True
    with pytest.raises(UsageError, match="torchtitan trains in fp32 or bf16"):
        arguments_for(half, "torchtitan")
    sharded = make_plan(8, 1, 4, parallel="fsdp2", mesh=(2, 2))
    assert arguments_for(sharded, "torchtitan")["parallelism"] == dict(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=2
    )
    with pytest.raises(UsageError, match="no arguments that make accelerate train on a mesh of 2x2"):
        arguments_for(sharded, "accelerate")
    with pytest.raises(UsageError, match="DeepSpeed shards by ZeRO"):
        arguments_for(sharded, "deepspeed")


def test_sharded_gradients_are_summed_as_the_plan_has_it() -> None:
    for grad_sync in ("each", "last"):
        plan = make_plan(8, 1, 4, parallel="fsdp2", grad_sync=grad_sync)
        assert arguments_for(plan, "accelerate")["plugin"]["sync_each_batch"] is (grad_sync == "each")
        assert ("accelerator_config" in arguments_for(plan, "transformers")) is (grad_sync == "each")
        assert arguments_for(plan, "transformers")["fsdp"] is True


def test_what_else_the_plan_decides() -> None:
    plan = make_plan(8, 4, multiple_of=2, learning_rate=0.5, workload={"evaluation_batch": 6})
    found = arguments_for(plan, "transformers")
    names = ("dataloader_drop_last", "learning_rate", "per_device_eval_batch_size")
    assert [found[name] for name in names] == [True, 0.5, 6]
    on_cpu = make_plan(8, 4, device=DeviceFacts(kind="cpu"), workload={"precision": "fp32"})
    assert arguments_for(on_cpu, "transformers")["use_cpu"] is True
    assert arguments_for(on_cpu, "accelerate")["accelerator"]["cpu"] is True
    trainer = arguments_for(on_cpu, "lightning")["trainer"]
    assert (trainer["accelerator"], trainer["precision"]) == ("cpu", "32-true")


def test_differences_are_noted() -> None:
    weighted = make_plan(8, 4, workload={"weight": "the workload's weight()", "recipe": {"divisor": "weight"}})
    assert codes(framework_notes(weighted, "accelerate")) == ["framework_means"]
    assert framework_notes(weighted, "transformers") == framework_notes(weighted, "torchtitan") == ()
    replicated = make_plan(8, 2, 2, workload={"parameter_bytes": 2 * GIB})
    assert codes(framework_notes(replicated, "lightning")) == ["framework_copies_gradients"]
    assert framework_notes(replicated, "deepspeed") == ()
    assert framework_notes(make_plan(8, 2, 2, parallel="fsdp2"), "transformers") == ()
    halves = make_plan(8, 4, workload={"recipe": {"half": ["bfloat16"]}})
    assert codes(framework_notes(halves, "deepspeed")) == ["framework_rounds"]


@pytest.mark.parametrize(
    ("budget", "workload", "balances"),
    [
        (make_token_budget(), {}, True),
        (make_token_budget(padding="none"), {}, False),
        (make_token_budget(target_tokens=512), {"recipe": {"ignores_items": True}}, False),
    ],
    ids=["padded", "packed", "means of samples"],
)
def test_a_trainer_balances_tokens_where_it_weighs_by_them(
    budget: TokenBudget, workload: dict[str, Any], balances: bool
) -> None:
    plan = make_plan(8, 4, tokens=budget, workload=workload)
    given = arguments_for(plan, "transformers")
    assert given.get("train_sampling_strategy") == ("batch_rebalance" if balances else None)
    assert given["per_device_train_batch_size"] == 4
    said = framework_notes(plan, "transformers")[-1]
    assert (said.code, said.facts["balances"]) == ("framework_counts_samples", balances)
    assert said.facts["target_tokens"] == budget.target_tokens
    said = framework_notes(plan, "lightning")[-1]
    assert (said.code, said.facts["trainer"]) == ("framework_counts_samples", False)


def test_the_guide_shows_what_is_printed() -> None:
    guide = (Path(__file__).parents[2] / "examples" / "docs" / "guides" / "frameworks.md").read_text(encoding="utf-8")
    lines = code_lines("transformers", arguments_for(make_plan(256, 16), "transformers"))
    assert f"train with   {lines[0]}\n             {lines[1]}\n" in guide
    (listed,) = re.findall(r"^`--for` takes (.*?)\.", guide, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", listed)) == FRAMEWORKS


def test_flags_hold_what_a_shell_reads() -> None:
    arguments = {"bf16": True, "gradient_accumulation_steps": 2, "accelerator_config": {"a": {"sync": True}}}
    assert code_lines("transformers", arguments) == [
        'TrainingArguments(bf16=True, gradient_accumulation_steps=2, accelerator_config={"a": {"sync": True}})',
        """--bf16 --gradient_accumulation_steps 2 --accelerator_config '{"a": {"sync": true}}'""",
    ]
