"""Hand a framework's Trainer to its adapter in `integrations`, which makes a Workload of it.

An adapter is found by the module of the Trainer's class, and imported only then: no framework is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from autoaccum.checks import join_words
from autoaccum.errors import UsageError
from autoaccum.sources.samples import take_longest
from autoaccum.sources.workload import Workload

SAMPLES = 256
"""Samples of the dataset of which the longest make the batches, unless `worst_of` says otherwise."""

_ADAPTERS = {
    "transformers.trainer": "transformers_trainer",
    "lightning.pytorch.trainer.trainer": "lightning_trainer",
    "pytorch_lightning.trainer.trainer": "lightning_trainer",
}
"""The module of a class named Trainer, and the adapter: a module with `PARTS`, `make_workload` and `free_card`."""


def workload_of(
    trainer: Any, *, live: bool = False, names: Mapping[str, Any] | None = None, **parts: Any
) -> Workload | None:
    """Return the Workload of a Trainer, with batches of the longest samples; None if it is no Trainer.

    Args:
        trainer: The Trainer, which is not changed.
        live: Whether `model()` of the Workload shares the parameters and buffers of the Trainer's model, for trials in
            place, which restore them; if not, it returns a copy. A module of Lightning has its device only when its
            Trainer fits, so that it is always copied.
        names: The names of the file that defines the Trainer, among which the parts of Lightning are.
        parts: The parts that a Trainer of Lightning does not hold before it fits: `model`, `data` and `weight`.

    Raises:
        UsageError: Parts are given that the Trainer has itself.
        WorkloadError: The Trainer trains in a way that no trial can run.
    """
    adapter = _find_adapter(trainer)
    if adapter is None:
        return None
    if others := [name for name in parts if name not in adapter.PARTS]:
        raise UsageError(
            f"a trainer is given, and {join_words(others)} too", hint="the trainer has its own: leave them out"
        )
    return take_longest(adapter.make_workload(trainer, live=live, names=names, **parts), SAMPLES)


def free_card(trainer: Any) -> None:
    """Move the model of a Trainer back to the CPU if its framework moved it to the card when the Trainer was made."""
    adapter = _find_adapter(trainer)
    if adapter is not None:
        adapter.free_card(trainer)


def _find_adapter(given: Any) -> Any:
    """Return the adapter of a Trainer or of a class derived from one; None for anything else."""
    for kind in type(given).__mro__:
        if kind.__name__ == "Trainer" and kind.__module__ in _ADAPTERS:
            return import_module(f"autoaccum.integrations.{_ADAPTERS[kind.__module__]}")
    return None
