"""The modules beside a model that are trained, counted or averaged along with it: a criterion, a teacher of a loss."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.reach import find_held, find_reachable
from autoaccum.training.checkpoints.contents import can_hold
from autoaccum.workload.weights import Objective

CRITERION = "criterion"
_NAMELESS = "loss"


def find_companions(model: nn.Module, objective: Objective, optimizer: Optimizer) -> dict[str, nn.Module]:
    """The criterion, and modules that the loss, its weight, or hooks of model and optimizer hold, by name.

    Those within the model are the model's. A module that no checkpoint could hold (a teacher that is quantised) is left
    out, unless it is the criterion.
    """
    known = {id(module) for module in model.modules()}
    criterion = None if objective.criterion is None else objective.criterion.function
    functions = (objective.loss_function, objective.weight_function, criterion)
    modules, _ = find_reachable(functions, find_held(unwrapped(model), optimizer))
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if id(unwrapped(module)) not in known and (module is criterion or _can_be_kept(module)):
            found[f"{_NAMELESS}{name}" if not name or name.startswith(" ") else name] = module
            known.update(id(inner) for inner in module.modules())
    return found


def _can_be_kept(module: nn.Module) -> bool:
    return all(can_hold(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
