"""The arguments that make a training framework train by a plan, or the reason why it cannot.

The names and meanings are those of transformers 5.24, Lightning 2.6, accelerate 1.15, DeepSpeed 0.19 and torchtitan
0.3; `tests/libraries/test_arguments_from_plan.py` trains with each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.checks import check_word
from autoaccum.errors import UsageError
from autoaccum.messages import Message, message
from autoaccum.options import mesh_word
from autoaccum.spec import AUTO, TrainingSpec, WorkloadFacts
from autoaccum.units import format_parts

if TYPE_CHECKING:
    from autoaccum.planning.plan_record import Plan

FRAMEWORKS: Final = ("transformers", "lightning", "accelerate", "deepspeed", "torchtitan")
_NAMES: Final[Mapping[str, str]] = {"lightning": "Lightning", "deepspeed": "DeepSpeed"}
_AVERAGING: Final = ("lightning", "accelerate", "deepspeed")
"""Frameworks in which each micro-batch's mean counts alike, whatever it divides by."""
_REPLICATING: Final = ("transformers", "lightning", "accelerate")
"""Frameworks that use DistributedDataParallel."""
_OWN_STEP: Final = "train with autoaccum.Accumulator"
_SHARDING: Final[Mapping[str, str]] = {
    "lightning": "strategy=ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1), with fully_shard "
    "in configure_model",
    "accelerate": "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) of the Accelerator",
}


def check_framework(
    framework: str,
    spec: TrainingSpec,
    workload: WorkloadFacts | None = None,
    *,
    parallel: str | None = None,
    mesh: tuple[int, ...] | None = None,
    chooses_savers: bool = False,
) -> None:
    """Refuse what the framework cannot do, as early as it is known.

    Args:
        framework: One of `FRAMEWORKS`.
        spec: How updates run, as far as it is known.
        workload: What is known of the workload, if it was inspected.
        parallel: How ranks train one model, as far as it is known.
        mesh: The ranks in one or two dimensions, if a mesh was given.
        chooses_savers: Whether a plan is to choose savers.

    Raises:
        UsageError: It has no arguments for this.
    """
    check_word(framework, "framework", FRAMEWORKS)
    name, facts, is_titan = _name(framework), workload or WorkloadFacts(), framework == "torchtitan"
    if savers := [AUTO] if chooses_savers else spec.savers:
        reason = f"{name} does not know autoaccum's savers ({', '.join(savers)})"
    elif spec.batchnorm != "micro":
        reason = f'{name} has no batchnorm mode "{spec.batchnorm}", its BatchNorms see single micro-batches'
    elif spec.coupled or facts.whole_batch:
        reason = f"{name} computes the loss of each micro-batch by itself, and this one needs the whole batch"
    elif facts.reduction == "sum" and not is_titan:
        reason = f"the loss is a sum, and {name} divides it by the number of micro-batches"
    elif spec.precision == "fp16" and is_titan:
        reason = "torchtitan trains in fp32 or bf16, and the precision is fp16"
    elif parallel == "fsdp2" and framework == "deepspeed":
        reason = "DeepSpeed shards by ZeRO, which takes other memory than fsdp2"
    elif mesh is not None and len(mesh) > 1 and not is_titan:
        reason = f"autoaccum knows no arguments that make {name} train on a mesh of {mesh_word(mesh)}"
    else:
        return
    raise UsageError(reason, hint=f"plan without that, or {_OWN_STEP}")


def arguments_for(plan: Plan, framework: str) -> dict[str, Any]:
    """Return the arguments that make a framework train by the plan.

    Returns:
        Of `transformers`: keyword arguments of `TrainingArguments`. Of `lightning`: those of its `trainer`, and of the
        `dataloader` of the training data. Of `accelerate`: those of the `accelerator`, of its
        GradientAccumulation`plugin`, and of the `dataloader`. Of `deepspeed`: a part of its configuration. Of
        `torchtitan`: fields of its configuration, `training` and `parallelism`.

    Raises:
        UsageError: The framework cannot do what the plan does, or would train with another number of samples.
    """
    check_framework(framework, plan.spec, plan.workload, parallel=plan.parallel, mesh=plan.mesh)
    if plan.target_batch % plan.world_size:
        raise UsageError(
            f"{_name(framework)} gives each of {plan.world_size} ranks as many samples, and a target batch of"
            f" {plan.target_batch} does not divide equally over them",
            hint=f"plan a target batch that does, or {_OWN_STEP}",
        )
    trained = plan.iter_size * plan.micro_batch * plan.world_size
    if trained != plan.target_batch:
        ranks = f" x {plan.world_size} ranks" if plan.world_size > 1 else ""
        known: dict[str, int] = {"world_size": plan.world_size, "multiple_of": plan.multiple_of}
        equal = make_schedule(plan.target_batch, plan.micro_batch, equal=True, **known)
        raise UsageError(
            f"{_name(framework)} takes equal micro-batches, and would train with {plan.iter_size} x"
            f" {plan.micro_batch}{ranks} = {trained} samples per update, not {plan.target_batch}",
            hint=f"plan with equal=True (--for {framework}), which gives {format_parts(equal.micro_batches)}{ranks}",
        )
    return _MAKERS[framework](plan)


