"""A Lightning module with its Trainer and its data as a workload: the training step as the Trainer runs it.

Both packages are known, `lightning.pytorch` and `pytorch_lightning`, by the names of their classes: neither is imported
here. How the Trainer runs a step was read in `loops/optimization/automatic.py` and `plugins/precision` of 2.6.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autoaccum.checks import describe_type, join_words, type_name
from autoaccum.errors import WorkloadError
from autoaccum.sources.model_copies import copy_module, fixed_seeds
from autoaccum.sources.optimizers import OptimizerOfModel
from autoaccum.sources.workload import Workload
from autoaccum.spec import Precision
from autoaccum.tracebacks import user_code

PARTS = ("model", "data", "weight")
"""What `plan` may be given beside the Trainer, which does not hold them before it fits."""

_PACKAGES = ("lightning", "pytorch_lightning")
_ATTACHED = ("_trainer", "log", "log_dict", "optimizers")
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
PRECISIONS: Mapping[str, Precision] = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Precisions of a Trainer in which parameters stay in float32."""
_AVERAGES = {"WeightAveraging", "StochasticWeightAveraging"}
_PREPARING = ("prepare_data", "setup", "configure_model", "train_dataloader", "val_dataloader")
_BEGINNING = {"training_step": "on_train_batch_start", "validation_step": "on_validation_batch_start"}
_STARTING = ("on_fit_start", "on_train_start", "on_train_epoch_start")
_BY_HAND = (
    "write model, batch and loss of each optimizer into a workload file, and train as examples/lightning_manual.py does"
)


