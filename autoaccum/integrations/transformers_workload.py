"""Make a Workload of a `transformers.Trainer`: what its `train()` would run, without the Trainer being changed.

The loss is the Trainer's own `compute_loss` with `num_items_in_batch`, the number of labels that count, which is also
the weight of a micro-batch: parts add up to the loss of the effective batch. The calls are made on a copy of the
Trainer that has neither its model nor its data.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import unwrap_optimizer
from autoaccum.checks import type_name
from autoaccum.errors import WorkloadError
from autoaccum.simulation.tracing.placement import follow_parameters
from autoaccum.sources.batches import batch_size, has_size
from autoaccum.sources.model_copies import copy_module, empty_tensors, fixed_seeds
from autoaccum.sources.model_loss import ModelLoss, ignores_items
from autoaccum.sources.optimizers import OptimizerLike, OptimizerOfModel
from autoaccum.sources.pytree import map_tensors, tensors
from autoaccum.sources.samples import some_samples
from autoaccum.sources.workload import Workload
from autoaccum.spec import Precision
from autoaccum.tracebacks import user_code

PARTS: tuple[str, ...] = ()
"""What `plan` may be given beside the Trainer."""

PRECISIONS: Mapping[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_LEFT_OUT = (
    *("model", "model_wrapped", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset", "callback_handler"),
    *("data_collator", "_memory_tracker", "model_init", "_eval_dataloaders", "gather_function"),
)
_WRITE = "define model, batch and loss in a file, as in examples/docs/guides/workload_file.md"


def make_workload(trainer: Any, *, live: bool = False, names: Any = None) -> Workload:
    """Return the Workload of a Trainer (see `loading.workload_of`).

    Raises:
        WorkloadError: The Trainer trains in a way that no trial can run, or has no dataset that can be read.
    """
    if names is not None:
        free_card(trainer)
    check_supported(trainer)
    args, model = trainer.args, trainer.model
    parts = set(model.modules())
    beside = {  # Such as the reference of DPO.
        name: value
        for name, value in vars(trainer).items()
        if isinstance(value, nn.Module) and value not in parts and name not in _LEFT_OUT
    }
    for name, module in beside.items():
        if model in module.modules():
            raise WorkloadError(f"the Trainer's {name} ({type_name(module)}) holds the model itself", hint=_WRITE)
    shadow = _shadow(trainer)
    dataset, collate = _read_data(trainer)
    packed: dict[str, Any] = {}
    if _is_packed(collate, dataset):
        collate = PackedBatches(collate)
        packed = {"split": collate.split, "size": collate.size}
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trainer.optimizer is None:
        empty = _without_autocast(model, empty_tensors(model))
        optimizer: Any = OptimizerOfModel(empty, partial(_create_optimizer, shadow))
    else:
        optimizer = OptimizerLike(unwrap_optimizer(trainer.optimizer), trained)
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in trained)
    loss = TrainerLoss(shadow, model)
    return Workload(
        model=partial(_build_model, trainer, live=live),
        loss=loss,
        **loss.divides,
        optimizer=optimizer,
        precision=PRECISIONS[args.mixed_precision],
        accumulate_in="parameters" if half else "fp32",
        dataset=dataset,
        collate=collate,
        **packed,
        evaluation_batch=args.per_device_eval_batch_size if evaluates else None,
        evaluate=_Evaluation(shadow, _evaluation_passes(trainer)) if evaluates else None,
        modules=beside,
        name=type_name(model),
    )


def free_card(trainer: Any) -> None:
    """Move the model of a Trainer back to the CPU: each trial moves a copy of its own to the card.

    Weights packed by bitsandbytes stay, since they cannot be moved.
    """
    model = trainer.model
    follow_parameters(trainer.optimizer)
    if next(model.parameters()).device.type != "cpu" and getattr(model, "quantization_method", None) is None:
        model.to("cpu")
        follow_parameters(trainer.optimizer)


def _is_packed(collate: Any, dataset: Any) -> bool:
    """Return whether the first dimension of a batch does not count its samples, as where sequences are packed."""
    with suppress(Exception), fixed_seeds():  # An error will be met, and shown, later.
        samples = list(some_samples(dataset, 2))
        batch = collate(samples)
        return isinstance(batch, Mapping) and not counts_rows(batch, len(samples))
    return False


def counts_rows(batch: Any, size: int | None = None) -> bool:
    """Return whether a batch can be split into samples, `size` of them if it is given."""
    with suppress(WorkloadError):
        return batch_size(batch) >= 0 if size is None else has_size(batch, size)
    return False


class PackedBatches:
    """Collates, counts and splits batches whose tensors are packed: a part is collated of its own samples."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> _Packed:
        """Return the batch of `samples`."""
        batch = _Packed(self._collate(list(samples)))
        batch.samples = samples
        return batch

    def split(self, batch: _Packed, sizes: Sequence[int]) -> list[_Packed]:
        """Return parts of `sizes` samples."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [self(batch.samples[start:stop]) for start, stop in bounds]

    def size(self, batch: _Packed) -> int:
        """Return the number of samples."""
        return len(batch.samples)


class _Packed(dict[str, Any]):
    """A batch, with the samples that it was made of."""

    samples: Sequence[Any]


def check_supported(trainer: Any) -> None:
    """Raise WorkloadError for a Trainer that trains in a way that no trial can run."""
    args = trainer.args
    reasons = {
        "trains by DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "shards the model by FSDP": getattr(trainer, "is_fsdp_enabled", False),
        "splits the model or its sequences over devices": getattr(trainer, "is_model_parallel", False)
        or getattr(trainer.accelerator, "parallelism_config", None) is not None,
        f"computes in {args.mixed_precision}": args.mixed_precision not in PRECISIONS,
        "puts Liger kernels into the model when it trains": getattr(args, "use_liger_kernel", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise WorkloadError(f"the Trainer {reason}, which no trial of a Trainer runs", hint=_WRITE)
    if args.n_gpu > 1:
        raise WorkloadError(
            f"the Trainer would split each batch over {args.n_gpu} cards by DataParallel",
            hint="let it see one: CUDA_VISIBLE_DEVICES=0; on several, train by torchrun",
        )
    try:
        inspect.signature(trainer.compute_loss).bind(trainer.model, {}, num_items_in_batch=None)
    except TypeError:
        raise WorkloadError(
            f"compute_loss of {type_name(trainer)} takes no num_items_in_batch, which train() gives it",
            hint="write def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
        ) from None
    if trainer.train_dataset is None:
        raise WorkloadError("the Trainer has no train_dataset", hint="give it one: its longest samples make the trials")


def _shadow(trainer: Any) -> Any:
    """Return a copy of a Trainer without its model and its data; containers are copied, too."""
    shadow = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if name in _LEFT_OUT:
            setattr(shadow, name, None)
        elif isinstance(value, (dict, list, set)):
            setattr(shadow, name, copy.deepcopy(value))
    shadow.accelerator = _at_rest(trainer.accelerator)
    shadow.args = copy.copy(trainer.args)
    shadow.args.average_tokens_across_devices = False  # Weights are summed over ranks by the Accumulator.
    shadow.log = _ignore
    shadow._prepare_inputs = _same  # Batches are where the model is, which in a simulation is not `args.device`.
    return shadow


def _at_rest(accelerator: Any) -> Any:
    """Return a copy of an Accelerator of accelerate that refers to no model, optimizer or loader."""
    resting, state = copy.copy(accelerator), accelerator.gradient_state
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
        setattr(resting, name, [])
    resting.gradient_state = object.__new__(type(state))  # All of its instances share their attributes otherwise.
    vars(resting.gradient_state).update(vars(state))
    resting.gradient_state.dataloader_references = [None]  # A property: the state holds weak references.
    resting.gather_for_metrics = partial(_gather, resting.gather_for_metrics)
    return resting


def _gather(own: Callable[..., Any], values: Any, *given: Any, **options: Any) -> Any:
    """Gather by the accelerator's `own` method, since a loss may need it (KTO of TRL); on a simulated card make zeros.

    The zeros are on the CPU, so that a Trainer of TRL can read what it logs: a simulated card has no values.
    """
    if not any(isinstance(value, FakeTensor) for value in tensors(values)):
        return own(values, *given, **options)
    return map_tensors(values, lambda value: torch.zeros(value.shape, dtype=value.dtype))


def _same(inputs: Any) -> Any:
    return inputs


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _read_data(trainer: Any) -> tuple[Any, Any]:
    """Return the training dataset and the collate function as the Trainer's own DataLoader has them."""
    prepared = trainer.accelerator._dataloaders
    before = list(prepared)
    try:
        with fixed_seeds(), user_code("get_train_dataloader() of the Trainer"):
            loader = copy.copy(trainer).get_train_dataloader()
    finally:
        prepared[:] = before
    return loader.dataset, loader.collate_fn


