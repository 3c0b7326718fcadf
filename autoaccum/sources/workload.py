"""`Workload`: the model, batches, loss and optimizer to train, as one frozen record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from torch import nn
from torch.optim import Optimizer

from autoaccum.checks import check_function, check_word, describe_type, type_name
from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.sources.batches import BatchReader, read_batch, read_batching
from autoaccum.sources.model_copies import copy_module
from autoaccum.sources.model_loss import ModelLoss
from autoaccum.sources.objective import (
    AS_ONE_MODULE,
    Objective,
    Reduction,
    read_coupled_loss,
    resolve_objective,
    with_coupling,
)
from autoaccum.sources.optimizers import check_optimizer, make_optimizer
from autoaccum.sources.token_costs import TokenCosts, is_length_sequence
from autoaccum.spec import Padding, SampleLengths, TrainingSpec


def no_batch(size: int) -> Any:
    """Raise WorkloadError: the `batch` of a workload whose batches are made of its dataset (see `samples`)."""
    raise WorkloadError(f"there is no batch({size})", hint="write def batch(size): return a batch of that many samples")


@dataclass(frozen=True, kw_only=True)
class Workload(TrainingSpec):
    """A model and how it is trained: a `TrainingSpec`, whose fields it has too, and what is trained.

    Attributes:
        model: A function that returns an `nn.Module`, an `nn.Module` class to call without arguments, or an instance.
        batch: `batch(size)` returns one batch of `size` samples on the CPU, the largest that training will see. It may
            be left out if batches are made of the longest samples of the dataset (`longest_of`).
        loss: `loss(model, batch)` or a criterion (see `resolve_objective`). Without loss and criterion, the model
            computes its own loss from a batch with labels (`model_loss.ModelLoss`).
        criterion: `criterion(outputs, targets)`, for batches `(inputs, targets)`.
        weight: `weight(batch)` returns the number that the mean in the loss divides by.
        reduction: `mean` or `sum`.
        outputs: `outputs(model, batch)` returns a nest of tensors whose first dimension is the sample, or numbers.
        coupled_loss: `coupled_loss(outputs, batch)`, in place of `loss`, of those outputs; then `coupled` is True by
            default.
        dataset: A map-style or iterable dataset, or None.
        collate: `collate(samples)` makes a batch of a list of samples; None: PyTorch's `default_collate`.
        evaluate: `evaluate(model, batch)` evaluates one batch; it is called in eval mode, without gradients, in the
            workload's precision, and its result is kept until the next batch is done. None: the loss and the outputs.
        scheduler: `scheduler(optimizer)` returns a learning-rate scheduler, stepped once per update, or None.
        evaluation_dataset: The dataset of the evaluations between updates, of the same kinds as `dataset`, or None.
        accumulate: `accumulate(model, micro_batches)`, your own accumulation loop to verify: it runs the micro-batches
            of one update forward and backward and leaves the gradient in `.grad`.
        modules: Further modules that are not trained, such as a teacher: one, a list or a dict. They are moved to the
            device with the model, as are modules that the loss refers to.
        parallelize: `parallelize(model, mesh)` shards the model over the ranks of `mesh` by `fully_shard` (FSDP2), for
            `fit` on several ranks; it may return the model.
        name: The name in reports.
        path: The file it was loaded from; None if made in code.
        split: `split(batch, sizes)` returns parts with these numbers of samples, if samples are not rows; needs `size`.
        size: `size(batch)` returns the number of samples.
        length: `length(sample)` returns what a sample of the dataset costs, in tokens (or frames, nodes ...). With it
            or `lengths`, and a dataset, micro-batches are made by a token budget (`token_costs`).
        lengths: `lengths(batch)` returns the tokens of each sample of a batch; or the tokens of each sample of the
            dataset, as a sequence of numbers.
        padding: `longest` if micro-batches are padded to their longest sample (the default), `none` if they are packed
            without padding.
        sample_lengths: What was read of the lengths of the dataset's samples (`samples.take_longest`).
        trim: `trim(batch)` returns a batch cut to its longest sample; tensors of the standard names need none.
        digest: SHA-256 of that file and the local modules it imports; empty if made in code.

    Raises:
        WorkloadError: An attribute has a value that cannot be used.
    """

    model: Callable[[], nn.Module] | type[nn.Module] | nn.Module
    batch: Callable[..., Any] = no_batch
    loss: Any = None
    criterion: Any = None
    weight: Callable[[Any], Any] | None = None
    reduction: Reduction = "mean"
    coupled: bool = None  # type: ignore[assignment]  # Resolved below.
    outputs: Callable[[nn.Module, Any], Any] | None = None
    coupled_loss: Callable[[Any, Any], Any] | None = None
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    evaluation_dataset: Any = None
    accumulate: Callable[[nn.Module, list[Any]], Any] | None = None
    split: Callable[[Any, list[int]], Sequence[Any]] | None = None
    size: Callable[[Any], int] | None = None
    length: Callable[[Any], Any] | None = None
    lengths: Callable[[Any], Any] | Sequence[int] | None = None
    padding: Padding | None = None
    trim: Callable[[Any], Any] | None = None
    sample_lengths: SampleLengths | None = None
    modules: Any = ()
    parallelize: Callable[[nn.Module, Any], Any] | None = None
    name: str = "workload"
    path: Path | None = None
    digest: str = ""

    error_type: ClassVar[type[AutoaccumError]] = WorkloadError

    def __post_init__(self) -> None:
        if self.coupled is None:
            object.__setattr__(self, "coupled", self.coupled_loss is not None)
        super().__post_init__()
        _check_model(self.model)
        check_function(self.batch, "batch", "(size)")
        if self.parallelize is not None:
            check_function(self.parallelize, "parallelize", "(model, mesh)")
        check_optimizer(self.optimizer)
        if self.padding is not None:
            check_word(self.padding, "padding", get_args(Padding), error=WorkloadError)
        if self.lengths is not None and not callable(self.lengths) and not is_length_sequence(self.lengths):
            raise WorkloadError(
                f"lengths is {describe_type(self.lengths)}",
                hint="give lengths(batch), or the tokens of each sample of the dataset",
            )
        _check_dataset(self.dataset, "dataset")
        _check_dataset(self.evaluation_dataset, "evaluation_dataset")
        if self.batch is no_batch and self.dataset is None:
            raise WorkloadError(
                "there is neither batch nor dataset", hint="write def batch(size): return a batch of that many samples"
            )
        object.__setattr__(self, "modules", _read_modules(self.modules))
        if self.evaluation_batch is not None and self.evaluate is not None:
            check_function(self.evaluate, "evaluate", "(model, batch)")
        if self.loss is None and self.criterion is None and self.coupled_loss is None:
            object.__setattr__(self, "loss", ModelLoss())
        if isinstance(self.loss, ModelLoss) and isinstance(self.model, nn.Module):
            self.loss.read_model(self.model)
        _ = self.token_costs  # It checks its functions.
        criterion = self.objective.criterion_module
        for name, parameter in () if criterion is None else criterion.named_parameters():
            if parameter.requires_grad:
                raise WorkloadError(
                    f"the criterion has trainable parameters ({name}), which no optimizer would update",
                    hint=AS_ONE_MODULE,
                )

    @property
    def objective(self) -> Objective:
        """The loss and the number that its mean divides by."""
        loss = read_coupled_loss(self.loss, self.outputs, self.coupled_loss)
        given = {"criterion": self.criterion, "weight": self.weight, "reduction": self.reduction}
        objective = dataclasses.replace(resolve_objective(loss, **given), batching=self.batching)
        return with_coupling(objective, self.coupled, WorkloadError)

    @property
    def batching(self) -> BatchReader:
        """Its functions that count and split batches; without them, how its batches are read."""
        return read_batching(self.split, self.size)

    @property
    def token_costs(self) -> TokenCosts:
        """How its samples are measured in tokens; by the names of tensors, unless it has functions for that."""
        lengths = self.lengths if callable(self.lengths) else None
        return TokenCosts(padding=self.padding or "longest", lengths=lengths, length=self.length, trim=self.trim)

    @property
    def counts_tokens(self) -> bool:
        """Whether it says what its samples cost, so that its micro-batches are made by a token budget."""
        return self.length is not None or self.lengths is not None

    def build_model(self) -> nn.Module:
        """Return a new model in train mode; an instance is copied, so that every trial starts from the same state.

        A model in eval mode, as `from_pretrained` returns it, is put into train mode, in which it will need memory.
        Submodules in eval mode within a model in train mode stay so: they are frozen on purpose.

        Errors of the user's code are passed on.

        Raises:
            WorkloadError: The function does not return an `nn.Module`, or the instance cannot be copied.
        """
        model = self.make_model()
        return model if model.training else model.train()

    def make_model(self) -> nn.Module:
        """Return a new model as `build_model` does, but leave it in train or eval mode as it is."""
        try:
            model = copy_module(self.model) if isinstance(self.model, nn.Module) else self.model()
        except (TypeError, RuntimeError, AttributeError) as error:
            if not isinstance(self.model, nn.Module):
                raise
            raise WorkloadError(
                f"the model, an instance of {type_name(self.model)}, cannot be copied ({error})",
                hint="give a function that builds it",
            ) from error
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"model() returned {describe_type(model)}", hint="return an nn.Module")
        if isinstance(self.loss, ModelLoss):
            self.loss.read_model(model)
        return model

    def build_batch(self, size: int, length: int | None = None) -> Any:
        """Return `batch(size)`, after checking that it holds `size` samples; of `length` tokens, if that is given.

        Such batches are made of a dataset whose lengths were read (`sample_lengths`).

        Errors of the user's code are passed on.

        Raises:
            WorkloadError: It holds another number of samples.
        """
        if length is not None:
            return read_batch(self.batch(size, length), self.batching, size, f"batch({size}, {length})")
        return read_batch(self.batch(size), self.batching, size, f"batch({size})", self.batch)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return an optimizer of the trainable parameters of `model`; errors as in `make_optimizer`."""
        return make_optimizer(self.optimizer, model)

    def build_scheduler(self, optimizer: Optimizer) -> Any:
        """Return a learning-rate scheduler of `optimizer`, or None.

        `scheduler` is only checked here, since only training uses it.

        Raises:
            WorkloadError: `scheduler` is not a function of an optimizer, or returns None.
        """
        if self.scheduler is None:
            return None
        check_function(self.scheduler, "scheduler", "(optimizer)")
        scheduler = self.scheduler(optimizer)
        if scheduler is None:
            raise WorkloadError("scheduler(optimizer) returned None", hint="return the scheduler that it makes")
        return scheduler


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if not callable(model):
        raise WorkloadError(
            f"model is {describe_type(model)}", hint="give an nn.Module, its class, or a function that returns one"
        )
    if isinstance(model, type) and not issubclass(model, nn.Module):
        raise WorkloadError(
            f"model is the class {model.__name__}, which is not an nn.Module", hint="derive it from nn.Module"
        )
    check_function(model, "model", "()")


def _read_modules(modules: Any) -> dict[str, nn.Module]:
    """Return modules by name from one module, a list, a tuple or a dict; raise WorkloadError for anything else."""
    if isinstance(modules, nn.Module):
        modules = [modules]
    if isinstance(modules, (list, tuple)):
        modules = {f"modules[{index}]": module for index, module in enumerate(modules)}
    given = modules.values() if isinstance(modules, Mapping) else [modules]
    odd = [module for module in given if not isinstance(module, nn.Module)]
    if odd:
        raise WorkloadError(
            f"modules contains {describe_type(odd[0])}",
            hint="give further modules, as in modules = [teacher], or rename what is not meant for autoaccum",
        )
    return {str(name): module for name, module in modules.items()}


def _check_dataset(dataset: Any, name: str) -> None:
    if dataset is not None and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise WorkloadError(f"{name} is {describe_type(dataset)}", hint="give a map-style or an iterable dataset")
