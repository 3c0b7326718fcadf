"""Check the arguments of an Accumulator before anything is trained, and a plan against the training it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.cuts import Limit
from autoaccum.accumulation.ranks.group import world_size
from autoaccum.checks import check_word, is_positive, join_words, read_count
from autoaccum.errors import UsageError
from autoaccum.sharded_tensors import fsdp2_modules, is_sharded, model_class, reshard
from autoaccum.sources.objective import Objective, resolve_objective
from autoaccum.sources.optimizers import closure_refusal, needs_closure
from autoaccum.sources.token_costs import TokenCosts
from autoaccum.sources.workload import Workload
from autoaccum.spec import DeviceFacts, Padding, TrainingSpec, WorkloadFacts

_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
_BY_FSDP2 = ("sharded by fully_shard", "a DTensor")


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer within accelerate's `AcceleratedOptimizer` or Lightning's `LightningOptimizer`."""
    while _is_wrapper(optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_wrapper(optimizer: Optimizer) -> None:
    """Raise UsageError for a framework's optimizer wrapper that would silently skip updates or scale gradients.

    accelerate's `step` updates only once in `gradient_accumulation_steps` calls. With fp16 both wrappers unscale
    gradients of a loss that was never scaled (accelerate/optimizer.py, Lightning's plugins/precision/amp.py).
    """
    if not _is_wrapper(optimizer):
        return
    if (steps := getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)) != 1:
        raise UsageError(
            f"accelerate's optimizer makes one update in {steps} steps",
            hint="omit gradient_accumulation_steps: the Accumulator accumulates",
        )
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    if any(getattr(owner, "scaler", None) is not None for owner in (optimizer, plugin)):
        raise UsageError(
            "the framework's optimizer scales gradients for fp16, and so would the Accumulator",
            hint='give precision="fp16" to the Accumulator, and no mixed precision to the framework',
        )