def _evaluation_passes(trainer: Any) -> int:
    """Return how many batches of predictions an evaluation collects on the device; 0: none, as without metrics."""
    args = trainer.args
    if trainer.compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        return 0
    datasets = trainer.eval_dataset.values() if isinstance(trainer.eval_dataset, dict) else [trainer.eval_dataset]
    sizes = [len(dataset) for dataset in datasets if hasattr(dataset, "__len__")]
    passes: int = math.ceil(max(sizes, default=1) / args.per_device_eval_batch_size)
    return passes if args.eval_accumulation_steps is None else min(passes, int(args.eval_accumulation_steps))


def _build_model(trainer: Any, *, live: bool) -> nn.Module:
    """Make the model as `train()` would prepare it: in train mode, with gradient checkpointing and NEFTune's noise.

    A live one shares parameters and buffers with the Trainer's model, and nothing else: hooks, modes and attributes
    that a trial sets are its own.
    """
    shared = (*trainer.model.parameters(), *trainer.model.buffers()) if live else ()
    model = _without_autocast(trainer.model, {id(tensor): tensor for tensor in shared}).train()
    _enable_checkpointing(model, trainer.args)
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        from transformers.integrations.neftune import activate_neftune

        activate_neftune(model, trainer.neftune_noise_alpha, trainer.accelerator)
    return model


