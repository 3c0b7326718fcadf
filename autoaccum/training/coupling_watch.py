"""Are samples coupled? A training says so before its first update; what no plan knows it finds out for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.halves import SAMPLES, check_live
from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.reach import find_held, find_reachable
from autoaccum.accumulation.state import TorchState
from autoaccum.errors import AutoaccumError
from autoaccum.training.events import Noted
from autoaccum.training.subjects import Trainee
from autoaccum.workload.batches import batch_size, join_batches, split_batch
from autoaccum.workload.experiments import is_large


def tell_of_coupling(
    trainee: Trainee, known: Coupling | None, parts: Sequence[Any], tell: Callable[[Any], None]
) -> None:
    """Say what couples the samples of an update: what its plan knows, else what an experiment on a copy finds.

    Nothing of the training is changed by it: a forward of the loss may reach the model itself, a teacher, or their
    generators, and all of them are put back.
    """
    found = known or _find_out(trainee, _take(parts))
    # Of BatchNorms the Accumulator itself warns, and knows more.
    told = () if trainee.batchnorm == "frozen" else batchnorm_names(trainee.model)
    for sentence in found.warnings(told):
        tell(Noted(sentence))


def _take(parts: Sequence[Any]) -> Any:
    """Some samples of an update; None where there are too few, or its parts differ in their form."""
    taken: list[Any] = []
    while sum(map(batch_size, taken)) < SAMPLES and len(taken) < len(parts):
        taken.append(parts[len(taken)])
    try:
        joined = join_batches(taken)
        return split_batch(joined, [SAMPLES, batch_size(joined) - SAMPLES])[0]
    except (AutoaccumError, RuntimeError):
        return None


def _find_out(trainee: Trainee, batch: Any) -> Coupling:
    if batch is None:
        return Coupling(reason="the first update has too few samples, or parts of several forms")
    model, objective = trainee.model, trainee.objective
    criterion = None if objective.criterion is None else objective.criterion.function
    held = find_held(unwrapped(model), trainee.optimizer)
    modules, generators = find_reachable((objective.loss_function, criterion), held)
    if any(is_large(module) for module in (model, *modules.values())):
        return Coupling(reason="what is to be copied is too large")
    state = TorchState([model, *modules.values()], generators=generators)
    try:
        return check_live(model, objective, batch, trainee.batchnorm)
    finally:
        state.restore()
