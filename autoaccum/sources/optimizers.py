"""Build the optimizer of a workload; read and set its learning rate."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.checks import describe_type, did_you_mean, type_name
from autoaccum.errors import AutoaccumError, UsageError, WorkloadError
from autoaccum.sources.model_copies import copy_module, empty_tensors

_FACTORY = "write def optimizer(params): return torch.optim.AdamW(params, lr=1e-3)"


def check_optimizer(optimizer: Any) -> Callable[..., Any]:
    """Check, before any model is built, that `optimizer` can make one optimizer; return what makes it.

    Args:
        optimizer: A name in `torch.optim`, ignoring case; a class; a function of the list of parameters; None: AdamW.

    Raises:
        WorkloadError: It is an instance, several optimizers, an unknown name, not callable, or needs a closure.
    """
    if isinstance(optimizer, Optimizer):
        raise WorkloadError(f"optimizer is an instance of {type_name(optimizer)}, bound to one model", hint=_FACTORY)
    if optimizer is None or isinstance(optimizer, str):
        classes = {key.lower(): value for key, value in vars(torch.optim).items() if _is_optimizer(value)}
        name = (optimizer or "AdamW").lower()
        if name not in classes:
            hint = did_you_mean(name, (known.__name__ for known in classes.values())) or "give a name such as AdamW"
            raise WorkloadError(f"torch.optim has no optimizer {optimizer!r}", hint=hint)
        optimizer = classes[name]
    if not callable(optimizer):
        raise WorkloadError(f"optimizer is {describe_type(optimizer)}", hint=_FACTORY)
    if _is_optimizer(optimizer) and needs_closure(optimizer):
        raise closure_refusal(optimizer.__name__)
    factory: Callable[..., Any] = optimizer
    return factory


def needs_closure(optimizer: type[Optimizer]) -> bool:
    """Return whether `step` must be called with a closure, as for LBFGS."""
    parameters = list(inspect.signature(optimizer.step).parameters.values())[1:]
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def make_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """Return an optimizer of the trainable parameters of `model`.

    Raises:
        WorkloadError: As in `check_optimizer`, the model has no trainable parameters, or `optimizer` does not make an
            optimizer of them.
    """
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise WorkloadError(
            f"none of the {len(parameters)} parameters of {type_name(model)} is trainable",
            hint="give a model with at least one parameter that requires a gradient",
        )
    built = call_factory(optimizer, trainable)
    if {id(member) for group in built.param_groups for member in group["params"]}.isdisjoint(map(id, parameters)):
        raise WorkloadError(
            f"the {type_name(built)} that optimizer(params) returned holds no parameter of the model",
            hint="build it from the params it is given",
        )
    return built


def call_factory(optimizer: Any, params: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of `params` that `optimizer` makes (see `make_optimizer`).

    Raises:
        WorkloadError: It makes no optimizer, several, or one that needs a closure.
    """
    factory = check_optimizer(optimizer)
    try:
        built = factory(params)
    except (TypeError, ValueError) as error:
        if not isinstance(factory, type):
            raise
        raise WorkloadError(f"{factory.__name__}(params) failed ({error})", hint=_FACTORY) from error
    if not isinstance(built, Optimizer):
        raise WorkloadError(f"optimizer(params) returned {describe_type(built)}, not an optimizer", hint=_FACTORY)
    if needs_closure(type(built)):
        raise closure_refusal(type_name(built))
    return built


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def closure_refusal(name: str, error: type[AutoaccumError] = WorkloadError) -> AutoaccumError:
    """Return the error for an optimizer of the class `name`, whose step needs a closure."""
    return error(
        f"{name} needs a closure, which would run the model again within the update",
        hint="use an optimizer whose step() needs none, such as AdamW or SGD",
    )