def _without_autocast(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a model without the autocast that accelerate wraps around its `forward` when a Trainer trains."""
    model = copy_module(model, memo)
    attributes = vars(model)
    if "_original_forward" in attributes:
        attributes["forward"] = attributes.pop("_original_forward")
        if getattr(attributes["forward"], "__func__", None) is type(model).forward:
            del attributes["forward"]
    return model


def _enable_checkpointing(model: Any, args: Any) -> None:
    """Turn gradient checkpointing on as `Trainer.train` does, which has had two names for it."""
    if not args.gradient_checkpointing:
        return
    settings = dict(getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {})
    if hasattr(model, "activation_checkpointing_enable"):
        further = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings or None, **further)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None)


class TrainerLoss:
    """The Trainer's `compute_loss` of one batch: a mean, and what it divides by.

    The Trainer counts that (`num_items_in_batch`); where it does not, the model's class tells.

    Attributes:
        divides: The weight for a Workload or an Accumulator; the reduction of a sum, which has none.
    """

    trained_by = "transformers"

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer = trainer
        self._inferred = ModelLoss()
        self._inferred.read_model(model)
        sums = self._inferred.reduction == "sum"
        self.divides: dict[str, Any] = {"reduction": "sum"} if sums else {"weight": self.weight}

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of one batch by a model that is not prepared by the Trainer."""
        with _as_prepared(self._trainer, model):
            return self.compute(model, batch)

    def compute(self, model: nn.Module, batch: Any) -> Any:
        """Return the mean over the batch's own items."""
        # `compute_loss` may take the labels out of the batch.
        return self._trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=self._count(batch))

    def weight(self, batch: Any) -> float:
        """Return `num_items_in_batch`, or the number that the model's class implies."""
        counted = self._count(batch)
        return self._inferred.weight(batch) if counted is None else float(counted)

    def ignores_items(self, model: nn.Module) -> bool:
        """Return whether the Trainer adds up means of micro-batches (`model_loss.ignores_items`)."""
        trainer = self._trainer
        divides = (trainer.label_smoother, trainer.compute_loss_func, getattr(trainer, "loss_is_scaled_for_ga", None))
        return divides == (None, None, None) and ignores_items(model)

    def _count(self, batch: Any) -> Any:
        """Return `num_items_in_batch` of one batch; None where the Trainer passes none."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
        return self._trainer._get_num_items_in_batch([batch], device)


class _Evaluation:
    """One pass of the Trainer's evaluation; its result takes the room of all predictions that an evaluation collects.

    The Trainer appends them to one tensor, so that the last pass holds nearly all of them twice.
    """

    def __init__(self, shadow: Any, passes: int) -> None:
        self._shadow, self._passes = shadow, passes

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        shadow = self._shadow
        with _as_prepared(shadow, model):
            loss, logits, labels = shadow.prediction_step(model, copy.copy(batch), self._passes == 0)
        if self._passes == 0:
            return loss
        if shadow.preprocess_logits_for_metrics is not None:
            logits = shadow.preprocess_logits_for_metrics(logits, labels)
        copies = 2 * self._passes - 1
        return loss, map_tensors((logits, labels), lambda rows: rows.new_empty((copies * len(rows), *rows.shape[1:])))


@contextmanager
def _as_prepared(shadow: Any, model: nn.Module) -> Iterator[None]:
    """Lend `model` to the Trainer's methods; under autocast its outputs are float32, as accelerate prepares it."""
    from accelerate.utils.operations import convert_to_fp32

    def convert(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        device = next(module.parameters()).device.type
        return convert_to_fp32(outputs) if torch.is_autocast_enabled(device) else outputs

    shadow.model = shadow.model_wrapped = model
    try:
        with model.register_forward_hook(convert):
            yield
    finally:
        shadow.model = shadow.model_wrapped = shadow.optimizer = None


def _create_optimizer(shadow: Any, model: nn.Module) -> Optimizer:
    """Return what the Trainer's own `create_optimizer` makes for a model, of which it asks the names."""
    with _as_prepared(shadow, model), user_code("create_optimizer() of the Trainer"):
        shadow.create_optimizer()
        return unwrap_optimizer(shadow.optimizer)