def _is_wrapper(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS


def check_model(model: Any) -> nn.Module:
    """Return the module to train: `model`, or what DistributedDataParallel wraps.

    Raises:
        UsageError: It is no module, is wrapped for some of the ranks or sharded but by FSDP2, or a parameter is lazy.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}", hint="give an nn.Module")
    module = model
    if isinstance(model, DistributedDataParallel):
        module, ranks = cast(nn.Module, model.module), model.process_group.size()
        if ranks != world_size():
            raise UsageError(
                f"DistributedDataParallel has a group of {ranks} ranks, and there are {world_size()}",
                hint="train over all ranks, in the default process group",
            )
    check_unsharded(module, but_fsdp2=True)
    reshard(module)
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise UsageError(f"parameter {lazy} is not initialised yet", hint="run the model on a sample batch first")
    return module


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise UsageError unless `optimizer` is one optimizer of `model`, and its step only updates.

    It may leave out some of the model's trainable parameters, whose gradients are then computed and dropped.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}", hint="give one torch.optim.Optimizer")
    if needs_closure(type(optimizer)):
        raise closure_refusal(type(optimizer).__name__, UsageError)
    check_wrapper(optimizer)
    trained = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"the {type(optimizer).__name__} holds no parameter of the model",
            hint="build it from model.parameters(), after the model is in place",
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise UsageError for a scheduler that cannot be stepped once per update."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric, and the loss of one update is too noisy for one",
            hint="omit scheduler, and call its step(validation_loss) yourself after each evaluation",
        )
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler is a {type(scheduler).__name__}", hint="give one of torch.optim.lr_scheduler")
    groups = getattr(getattr(scheduler, "optimizer", optimizer), "param_groups", optimizer.param_groups)
    if groups is not optimizer.param_groups:
        raise UsageError("the scheduler belongs to another optimizer", hint="build it from the optimizer given here")


def check_clip_norm(clip_norm: Any) -> None:
    """Raise UsageError for a clipping norm that is not a positive number or None."""
    if clip_norm is not None and not is_positive(clip_norm):
        raise UsageError(
            f"clip_norm is {clip_norm!r}", hint='use a number above 0, float("inf") to measure only, or None'
        )


def read_micro_batch(micro_batch: Any, multiple_of: int = 1, *, what: str = "micro_batch") -> int:
    """Return `micro_batch` as an integer; raise UsageError unless it is a whole number of at least `multiple_of`.

    `what` is its name in messages.
    """
    number = read_count(micro_batch, what)
    if number < multiple_of:
        raise UsageError(
            f"{what} is {number}, and micro-batches are to be multiples of {multiple_of}",
            hint=f"allow {multiple_of} or more",
        )
    return number


def check_unsharded(model: nn.Module, *, but_fsdp2: bool = False) -> None:
    """Raise UsageError if the model or a module within it is distributed over ranks, even over a single one.

    Args:
        model: The model.
        but_fsdp2: Whether `fully_shard` may shard it; how is checked by `find_sharded`.
    """
    allowed = _BY_FSDP2 if but_fsdp2 and fsdp2_modules(model) else ()
    for name, what in _distributed_parts(model):
        if what in allowed:
            continue
        raise UsageError(
            f"{f'{name} in the model' if name else 'the model'} is {what}",
            hint="give the bare module; the Accumulator takes one that fully_shard (FSDP2) shards, too",
        )


def _distributed_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        wrappers = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS]
        if wrappers:
            yield name, _BY_FSDP2[0] if wrappers[0] == "FSDPModule" else f"a {wrappers[0]}"
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            yield name, _BY_FSDP2[1]


_FACTS: Final[Mapping[str, Callable[[Any], str]]] = {
    "model": "the model {}".format,
    "parameters": "{:,} parameters".format,
    "parameter_bytes": "parameters of {:,} bytes".format,
    "optimizer": str,
    "precision": str,
    "loss": str,
    "kind": lambda kind: {"cpu": "the CPU", "cuda": "a CUDA card"}.get(kind, kind),
    "card": str,
    "batchnorm": "BatchNorm {}".format,
    "coupled": lambda coupled: "a coupled loss of the whole batch" if coupled else "a loss of each micro-batch",
    "accumulate_in": 'gradients summed in {0} (accumulate_in="{0}")'.format,
}
"""The facts that are compared, and each in words; one that is unknown is None or missing."""


@runtime_checkable
class PlanLike(Protocol):
    """The attributes of a plan that are read here, as `autoaccum.Plan` has them."""

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch, in samples."""

    @property
    def tokens(self) -> Any:
        """The token budget, with `micro_tokens` and `padding`; None if samples are counted."""

    @property
    def spec(self) -> TrainingSpec:
        """How the updates of its trials were run."""

    @property
    def workload(self) -> WorkloadFacts:
        """What was trained."""

    @property
    def device(self) -> DeviceFacts:
        """The kind of device, and the name of a GPU."""


def choose_limit(plan: PlanLike | None, micro_batch: int | None, micro_tokens: int | None, multiple_of: int) -> Limit:
    """Return the limit of a micro-batch that is given, or the plan's.

    Raises:
        UsageError: None or several are given, `plan` is no plan, or the number is not a whole number from 1 on.
    """
    if plan is not None and not isinstance(plan, PlanLike):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, such as Plan.load("plan.json")')
    choices = {"micro_batch": micro_batch, "micro_tokens": micro_tokens, "a plan": plan}
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        seen = f"{join_words(given)} are given" if given else "neither micro_batch, micro_tokens nor plan is given"
        raise UsageError(seen, hint="give one of them")
    if plan is not None:
        micro_batch, micro_tokens = plan.micro_batch, None if plan.tokens is None else plan.tokens.micro_tokens
    if micro_tokens is None:
        return Limit(read_micro_batch(micro_batch, multiple_of))
    return Limit(read_count(micro_tokens, "micro_tokens"), "micro_tokens")


def choose_token_costs(
    plan: PlanLike | None, spec: TrainingSpec | None, by_name: Mapping[str, Any], limit: Limit
) -> TokenCosts | None:
    """Return how tokens are counted and padding is cut: as given `by_name`, or else as the plan or a Workload says.

    Returns None if samples are counted.
    """
    given = {name: value for name, value in by_name.items() if value is not None}
    if limit.unit == "micro_batch":
        if given:
            hint = "give micro_tokens, or a plan with a token budget"
            raise UsageError(f"{next(iter(given))} is only used with micro_tokens", hint=hint)
        return None
    costs = spec.token_costs if isinstance(spec, Workload) else TokenCosts()
    if plan is not None and plan.tokens is not None:
        costs = replace(costs, padding=plan.tokens.padding)
    check_word(given.get("padding", costs.padding), "padding", get_args(Padding))
    return replace(costs, **given)


def check_token_limit(costs: TokenCosts, spec: TrainingSpec, multiple_of: int) -> None:
    """Raise UsageError if micro-batches by a token budget would break what `spec` asks for."""
    if multiple_of > 1:
        raise UsageError(
            f"micro-batches are to be multiples of {multiple_of} samples, and a token budget has any number",
            hint="give micro_batch, or omit multiple_of",
        )
    if costs.padding == "longest" and spec.batchnorm in ("exact", "running"):
        raise UsageError(
            f'batchnorm is "{spec.batchnorm}", and BatchNorm would normalise over less padding than the full batch has',
            hint='take batchnorm="frozen", give micro_batch, or pack without padding (padding="none")',
        )


def choose_objective(
    loss: Any, *, criterion: Any, weight: Any, reduction: str | None, plan: PlanLike | None, model: nn.Module
) -> Objective:
    """Resolve the loss; the plan's reduction is used if nothing else says whether the loss is a mean or a sum.

    Raises:
        UsageError: An Objective is given together with other arguments.
        WorkloadError: As in `resolve_objective`.
    """
    if isinstance(loss, Objective):
        if criterion is not None or weight is not None or reduction not in (None, loss.reduction):
            raise UsageError(
                "an Objective is given, and criterion, weight or reduction too", hint="give the Objective only"
            )
        return loss
    objective = resolve_objective(loss, criterion=criterion, weight=weight, reduction=reduction or "mean", model=model)
    is_known = objective.criterion is not None and objective.criterion.reduction is not None
    if reduction is not None or is_known or weight is not None or plan is None:
        return objective
    return resolve_objective(loss, criterion=criterion, reduction=plan.workload.reduction, model=model)


def check_plan(plan: PlanLike, here: Mapping[str, Any]) -> None:
    """Raise UsageError if the plan was made for another training than `here`, its `current_facts`.

    Facts that the plan does not record are not compared, nor is the number of ranks, which a micro-batch does not
    depend on.
    """
    if different := differences(plan_facts(plan), here):
        theirs, ours = (", ".join(words) for words in zip(*different, strict=True))
        raise UsageError(
            f"the plan is for {theirs}; here is {ours}",
            hint=f"plan again for what is here, or use its number all the same: micro_batch={plan.micro_batch}",
        )


def plan_facts(plan: PlanLike) -> dict[str, Any]:
    """Return the facts that the plan records about its workload and device.

    Raises:
        UsageError: It is the plan of a training command, whose trials ran the updates of that.
    """
    if plan.workload.command:
        raise UsageError(
            f"the plan is of a command, {plan.workload.reference}, which trains by itself",
            hint=f"run it with the plan's sizes, or use the number all the same: micro_batch={plan.micro_batch}",
        )
    spec, workload, device = plan.spec, plan.workload, plan.device
    is_wrapper = workload.model in ("OptimizedModule", "DataParallel")  # Their names are not the inner model's.
    return {
        **{name: getattr(workload, name) or None for name in ("parameters", "parameter_bytes", "optimizer")},
        **{name: getattr(spec, name) for name in ("precision", "batchnorm", "coupled", "accumulate_in")},
        "model": None if is_wrapper else workload.model or None,
        "loss": _loss_phrase(workload.reduction, workload.weight) if workload.weight else None,
        "kind": "cuda" if device.kind == "simulated" else device.kind,
        "card": device.card,
    }


def current_facts(model: nn.Module, optimizer: Optimizer, objective: Objective, spec: TrainingSpec) -> dict[str, Any]:
    """Return the facts of this training, by the names that a plan uses."""
    return {
        **model_facts(model, optimizer, spec.precision),
        "loss": _loss_phrase(objective.reduction, objective.divisor_label),
        "batchnorm": spec.batchnorm,
        "coupled": objective.coupled,
        "accumulate_in": spec.accumulate_in,
    }


def model_facts(model: nn.Module, optimizer: Optimizer | None, precision: str | None) -> dict[str, Any]:
    """Return the facts of a model and its device; what is not known is None."""
    inner, device = unwrap_model(model), model_device(model)
    parameters = list(inner.parameters())
    # Sharded and quantised tensors have their storage elsewhere.
    is_dense = all(type(parameter.detach()) is Tensor for parameter in parameters)
    return {
        "model": model_class(inner).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": storage_bytes(parameters) if is_dense else None,
        "optimizer": None if optimizer is None else type(unwrap_optimizer(optimizer)).__name__,
        "precision": precision,
        "kind": device.type,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def differences(planned: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the differing facts in words, as pairs of the plan's and this training's.

    >>> differences({"model": "GPT", "precision": "bf16"}, {"model": "GPT", "precision": "fp32", "optimizer": "SGD"})
    [('bf16', 'fp32')]
    """
    known = [name for name in _FACTS if planned.get(name) is not None and here.get(name) is not None]
    different = [name for name in known if planned[name] != here[name]]
    if "parameters" in different:  # Their bytes differ with them.
        different = [name for name in different if name != "parameter_bytes"]
    return [(_FACTS[name](planned[name]), _FACTS[name](here[name])) for name in different]


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of dense `parameters`; tied ones count once, and a part of a shared storage counts alone."""
    dense = [parameter.detach() for parameter in parameters if parameter.layout == torch.strided]
    spans = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.nbytes for t in dense}
    return sum(spans.values())


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module within a wrapper of torch.compile or DataParallel."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _loss_phrase(reduction: str, source: str) -> str:
    """Return what the loss is divided by, without the criterion's name, which may be a function's or a module's."""
    return "a summed loss" if reduction == "sum" else f"a loss divided by {source.partition(' (')[0]}"