class OptimizerLike:
    """Makes an optimizer with the class, the groups and the settings of a live one, and an empty state.

    It copies the live one with empty parameters, in whose places a new optimizer has those that it is given.

    Args:
        optimizer: The live optimizer, which stays as it is. Frozen parameters are left out.
        trained: The trainable parameters of its model.

    Raises:
        UsageError: It holds other parameters.
    """

    def __init__(self, optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> None:
        self._places = [nn.Parameter(torch.empty(0)) for _ in trained]
        places = {id(parameter): place for parameter, place in zip(trained, self._places, strict=True)}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in places and parameter.requires_grad:
                raise UsageError(
                    f"the {type_name(optimizer)} holds parameters that are not the model's",
                    hint="build it from the model's; or write model, batch and loss into a file and plan that",
                )
            places.setdefault(id(parameter), nn.Parameter(torch.empty(0), requires_grad=False))
        self._empty = copy.deepcopy(optimizer, {**places, id(optimizer.state): defaultdict(dict)})
        for group in self._empty.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]

    def __call__(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """Make an optimizer of `params`, the trainable parameters of a model."""
        places = {id(place): parameter for place, parameter in zip(self._places, params, strict=True)}
        return copy.deepcopy(self._empty, places)


class OptimizerOfModel:
    """Makes an optimizer of a list of parameters by `make(model)`, for code that asks a model for its parameters.

    The model is a copy whose parameters are empty until the given ones take their places.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Optimizer]) -> None:
        self._model, self._make = copy_module(model, empty_tensors(model)), make

    def __call__(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """Make an optimizer of `params`, the trainable parameters of a model."""
        empty = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if len(empty) != len(params):
            raise WorkloadError(
                f"the model has {len(params)} trainable parameters, the Trainer's had {len(empty)}",
                hint="freeze and unfreeze parameters before the Trainer is made",
            )
        return self._make(copy_module(self._model, {id(old): new for old, new in zip(empty, params, strict=True)}))


def get_learning_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of the first parameter group.

    Raises:
        WorkloadError: There is none, or it is not above 0, so that other groups could not keep their ratio to it.
    """
    rate = _rates(optimizer)[0]
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(
            f"the learning rate of the first parameter group of {type_name(optimizer)} is {rate:g}",
            hint="give the first group an lr above 0: the other groups keep their ratio to it",
        )
    return rate


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the first parameter group; the other groups keep their ratio to it.

    A rate that is a tensor, as compiled or captured updates need, is changed in place. A scheduler made afterwards
    starts from this rate, even if an earlier one had stored another; existing schedulers do not change.

    Raises:
        WorkloadError: As for `get_learning_rate`; nothing is changed.
    """
    factor = rate / get_learning_rate(optimizer)
    rates = [rate, *(other * factor for other in _rates(optimizer)[1:])]
    for group, new in zip(optimizer.param_groups, rates, strict=True):
        for key in ("lr", "initial_lr"):
            if isinstance(group.get(key), Tensor):
                with torch.no_grad():
                    group[key].fill_(new)
            elif key in group:
                group[key] = new


def scheduler_follows_rate(make_optimizer: Callable[[], Optimizer], make_scheduler: Callable[[Optimizer], Any]) -> bool:
    """Return whether a scheduler starts from the learning rate of its optimizer.

    `OneCycleLR` and `CyclicLR` do not: they overwrite it with rates of their own. To find out, make two optimizers with
    different rates: a group that then has the same rate in both does not follow.

    Args:
        make_optimizer: Makes a new optimizer at each call.
        make_scheduler: Makes the scheduler of an optimizer, or returns None.

    Raises:
        WorkloadError: As for `get_learning_rate`.
    """
    first, second = make_optimizer(), make_optimizer()
    set_learning_rate(second, get_learning_rate(first) / 2)
    make_scheduler(first)
    make_scheduler(second)
    return all(rate != other or rate == 0 for rate, other in zip(_rates(first), _rates(second), strict=True))


def _rates(optimizer: Optimizer) -> list[float]:
    rates: list[float] = []
    for number, group in enumerate(optimizer.param_groups):
        try:
            rates.append(float(group["lr"]))
        except (KeyError, TypeError, ValueError, RuntimeError):
            state = f"has lr={group['lr']!r}" if "lr" in group else "has no lr"
            raise WorkloadError(
                f"parameter group {number} of {type_name(optimizer)} {state}, so that no learning rate can be set",
                hint="use an optimizer whose groups have a number as lr",
            ) from None
    return rates
