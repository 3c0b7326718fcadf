"""What is trained: model, batches, loss and optimizer, as one frozen record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from autoaccum.checks import check_function, check_word, describe_type, read_count, type_name
from autoaccum.errors import WorkloadError
from autoaccum.options import (
    AccumulateIn,
    BatchNormMode,
    Precision,
    read_accumulate_in,
    read_batchnorm_mode,
    read_keeps,
)
from autoaccum.workload.batches import Batching, batch_size, has_size, read_batching, wrap_batch
from autoaccum.workload.model_copies import copy_module
from autoaccum.workload.model_loss import ModelLoss
from autoaccum.workload.objective import Objective, Reduction, resolve_objective
from autoaccum.workload.optimizers import check_optimizer, make_optimizer


def no_batch(size: int) -> Any:
    """What stands for `batch` in a workload whose batches are to be made of its dataset (`samples`).

    Raises:
        WorkloadError: Always.
    """
    raise WorkloadError(f"there is no batch({size})", hint="write def batch(size): return a batch of that many samples")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        model: A function that returns an `nn.Module`, an `nn.Module` class to call without arguments, or an instance.
        batch: `batch(size)`: one batch of `size` samples on the CPU, the worst case training will see; it may be left
            out beside a dataset whose longest samples are to make it.
        loss: `loss(model, batch)`; or a criterion (see `resolve_objective`). None, and no criterion either: the loss
            that the model computes of a batch with labels (`model_loss.ModelLoss`).
        criterion: `criterion(outputs, targets)`, when batches are `(inputs, targets)`.
        optimizer: A function of the list of trainable parameters, a class, or a name of `torch.optim`; None: AdamW.
        precision: Of forward and backward: `fp32`, or `bf16` / `fp16` under autocast.
        weight: `weight(batch)`: what the mean in the loss divides by.
        reduction: `mean` or `sum`.
        batchnorm: What BatchNorm sees and remembers of a batch in parts: `micro`, `running` or `frozen`
            (`options.BatchNormMode`).
        dataset: Map-style or iterable; None when there is none.
        collate: `collate(samples)`: a batch of a list of the dataset's samples; None: torch's default_collate.
        keeps: What the training loop keeps beside the step, one word or several (`options.Keep`).
        evaluation_batch: Samples of each pass of an evaluation between updates; None: none is planned.
        evaluate: `evaluate(model, batch)`: such a pass, called in eval mode without gradients in the workload's
            precision; what it returns is held until the next pass is done. None: the loss, and the model's outputs.
        scheduler: `scheduler(optimizer)`: a learning-rate schedule, stepped once per update; None: a constant rate.
        evaluation_dataset: What is evaluated on between updates, of the same kinds as `dataset`; None: nothing.
        accumulate: `accumulate(model, micro_batches)`: a loop of the author's own, to be verified: it runs the
            micro-batches of one update forward and backward and leaves the gradient in `.grad`.
        accumulate_in: What gradients of half-precision parameters are summed in: `fp32` or `parameters`
            (`options.AccumulateIn`).
        modules: Modules beside the model, such as a teacher: one, a list or a dict of them. They are not trained, and
            go to the device with the model, as do those that the loss names.
        name: What reports call it.
        path: The file it came from; None when made in code.
        split: `split(batch, sizes)`: a list of parts with so many samples each, where samples are not rows; `size` goes
            with it.
        size: `size(batch)`: the number of its samples.
        multiple_of: Every micro-batch is a multiple of so many samples, as timm's Mixup or fixed shapes need it; None:
            1, unless a plan finds out that odd sizes do not run.
        digest: SHA-256 over that file and the local modules it imported; empty when made in code.
        worst_of: Of how many samples of the dataset `batch` gives the longest; None where it is the author's own.

    Raises:
        WorkloadError: One of them cannot be used.
    """

    model: Callable[[], nn.Module] | type[nn.Module] | nn.Module
    batch: Callable[[int], Any] = no_batch
    loss: Any = None
    criterion: Any = None
    optimizer: Any = None
    precision: Precision = "fp32"
    weight: Callable[[Any], Any] | None = None
    reduction: Reduction = "mean"
    batchnorm: BatchNormMode = "micro"
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    keeps: Sequence[str] = ()
    evaluation_batch: int | None = None
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    evaluation_dataset: Any = None
    accumulate: Callable[[nn.Module, list[Any]], Any] | None = None
    split: Callable[[Any, list[int]], Sequence[Any]] | None = None
    size: Callable[[Any], int] | None = None
    multiple_of: int | None = None
    accumulate_in: AccumulateIn = "fp32"
    modules: Any = ()
    name: str = "workload"
    path: Path | None = None
    digest: str = ""
    worst_of: int | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        check_function(self.batch, "batch", "(size)")
        check_word(self.precision, "precision", get_args(Precision), error=WorkloadError)
        if callable(self.weight):
            check_function(self.weight, "weight", "(batch)")
        if callable(self.split) and callable(self.size):
            check_function(self.split, "split", "(batch, sizes)")
            check_function(self.size, "size", "(batch)")
        read_batchnorm_mode(self.batchnorm)
        read_accumulate_in(self.accumulate_in)
        check_optimizer(self.optimizer)
        _check_dataset(self.dataset, "dataset")
        _check_dataset(self.evaluation_dataset, "evaluation_dataset")
        if self.batch is no_batch and self.dataset is None:
            raise WorkloadError(
                "there is neither batch nor dataset", hint="write def batch(size): return a batch of that many samples"
            )
        object.__setattr__(self, "keeps", read_keeps(self.keeps))
        object.__setattr__(self, "modules", _read_modules(self.modules))
        for name in ("evaluation_batch", "multiple_of"):
            if getattr(self, name) is not None:
                read_count(getattr(self, name), name, error=WorkloadError)
        if self.evaluation_batch is not None and self.evaluate is not None:
            check_function(self.evaluate, "evaluate", "(model, batch)")
        if self.loss is None and self.criterion is None:
            object.__setattr__(self, "loss", ModelLoss())
        criterion = self.objective.criterion
        if isinstance(module := getattr(criterion, "function", None), nn.Module):
            trainable = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
            if trainable:
                raise WorkloadError(
                    f"the criterion has trainable parameters ({trainable[0]}), which no optimizer would update",
                    hint="make it a part of the model and write loss(model, batch)",
                )

    @property
    def objective(self) -> Objective:
        """The loss, and what its mean divides by."""
        given = {"criterion": self.criterion, "weight": self.weight, "reduction": self.reduction}
        return dataclasses.replace(resolve_objective(self.loss, **given), batching=self.batching)

    @property
    def batching(self) -> Batching | None:
        """How its batches are counted and cut; None: by their rows."""
        return read_batching(self.split, self.size)

    def build_model(self) -> nn.Module:
        """A new model, to be trained; an instance is copied, so that every trial starts alike.

        One that is in eval mode, as `from_pretrained` leaves it, is put into train mode, as it will be trained and
        takes the memory of that. Modules at rest within a model in train mode stay so: they are frozen on purpose.

        What the user's code raises comes through as it is.

        Raises:
            WorkloadError: The function returns something else, or the instance cannot be copied.
        """
        model = self.make_model()
        return model if model.training else model.train()

    def make_model(self) -> nn.Module:
        """As `build_model`, in the mode the model comes in."""
        try:
            made = copy_module(self.model) if isinstance(self.model, nn.Module) else self.model()
        except (TypeError, RuntimeError, AttributeError) as error:
            if not isinstance(self.model, nn.Module):
                raise
            raise WorkloadError(
                f"the model, an instance of {type_name(self.model)}, cannot be copied ({error})",
                hint="give a function that builds it",
            ) from error
        if not isinstance(made, nn.Module):
            raise WorkloadError(f"model() returned {describe_type(made)}", hint="return an nn.Module")
        if isinstance(self.loss, ModelLoss):
            self.loss.read_model(made)
        return made

    def build_batch(self, size: int) -> Any:
        """`batch(size)`, checked to hold `size` samples.

        What the user's code raises comes through as it is.

        Raises:
            WorkloadError: It holds another number of samples.
        """
        made = wrap_batch(self.batch(size), self.batching)
        if not has_size(made, size):
            counts = "" if self.batching is None else ", as size(batch) counts them"
            raise WorkloadError(
                f"batch({size}) returned {batch_size(made)} samples{counts}", hint=f"return as many as asked: {size}"
            )
        return made

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """One optimizer of the trainable parameters of `model`.

        Raises:
            WorkloadError: No trainable parameters, several optimizers, an unknown name, one that needs a closure.
        """
        return make_optimizer(self.optimizer, model)

    def build_scheduler(self, optimizer: Optimizer) -> Any:
        """The schedule of the learning rate of `optimizer`; None when there is none.

        Checked here and not before: what a file calls `scheduler` matters to training only.

        Raises:
            WorkloadError: It is no function of an optimizer.
        """
        if self.scheduler is None:
            return None
        check_function(self.scheduler, "scheduler", "(optimizer)")
        made = self.scheduler(optimizer)
        if made is None:
            raise WorkloadError("scheduler(optimizer) returned None", hint="return the scheduler it makes")
        return made


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if not callable(model):
        raise WorkloadError(
            f"model is {describe_type(model)}", hint="give an nn.Module, its class, or a function that returns one"
        )
    if isinstance(model, type) and not issubclass(model, nn.Module):
        raise WorkloadError(
            f"model is the class {model.__name__}, which is no nn.Module", hint="derive it from nn.Module"
        )
    check_function(model, "model", "()")


def _read_modules(modules: Any) -> dict[str, nn.Module]:
    """Modules beside the model by name, from one, a list or a tuple, or a dict of them.

    Raises:
        WorkloadError: Something else is among them.
    """
    if isinstance(modules, nn.Module):
        modules = [modules]
    if isinstance(modules, (list, tuple)):
        modules = {f"modules[{index}]": module for index, module in enumerate(modules)}
    given = modules.values() if isinstance(modules, Mapping) else [modules]
    odd = [module for module in given if not isinstance(module, nn.Module)]
    if odd:
        raise WorkloadError(
            f"modules has {describe_type(odd[0])} in it",
            hint="give the modules beside the model: modules = [teacher]; or call something else by another name",
        )
    return {str(name): module for name, module in modules.items()}


def _check_dataset(dataset: Any, name: str) -> None:
    if dataset is not None and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise WorkloadError(
            f"{name} is {describe_type(dataset)}", hint="give samples by index or an iterable over samples"
        )
