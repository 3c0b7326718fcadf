"""Batch coupling: the record of samples that depend on the others of their batch, and its warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from autoaccum.messages import Message, message


@dataclass(frozen=True)
class Coupling:
    """A finding on batch coupling: whether a sample's gradient depends on the others of its batch.

    Attributes:
        modules: The modules whose own computation depends on the other samples, in the order of their calls.
        loss: True if the loss mixes the rows of the model's outputs, or adds to a sum over them; None if unknown.
        reason: Why the experiment could not be made, or only in part; None if it was made.
        pairs: Those of the modules that return a table of all samples by all samples.
        inputs: Whether the loss mixes samples in what it gives the model.
    """

    modules: tuple[str, ...] = ()
    loss: bool | None = None
    reason: str | None = None
    pairs: tuple[str, ...] = ()
    inputs: bool = False

    @property
    def found(self) -> bool:
        """True if coupling was found."""
        return bool(self.modules) or bool(self.loss)

    def without(self, names: Collection[str]) -> Coupling:
        """Return the finding without the modules `names`, whose coupling is exact in micro-batches too."""
        return dataclasses.replace(self, modules=tuple(name for name in self.modules if name not in names))

    def warnings(self, covered: Collection[str] = (), *, is_joint: bool = False) -> tuple[Message, ...]:
        """Return the warnings for an update in several micro-batches.

        Args:
            covered: Modules that are warned of elsewhere.
            is_joint: The loss is computed once, of the outputs of the whole batch.
        """
        names = [name for name in self.modules if name not in {*covered, *self.pairs}]
        messages = [message("compares_samples")] if self.pairs else []
        if names:
            messages.append(message("module_mixes_samples", modules=names))
        if self.inputs:
            messages.append(message("loss_mixes_inputs"))
        elif self.loss and not is_joint:
            messages.append(message("loss_mixes_samples"))
        return tuple(messages)
