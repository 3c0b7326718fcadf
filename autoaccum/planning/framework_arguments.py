"""The arguments that make a training framework train by a plan, or the reason why it cannot.

The names and meanings are those of transformers 5.23, Lightning 2.6, accelerate 1.15, DeepSpeed 0.19 and torchtitan
0.3; `tests/libraries/test_framework_arguments.py` trains with each of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from autoaccum.accumulation.schedule import format_parts, make_schedule, part_sizes
from autoaccum.checks import check_word, join_words
from autoaccum.errors import UsageError
from autoaccum.options import mesh_word
from autoaccum.spec import AUTO, TrainingSpec, WorkloadFacts
from autoaccum.units import format_bytes

if TYPE_CHECKING:
    from autoaccum.planning.plan_record import Plan

FRAMEWORKS: Final = ("transformers", "lightning", "accelerate", "deepspeed", "torchtitan")
_NAMES: Final[Mapping[str, str]] = {"lightning": "Lightning", "deepspeed": "DeepSpeed"}
_AVERAGING: Final = ("lightning", "accelerate", "deepspeed")
"""Frameworks in which each micro-batch's mean counts alike, whatever it divides by."""
_OWN_STEP: Final = "train with autoaccum.Accumulator"
_DTYPES: Final = {"bf16": "bfloat16", "fp32": "float32"}
_SHARDING: Final[Mapping[str, str]] = {
    "lightning": "strategy=ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1), with fully_shard "
    "in configure_model",
    "accelerate": "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) of the Accelerator",
}

ADDS_MEANS: Final = (
    "{model} ignores num_items_in_batch, so that a Trainer of transformers without a compute_loss_func adds up the"
    " means of {parts} micro-batches: {parts} times the batch's gradient. Set loss_is_scaled_for_ga = False in the"
    " Trainer's class, or take autoaccum.integrations.transformers.AccumulatorTrainer"
)


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
        chooses_savers: Whether a plan is to choose savers.
        workload: What is known of the workload, if it was inspected.
        parallel: How ranks train one model, as far as it is known.
        mesh: The ranks in one or two dimensions, if a mesh was given.

    Raises:
        UsageError: It has no arguments for this.
    """
    check_word(framework, "framework", FRAMEWORKS)
    name, facts = _name(framework), workload or WorkloadFacts()
    savers, mode, is_titan = [AUTO] if chooses_savers else spec.savers, spec.batchnorm, framework == "torchtitan"
    is_joint = bool(spec.coupled or facts.joining)
    reasons = {
        f"{name} does not know autoaccum's savers ({', '.join(savers)})": bool(savers),
        f'{name} has no batchnorm mode "{mode}", its BatchNorms see single micro-batches': mode != "micro",
        f"{name} computes the loss of each micro-batch by itself, and this one needs the whole batch": is_joint,
        f"the loss is a sum, and {name} divides it by the number of micro-batches": (
            facts.reduction == "sum" and not is_titan
        ),
        "torchtitan trains in fp32 or bf16, and the precision is fp16": (is_titan and spec.precision == "fp16"),
        "DeepSpeed shards by ZeRO, which takes other memory than fsdp2": (
            framework == "deepspeed" and parallel == "fsdp2"
        ),
        f"autoaccum knows no arguments that make {name} train on a mesh of {mesh_word(mesh or (1,))}": (
            len(mesh or ()) > 1 and not is_titan
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(reason, hint=f"plan without that, or {_OWN_STEP}")


def has_coarse_parts(share: int) -> bool:
    """Return whether equal parts of `share` samples leave such gaps that the largest size that fits is worth knowing.

    >>> has_coarse_parts(256), has_coarse_parts(257)
    (False, True)
    """
    return any(large > 2 * small for small, large in pairwise(part_sizes(share, share, equal=True)))


def framework_arguments(plan: Plan, framework: str) -> dict[str, Any]:
    """Return the arguments that make a framework train by the plan, in the form of `Plan`'s method for it.

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
    if {part for parts in plan.schedule.ranks for part in parts} != {plan.micro_batch}:
        ranks = f" x {plan.world_size} ranks" if plan.world_size > 1 else ""
        trained = plan.iter_size * plan.micro_batch * plan.world_size
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
    arguments = {framework: framework_arguments(plan, framework)}
    return dataclasses.replace(plan, arguments=arguments, notes=(*framework_notes(plan, framework), *plan.notes))


def framework_notes(plan: Plan, framework: str) -> tuple[str, ...]:
    """Return the notes on what a framework does otherwise than the plan's trials, the most important first."""
    name, workload, notes = _name(framework), plan.workload, []
    recipe = workload.recipe
    if framework in _AVERAGING and plan.iter_size > 1 and recipe.divisor in ("weight", "class weights"):
        notes.append(
            f"{name} counts the mean of each micro-batch alike, and this loss divides by {workload.weight}: where"
            " that differs between micro-batches, the gradient is not the full batch's, as autoaccum.Accumulator's is"
        )
    if framework == "transformers" and plan.iter_size > 1 and recipe.ignores_items:
        notes.append(ADDS_MEANS.format(model=workload.model, parts=plan.iter_size))
    if plan.parallel == "fsdp2" and framework in _SHARDING:
        notes.append(f"to shard the model in {name}: {_SHARDING[framework].format(ranks=plan.world_size)}")
    elif plan.world_size > 1 and plan.parallel != "fsdp2" and framework not in ("deepspeed", "torchtitan"):
        held = format_bytes(workload.parameter_bytes or 0)
        notes.append(
            f"DistributedDataParallel, which {name} uses, holds another copy of the gradients, up to {held}, which the"
            " trials did not: leave room for it (--reserve), or set its gradient_as_bucket_view"
        )
    if plan.iter_size > 1 and recipe.half and plan.spec.accumulate_in == "fp32":
        kinds = join_words(recipe.half)
        notes.append(
            f"{name} sums the gradients of {kinds} parameters in {kinds}, which takes less memory than the trials, in"
            " fp32, and rounds with each micro-batch: plan with --accumulate-in parameters"
        )
    return tuple(notes)


