"""What is known of samples that depend on the company they are in, and how it is said."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autoaccum.accumulation.company.words import modules


@dataclass(frozen=True)
class Coupling:
    """What is known of a model and a loss: whether a sample's gradient depends on the others of its batch.

    Attributes:
        modules: Those whose own computation gives a sample another output in other company, in the order of their
            calls.
        loss: Whether the loss mixes the rows of the model's outputs; None: that could not be told.
        pairs: Those of the modules that give a table of all samples by all samples.
        reason: Why the experiment could not be made, or not wholly; None: nothing was in its way.
    """

    modules: tuple[str, ...] = ()
    loss: bool | None = None
    reason: str | None = None
    pairs: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether samples are coupled, as far as that is known."""
        return bool(self.modules) or bool(self.loss)

    def warnings(self, told: Collection[str] = ()) -> tuple[str, ...]:
        """Sentences for where several micro-batches make an update.

        Args:
            told: Modules that something else warns of: BatchNorms, of which the Accumulator knows more.
        """
        names = [name for name in self.modules if name not in {*told, *self.pairs}]
        said = []
        if self.pairs:
            said.append(
                f"{modules(self.pairs)} {'compare' if len(self.pairs) > 1 else 'compares'} samples with each other"
                " (in-batch negatives), and those of a micro-batch know nothing of the others, so that the gradient is"
                " not the full batch's: take the micro-batch as large as fits"
            )
        if names:
            said.append(
                f"what {modules(names)} {'give' if len(names) > 1 else 'gives'} for a sample depends on the others of"
                " its micro-batch, so that the gradient is not the full batch's: use what looks at one sample at a time"
                " (GroupNorm)"
            )
        if self.loss:
            said.append(
                "the loss mixes the samples of a batch, as contrastive losses and those that balance experts do, and"
                " sees one micro-batch at a time, so that the gradient is not the full batch's: make it a mean over"
                " samples"
            )
        return tuple(said)
