"""Recognise a Trainer of transformers or Lightning, and make a Workload of it without importing its library."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from autoaccum.checks import join_words
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.sources.model_copies import current
from autoaccum.sources.spec import Workload

SAMPLES = 256
"""Samples of the dataset of which the longest make the batches, unless `worst_of` says otherwise."""

_LIGHTNING = "lightning_module"
_ADAPTERS = {
    ("transformers.trainer", "Trainer"): "transformers_trainer",
    ("lightning.pytorch.trainer.trainer", "Trainer"): _LIGHTNING,
    ("pytorch_lightning.trainer.trainer", "Trainer"): _LIGHTNING,
}
"""The module and the name of a class, and the module beside this one that has `make_workload(trainer, ...)`."""


def workload_of(
    trainer: Any, *, live: bool = False, names: Mapping[str, Any] | None = None, **parts: Any
) -> Workload | None:
    """Return the Workload of a Trainer; None if it is no Trainer.

    Args:
        trainer: The Trainer, which is not changed.
        live: Whether `model()` of the Workload shares the parameters and buffers of the Trainer's model, for trials in
            place, which restore them; if not, it returns a copy. A module of Lightning has its device only when its
            Trainer fits, so that it is always copied.
        names: The names of the file that defines the Trainer, where the parts of Lightning are looked for.
        parts: The parts that a Trainer of Lightning does not hold before it fits: `model`, `data` and `weight`.

    Raises:
        UsageError: Parts are given that the Trainer has itself.
        WorkloadError: The Trainer trains in a way that no trial can run.
    """
    adapter = _find_adapter(trainer)
    if adapter is None:
        return None
    if others := [name for name in parts if adapter != _LIGHTNING or name not in ("model", "data", "weight")]:
        raise UsageError(
            f"a trainer is given, and {join_words(others)} too", hint="the trainer has its own: leave them out"
        )
    module = import_module(f"autoaccum.sources.{adapter}")
    if adapter == _LIGHTNING and names is not None:
        parts = module.find_parts(names)
    made: Workload = module.make_workload(trainer, **parts if adapter == _LIGHTNING else {"live": live})
    return made


def free_card(trainer: Any) -> None:
    """Move the model of a Trainer, which transformers puts on the card when it is made, back to the CPU.

    Each trial moves a copy of its own there. Weights packed by bitsandbytes stay: they cannot be moved.
    """
    model = getattr(trainer, "model", None) if _find_adapter(trainer) == "transformers_trainer" else None
    if model is None:
        return
    _follow_parameters(trainer.optimizer)
    if next(model.parameters()).device.type != "cpu" and getattr(model, "quantization_method", None) is None:
        model.to("cpu")
        _follow_parameters(trainer.optimizer)


def _follow_parameters(optimizer: Any) -> None:
    """Let an optimizer, if there is one, hold the parameters that took the places of its own on a simulated card.

    Elsewhere, the parameters, their list and their state stay as they are.
    """
    for group in () if optimizer is None else optimizer.param_groups:
        parameters = group["params"]
        for index, before in enumerate(parameters):
            if (after := current(before)) is not before:
                parameters[index] = after
                if before in optimizer.state:
                    optimizer.state[after] = optimizer.state.pop(before)


def _find_adapter(given: Any) -> str | None:
    for (module, name), adapter in _ADAPTERS.items():
        kind = getattr(sys.modules.get(module), name, None)  # An object of a class has the module of the class loaded.
        if isinstance(kind, type) and isinstance(given, kind):
            return adapter
    return None


def check_import(path: Path, name: str) -> None:
    """Raise WorkloadError if a file trains at its top level by the Trainer that it calls `name`, as an import would."""
    with suppress(SyntaxError, ValueError):  # The import will say so.
        for statement in ast.parse(path.read_bytes()).body:
            call: Any = getattr(statement, "value", None)
            trains = isinstance(call, ast.Call) and ast.unparse(call.func) in (f"{name}.train", f"{name}.fit")
            if trains and "trainer" in name.lower():
                raise WorkloadError(
                    f"importing {path.name} trains: line {statement.lineno} calls {ast.unparse(call)}",
                    hint='put that line under if __name__ == "__main__":',
                )
