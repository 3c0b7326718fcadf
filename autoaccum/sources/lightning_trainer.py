"""What a Lightning module sees as its Trainer in a trial, and Lightning's classes, known without importing them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

_PACKAGES = ("lightning", "pytorch_lightning")
_ATTACHED = ("_trainer", "log", "log_dict", "optimizers")


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
        return [one for one in self._configure() if isinstance(one, Optimizer)]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedules of these optimizers."""
        config = self._lightnings("utilities.types").LRSchedulerConfig
        return [config(one) for one in self._configure() if not isinstance(one, Optimizer)]

    def _configure(self) -> list[Any]:
        if self._configured is None:
            self._configured = []  # What `configure_optimizers` itself sees.
            self._configured = list(find_configured(self._module.configure_optimizers()))
        return self._configured

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Stand for `optimizers` of a module, which returns an only one by itself."""
        wrap = self._lightnings("core.optimizer").LightningOptimizer if use_pl_optimizer else lambda one: one
        found = [wrap(one) for one in self.optimizers]
        return found[0] if len(found) == 1 else found

    def _lightnings(self, name: str) -> Any:
        """Return a module of the package that the Trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
        found = [kind for kind in type(self.real).__mro__ if kind.__module__.endswith(".trainer.trainer")]
        return import_module(f"{found[0].__module__.removesuffix('.trainer.trainer')}.{name}")

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


def is_a(value: Any, name: str) -> bool:
    """Return whether `value` is an instance of Lightning's class of this name."""
    kinds = [] if isinstance(value, type) else type(value).__mro__
    return any(kind.__name__ == name and _is_lightnings(kind) for kind in kinds)


def find_configured(made: Any) -> Iterator[Any]:
    """Yield the optimizers and the schedules in what `configure_optimizers` returned (core/optimizer.py)."""
    if isinstance(made, Mapping):
        made = list(made.values())
    if isinstance(made, list | tuple):
        for one in made:
            yield from find_configured(one)
    elif hasattr(made, "state_dict"):
        yield made


def overrides(owner: Any, name: str) -> bool:
    """Return whether a class of the user's defines the method `name` of `owner`."""
    defining = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    return defining is not None and not _is_lightnings(defining)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""