def for_framework(plan: Plan, framework: str) -> Plan:
    """Return the plan with the framework's arguments, and notes on what it does otherwise than the trials did."""
    arguments = {framework: arguments_for(plan, framework)}
    return dataclasses.replace(plan, arguments=arguments, notes=(*framework_notes(plan, framework), *plan.notes))


def framework_notes(plan: Plan, framework: str) -> tuple[Message, ...]:
    """Return the notes on what a framework does otherwise than the plan's trials, the most important first."""
    name, workload, notes = _name(framework), plan.workload, list[Message]()
    recipe, in_parts = workload.recipe, plan.iter_size > 1
    if framework in _AVERAGING and in_parts and recipe.divisor in ("weight", "class weights"):
        notes.append(message("framework_means", name=name, divisor=workload.weight))
    if framework == "transformers" and in_parts and recipe.ignores_items:
        notes.append(message("framework_adds_means", model=workload.model, iter_size=plan.iter_size))
    if plan.parallel == "fsdp2" and framework in _SHARDING:
        settings = _SHARDING[framework].format(ranks=plan.world_size)
        notes.append(message("framework_shards", name=name, settings=settings))
    elif plan.world_size > 1 and plan.parallel != "fsdp2" and framework in _REPLICATING:
        notes.append(message("framework_copies_gradients", name=name, bytes=workload.parameter_bytes or 0))
    if in_parts and recipe.half and plan.spec.accumulate_in == "fp32":
        notes.append(message("framework_rounds", name=name, dtypes=list(recipe.half)))
    if plan.tokens is not None:
        facts = {"micro_batch": plan.micro_batch, "target_tokens": plan.tokens.target_tokens}
        is_trainer, balances = framework == "transformers", framework == "transformers" and _balances(plan)
        notes.append(message("framework_counts_samples", name=name, trainer=is_trainer, balances=balances, **facts))
    return tuple(notes)


def _transformers(plan: Plan) -> dict[str, Any]:
    given = {
        "bf16": plan.spec.precision == "bf16",
        "fp16": plan.spec.precision == "fp16",
        "fsdp": plan.parallel == "fsdp2",
        "accelerator_config": plan.grad_sync == "each" and {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "per_device_eval_batch_size": plan.spec.evaluation_batch,
        "dataloader_drop_last": plan.multiple_of > 1,
        "learning_rate": plan.learning_rate,
        "use_cpu": _is_on_cpu(plan),
        "train_sampling_strategy": _balances(plan) and "batch_rebalance",
    }
    return {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.iter_size,
        "average_tokens_across_devices": True,
        **{name: value for name, value in given.items() if value},
    }


def _balances(plan: Plan) -> bool:
    """Whether the Trainer may make micro-batches of unequal size of an update's samples, sorted by length.

    Models that ignore `num_items_in_batch` would count them alike (`BatchRebalanceSampler`, transformers#47340).
    """
    counts = plan.tokens is not None and plan.tokens.padding == "longest" and not plan.workload.recipe.ignores_items
    return counts and plan.target_batch > plan.micro_batch


def _lightning(plan: Plan) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "accumulate_grad_batches": plan.iter_size,
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[plan.spec.precision],
        "accelerator": "cpu" if _is_on_cpu(plan) else "gpu",
        "devices": plan.world_size,
    }
    if plan.world_size > 1 and plan.parallel != "fsdp2":
        trainer["strategy"] = "ddp"
    return {"trainer": trainer, "dataloader": _loader(plan)}


def _accelerate(plan: Plan) -> dict[str, Any]:
    precision = plan.spec.precision
    accelerator: dict[str, Any] = {"mixed_precision": "no" if precision == "fp32" else precision}
    if _is_on_cpu(plan):
        accelerator["cpu"] = True
    # A window that ends with the loader's last batch would be divided by `num_steps` all the same.
    plugin = {"num_steps": plan.iter_size, "sync_each_batch": plan.grad_sync == "each", "sync_with_dataloader": False}
    return {"accelerator": accelerator, "plugin": plugin, "dataloader": _loader(plan)}


def _deepspeed(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": plan.target_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.iter_size,
        "dataloader_drop_last": True,
    }
    if plan.spec.precision != "fp32":  # Its own "bf16" converts the parameters, which the trials did not.
        config["torch_autocast"] = {"enabled": True, "dtype": _dtype(plan)}
    return config


def _torchtitan(plan: Plan) -> dict[str, Any]:
    replicas, shards = plan.world_size, 1
    if plan.parallel == "fsdp2":
        replicas, shards = plan.mesh if plan.mesh is not None and len(plan.mesh) > 1 else (1, plan.world_size)
    return {
        "training": {
            "local_batch_size": plan.micro_batch,
            "global_batch_size": plan.target_batch,
            "mixed_precision_param": _dtype(plan),
        },
        "parallelism": {"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": shards},
    }


_MAKERS: Final[Mapping[str, Callable[[Plan], dict[str, Any]]]] = {
    "transformers": _transformers,
    "lightning": _lightning,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}


def _loader(plan: Plan) -> dict[str, Any]:
    # A smaller last micro-batch would count as much as the others.
    return {"batch_size": plan.micro_batch, "drop_last": True}


def _dtype(plan: Plan) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[plan.spec.precision]


def _is_on_cpu(plan: Plan) -> bool:
    return plan.device.kind == "cpu"


def _name(framework: str) -> str:
    return _NAMES.get(framework, framework)