def code_lines(framework: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as lines to be pasted: calls of Python, flags, or a configuration as JSON.

    >>> code_lines("torchtitan", {"training": {"local_batch_size": 4, "global_batch_size": 8}})
    ['--training.local_batch_size 4 --training.global_batch_size 8']
    >>> code_lines("lightning", {"trainer": {"precision": "bf16-mixed"}, "dataloader": {"batch_size": 4}})
    ['Trainer(precision="bf16-mixed")', 'DataLoader(..., batch_size=4)']
    """
    if framework == "transformers":
        return [_call("TrainingArguments", arguments), _flags(arguments)]
    if framework == "torchtitan":
        named = {f"{group}.{name}": value for group, held in arguments.items() for name, value in held.items()}
        return [_flags(named)]
    if framework == "deepspeed":
        return [json.dumps(arguments)]
    loader = _call("DataLoader", arguments["dataloader"], "...")
    if framework == "lightning":
        return [_call("Trainer", arguments["trainer"]), loader]
    plugin = f"gradient_accumulation_plugin={_call('GradientAccumulationPlugin', arguments['plugin'])}"
    return [_call("Accelerator", arguments["accelerator"], last=plugin), loader]


def _transformers(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.iter_size,
        "average_tokens_across_devices": True,
    }
    if plan.spec.precision in ("bf16", "fp16"):
        arguments[plan.spec.precision] = True
    if plan.parallel == "fsdp2":
        arguments["fsdp"] = True
    if plan.reduce == "each":
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if plan.spec.evaluation_batch is not None:
        arguments["per_device_eval_batch_size"] = plan.spec.evaluation_batch
    if plan.multiple_of > 1:
        arguments["dataloader_drop_last"] = True
    if plan.learning_rate is not None:
        arguments["learning_rate"] = plan.learning_rate
    return arguments | ({"use_cpu": True} if plan.device.get("kind") == "cpu" else {})


def _lightning(plan: Plan) -> dict[str, Any]:
    precision = plan.spec.precision
    trainer: dict[str, Any] = {
        "accumulate_grad_batches": plan.iter_size,
        "precision": {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(str(precision), "32-true"),
        "accelerator": "cpu" if plan.device.get("kind") == "cpu" else "gpu",
        "devices": plan.world_size,
    }
    if plan.world_size > 1 and plan.parallel != "fsdp2":
        trainer["strategy"] = "ddp"
    return {"trainer": trainer, "dataloader": _loader(plan)}


def _accelerate(plan: Plan) -> dict[str, Any]:
    precision = plan.spec.precision
    accelerator: dict[str, Any] = {"mixed_precision": precision if precision in ("bf16", "fp16") else "no"}
    if plan.device.get("kind") == "cpu":
        accelerator["cpu"] = True
    # A window that ends with the loader's last batch would be divided by `num_steps` all the same.
    plugin = {
        "num_steps": plan.iter_size,
        "sync_each_batch": plan.reduce == "each",
        "sync_with_dataloader": False,
    }
    return {"accelerator": accelerator, "plugin": plugin, "dataloader": _loader(plan)}


def _deepspeed(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": plan.target_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.iter_size,
        "dataloader_drop_last": True,
    }
    # Its own "bf16" converts the parameters, which the trials did not.
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.spec.precision)
    return config | ({} if dtype is None else {"torch_autocast": {"enabled": True, "dtype": dtype}})


def _torchtitan(plan: Plan) -> dict[str, Any]:
    replicas, shards = plan.world_size, 1
    if plan.parallel == "fsdp2":
        replicas, shards = plan.mesh if plan.mesh is not None and len(plan.mesh) > 1 else (1, plan.world_size)
    return {
        "training": {
            "local_batch_size": plan.micro_batch,
            "global_batch_size": plan.target_batch,
            "mixed_precision_param": _DTYPES[plan.spec.precision],
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


def _name(framework: str) -> str:
    return _NAMES.get(framework, framework)


def _call(function: str, arguments: Mapping[str, Any], first: str = "", last: str = "") -> str:
    given = [f"{name}={value!r}".replace("'", '"') for name, value in arguments.items()]
    return f"{function}({', '.join(filter(None, (first, *given, last)))})"


def _flags(arguments: Mapping[str, Any]) -> str:
    words = []
    for name, value in arguments.items():
        plain = f"'{json.dumps(value)}'" if isinstance(value, Mapping) else str(value)
        words.append(f"--{name}" if value is True else f"--{name} {plain}")
    return " ".join(words)