def _find_parts(names: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return module, data, loader for validation and weight among the objects that a file defines.

    The module and the datamodule are known by their classes. Of several DataLoaders, that of the validation has `val`
    in its name, and that of the training `train`, or is the only one beside it. `weight` is a function of that name.

    Raises:
        WorkloadError: There is no module, or it is not clear which object is meant.
    """
    module = _only(names, "LightningModule", lambda value: is_a(unwrap(value), "LightningModule"))
    if module is None:
        raise WorkloadError(
            "there is a Trainer, but no instance of a LightningModule beside it",
            hint="define what you give to trainer.fit as names of the file: trainer, module, and datamodule or loader",
        )
    weight = names.get("weight")
    weight = weight if inspect.isfunction(weight) else None
    data = _only(names, "LightningDataModule", lambda value: is_a(value, "LightningDataModule"))
    if data is not None:
        return module, data, None, weight
    loaders = {name: value for name, value in names.items() if isinstance(value, DataLoader)}
    validating = {name: loaders.pop(name) for name in list(loaders) if "val" in name.lower()}
    training = {name: value for name, value in loaders.items() if "train" in name.lower()} or loaders
    return module, _only(training, "DataLoader"), _only(validating, "DataLoader"), weight


def make_workload(
    trainer: Any,
    *,
    live: bool = False,
    names: Mapping[str, Any] | None = None,
    model: Any = None,
    data: Any = None,
    validation: Any = None,
    weight: Callable[[Any], Any] | None = None,
) -> Workload:
    """Return the workload that `trainer.fit(module, data)` would train; none of the objects is changed.

    The loss is the module's `training_step`, between the hooks of the batch, with a Trainer that logs nowhere. Batches
    are of the samples and the collate function of the training loader. An average of the weights that a callback keeps
    and a validation step with its loader are part of the workload.

    Args:
        trainer: The Trainer.
        live: Makes no difference: a module is copied where preparing it would change it.
        names: The names of a file, among which the other arguments are looked for.
        model: The LightningModule; None: the one that the Trainer has trained.
        data: A LightningDataModule or the DataLoader for training; None: the module's own `train_dataloader`.
        validation: The DataLoader for validation, if `data` is a DataLoader.
        weight: `weight(batch)`: what the mean in `training_step` divides by; the number of samples when None.

    Raises:
        WorkloadError: The module optimises by hand, or strategy, precision or loader are not supported.
    """
    if names is not None:
        model, data, validation, weight = _find_parts(names)
    module = unwrap(getattr(trainer, "lightning_module", None) if model is None else model)
    _check(trainer, module)
    stand_in = TrialTrainer(trainer)
    if any(overrides(module, name) for name in _PREPARING):
        module = copy_module(module)
    datamodule = copy.copy(data) if is_a(data, "LightningDataModule") else None
    preparing = user_code("preparing the data and the module, as trainer.fit does")
    with fixed_seeds(), preparing, stand_in.attached(module):
        _prepare(module, datamodule, stand_in)
        owner = module if data is None else datamodule
        if owner is not None:
            loaders = ("train_dataloader", "val_dataloader")
            data, validation = (getattr(owner, name)() if overrides(owner, name) else None for name in loaders)
        stand_in.train_dataloader, stand_in.datamodule = data, datamodule
    loader = _check_loader(data)
    precision = str(trainer.precision_plugin.precision)
    plugin = None if precision in PRECISIONS else trainer.precision_plugin
    if plugin is not None:
        module = plugin.convert_module(copy_module(module))
    step = TrainingStep(stand_in, datamodule, plugin)
    validates = overrides(module, "validation_step") and trainer.limit_val_batches != 0
    return Workload(
        model=module,
        loss=step,
        optimizer=OptimizerOfModel(module, partial(configure_optimizer, stand_in)),
        weight=weight,
        precision=PRECISIONS.get(precision, "fp32"),
        dataset=loader.dataset,
        collate=loader.collate_fn,
        ema=any(map(_averages_on_device, trainer.callbacks)),
        evaluation_batch=_largest_batch(validation) if validates else None,
        evaluate=step.evaluate if validates else None,
        scheduler=_refuse_schedule,
        accumulate_in="fp32" if plugin is None else "parameters",
        name=type_name(module),
    )


def unwrap(module: Any) -> Any:
    """Return the module within a wrapper of torch.compile."""
    return getattr(module, "_orig_mod", module)


class TrainingStep:
    """The loss of a workload: a module's `training_step` of a batch, as the Trainer's automatic optimisation calls it.

    Args:
        trainer: What the module sees as its trainer.
        datamodule: The datamodule whose hooks change a batch; None: those of the module do.
        plugin: The Trainer's precision plugin where it is no autocast, and sets dtypes.
    """

    trained_by = "lightning"
    moves_model = True
    """The Trainer moves the model to its device when it fits."""

    def __init__(self, trainer: TrialTrainer, datamodule: Any, plugin: Any) -> None:
        self._trainer, self._datamodule, self._plugin = trainer, datamodule, plugin

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss; raise WorkloadError if `training_step` returns none."""
        with self._running(model, training=True):
            # The Trainer frees the gradients of the last update after the first forward of the next one: where there
            # are none, tensors like them, written to, take their memory.
            absent = [p for p in model.parameters() if p.requires_grad and p.grad is None and torch.is_grad_enabled()]
            gradients = [torch.full_like(parameter, 0.0) for parameter in absent]
            outputs = self._call(model, "training_step", batch)
            del gradients
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            raise WorkloadError(
                f"training_step of {type_name(model)} returned {describe_type(outputs)} without a loss",
                hint="return the loss, or a dict that has it as loss",
            )
        if loss.requires_grad and loss is not outputs:
            # As the Trainer does, keep what was returned beside the loss until its backward.
            hold: Any = lambda gradient, kept=outputs: None  # noqa: E731
            loss.register_hook(hold)  # type: ignore[no-untyped-call]
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Return what `validation_step` returns for a batch."""
        with self._running(model, training=False):
            return self._call(model, "validation_step", batch)

    @contextmanager
    def _running(self, model: nn.Module, *, training: bool) -> Iterator[None]:
        """Let `model` run a step within, after the hooks that begin a training; its attributes are as before then."""
        cached, attributes = torch.is_autocast_cache_enabled(), dict(vars(model))
        dtypes = nullcontext() if self._plugin is None else self._plugin.forward_context()
        torch.set_autocast_cache_enabled(False)  # As the Trainer's autocast.
        try:
            with self._trainer.attached(model, training=training), dtypes:
                for name in _STARTING:
                    if overrides(model, name):
                        getattr(model, name)()
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            vars(model).clear()
            vars(model).update(attributes)

    def _call(self, model: Any, name: str, batch: Any) -> Any:
        """Call a step of the module with the batch, after the hooks of the batch."""
        if self._plugin is not None:
            batch = self._plugin.convert_input(batch)
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner = self._datamodule if overrides(self._datamodule, hook) else model
            if overrides(owner, hook):
                place = (model.device,) if hook == "transfer_batch_to_device" else ()
                batch = getattr(owner, hook)(batch, *place, 0)
        if overrides(model, begin := _BEGINNING[name]):
            getattr(model, begin)(batch, 0)
        step = getattr(model, name)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        count = sum(argument.kind in positional for argument in inspect.signature(step).parameters.values())
        return step(*(batch, 0, 0)[:count])  # It may leave out batch_idx and dataloader_idx.


def configure_optimizer(trainer: TrialTrainer, module: Any) -> Optimizer:
    """Return the optimizer that `configure_optimizers` of a module makes; raise WorkloadError unless it is one."""
    with trainer.attached(module), user_code("configure_optimizers"):
        configured = module.configure_optimizers()
    optimizers = [part for part in find_configured(configured) if isinstance(part, Optimizer)]
    if len(optimizers) == 1:
        return optimizers[0]
    returned, hint = f"{len(optimizers)} optimizers, and a plan is for one", _BY_HAND
    if not optimizers:
        returned = f"{describe_type(configured)} without an optimizer"
        hint = "return an optimizer, or a dict that has it as optimizer"
    raise WorkloadError(f"configure_optimizers of {type_name(module)} returned {returned}", hint=hint)


class TrialTrainer:
    """What a module sees as `self.trainer` in a trial: the Trainer, except that it logs nowhere and knows its data.

    Args:
        trainer: The Trainer, which stays as it is.
    """

    def __init__(self, trainer: Any) -> None:
        self.real = trainer
        self.training, self.validating, self.sanity_checking = True, False, False
        self.train_dataloader: Any = None
        self.datamodule: Any = None
        self._module: Any = None
        self._configured: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("real", "__setstate__", "__deepcopy__"):  # While it is unpickled, it has no attributes yet.
            raise AttributeError(name)
        return getattr(self.real, name)

    @property
    def logger(self) -> Any:
        """A logger that writes nothing, if the Trainer has one."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """As many loggers as the Trainer has, which write nothing."""
        return [self._lightnings("loggers.logger").DummyLogger() for _ in self.real.loggers]

    @property
    def num_training_batches(self) -> float:
        """The batches of an epoch; infinity if the loader has no length."""
        try:
            count: int = len(self.train_dataloader)
        except (TypeError, NotImplementedError):
            return math.inf
        limit: float | None = self.real.limit_train_batches
        return min(count, limit) if isinstance(limit, int) else int(count * (1.0 if limit is None else limit))

    @property
    def estimated_stepping_batches(self) -> float:
        """The updates of the training, as a schedule asks for them."""
        epochs: int | None = self.real.max_epochs
        steps: int = self.real.max_steps
        if epochs == -1 or self.num_training_batches == math.inf:
            return math.inf if steps == -1 else steps
        updates: int = math.ceil(self.num_training_batches / self.real.accumulate_grad_batches) * max(epochs or 1, 1)
        return updates if steps == -1 else min(updates, steps)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that the attached module configures: not those of a trial, so that only rates can be read."""
        return [part for part in self._configure() if isinstance(part, Optimizer)]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedules of these optimizers."""
        config = self._lightnings("utilities.types").LRSchedulerConfig
        return [config(part) for part in self._configure() if not isinstance(part, Optimizer)]

    def _configure(self) -> list[Any]:
        if self._configured is None:
            self._configured = []  # What `configure_optimizers` itself sees.
            self._configured = list(find_configured(self._module.configure_optimizers()))
        return self._configured

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Stand for `optimizers` of a module, which returns an only one by itself."""
        optimizers: list[Any] = self.optimizers
        if use_pl_optimizer:
            optimizers = [*map(self._lightnings("core.optimizer").LightningOptimizer, optimizers)]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _lightnings(self, name: str) -> Any:
        """Return a module of the package that the Trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
        modules = [kind.__module__ for kind in type(self.real).__mro__ if kind.__module__.endswith(".trainer.trainer")]
        return import_module(f"{modules[0].removesuffix('.trainer.trainer')}.{name}")

    @contextmanager
    def attached(self, model: nn.Module, *, training: bool = True) -> Iterator[None]:
        """Be the trainer of `model` and of the Lightning modules in it within; what they log goes nowhere."""
        modules = [part for part in model.modules() if "_trainer" in vars(part)]
        kept = [(part, {name: vars(part)[name] for name in _ATTACHED if name in vars(part)}) for part in modules]
        before = self.training, self.validating
        self.training, self.validating, self._module = training, not training, model
        for part in modules:
            vars(part).update(_trainer=self, log=_ignore, log_dict=_ignore, optimizers=self._optimizers)
        try:
            yield
        finally:
            self.training, self.validating = before
            self._module = self._configured = None
            for part, values in kept:
                for name in _ATTACHED:
                    vars(part).pop(name, None)
                vars(part).update(values)


def _check(trainer: Any, module: Any) -> None:
    """Raise WorkloadError for a module or a Trainer whose step cannot be planned."""
    if not is_a(module, "LightningModule"):
        raise WorkloadError(
            f"the Trainer's model is {describe_type(module)}",
            hint="give the LightningModule too: plan(trainer=trainer, model=module, data=datamodule)",
        )
    if not module.automatic_optimization:
        raise WorkloadError(
            f"{type_name(module)} optimises by hand (automatic_optimization is False), so its training_step is no loss",
            hint=_BY_HAND,
        )
    if (strategy := type_name(trainer.strategy)) not in _STRATEGIES:
        raise WorkloadError(
            f"the Trainer's strategy is {strategy}, and a plan knows {join_words(_STRATEGIES, 'or')}",
            hint="write model, batch and loss into a workload file: its plan knows --parallel fsdp2",
        )


def _prepare(module: Any, datamodule: Any, trainer: TrialTrainer) -> None:
    """Call what `trainer.fit` calls before it asks for loaders."""
    if datamodule is not None:
        datamodule.trainer = trainer
    for owner in (datamodule, module):
        for name, *given in (("prepare_data",), ("setup", "fit"), ("configure_model",)):
            if overrides(owner, name):
                getattr(owner, name)(*given)


def _check_loader(loader: Any) -> DataLoader[Any]:
    if isinstance(loader, DataLoader) and (loader.batch_size or loader.batch_sampler) is not None:
        return loader
    raise WorkloadError(
        f"train_dataloader is {describe_type(loader)}, so no batch of another size can be made",
        hint="give one DataLoader of samples, with a batch_size, or a LightningDataModule that makes it",
    )


def _largest_batch(loaders: Any) -> int | None:
    """Return the largest batch of the loaders for validation, of which there may be several; None if unknown."""
    several = loaders.values() if isinstance(loaders, Mapping) else loaders if isinstance(loaders, list) else [loaders]
    return max((loader.batch_size for loader in several if getattr(loader, "batch_size", None)), default=None)


def _refuse_schedule(optimizer: Any) -> Any:
    """Raise WorkloadError: `fit` and `tune` train by their own loop, which steps no schedule of a Trainer."""
    raise WorkloadError(
        "a Lightning module is trained by its Trainer, whose callbacks and schedule fit and tune do not have",
        hint="plan, and give the plan's numbers to the Trainer: autoaccum plan ... --for lightning",
    )


def _averages_on_device(callback: Any) -> bool:
    kinds = {kind.__name__ for kind in type(callback).__mro__}
    device = getattr(callback, "_device", None)
    return bool(kinds & _AVERAGES) and (device is None or torch.device(device).type != "cpu")


def _only(names: Mapping[str, Any], what: str, fits: Callable[[Any], bool] = lambda value: True) -> Any:
    """Return the only object that fits, under whatever names, or None; raise WorkloadError for several."""
    fitting = {id(value): name for name, value in names.items() if fits(value)}
    if len(fitting) > 1:
        raise WorkloadError(
            f"the file has {len(fitting)} instances of {what}: {join_words(fitting.values())}",
            hint="leave one at its top level, or call autoaccum.plan(trainer=..., model=..., data=...)",
        )
    return next(map(names.__getitem__, fitting.values()), None)


def is_a(value: Any, name: str) -> bool:
    """Return whether `value` is an instance of Lightning's class of this name."""
    kinds = [] if isinstance(value, type) else type(value).__mro__
    return any(kind.__name__ == name and _is_lightnings(kind) for kind in kinds)


def find_configured(returned: Any) -> Iterator[Any]:
    """Yield the optimizers and the schedules in what `configure_optimizers` returned (core/optimizer.py)."""
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, list | tuple):
        for part in returned:
            yield from find_configured(part)
    elif hasattr(returned, "state_dict"):
        yield returned


def overrides(owner: Any, name: str) -> bool:
    """Return whether a class of the user's defines the method `name` of `owner`."""
    defining = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    return defining is not None and not _is_lightnings(defining)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""
