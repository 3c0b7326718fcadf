"""Batch coupling: the record of samples that depend on the others of their batch, and its warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoaccum.checks import join_words

WHOLE_MODEL = "the model itself"

NOT_FULL = "the gradient is not the full batch's"
"""What warnings of coupling say; a semicolon and what cures it follow."""

_AS_ONE = "coupled=True (with a criterion, or with outputs and coupled_loss) computes it of the whole batch"
COMPARES_SAMPLES = (
    "the loss compares samples with each other (in-batch negatives?) and sees one micro-batch at a time:"
    f" {NOT_FULL}; {_AS_ONE}, and `autoaccum verify` proves it"
)
"""The warning for a loss that is computed from a table of samples by samples."""

_MIXES = (
    "the loss mixes the samples of a batch (a contrastive loss?), or adds to a sum what does not grow with the batch"
    f" (weight decay?): {NOT_FULL}; {_AS_ONE}, autoaccum.whole_batch(x) a term of it, or make it a mean over samples"
)

MIXES_INPUTS = "the loss mixes samples before it calls the model (mixup, CutMix?), but sees one micro-batch at a time"
MIX_BEFORE = (
    "mix in batch(size) or collate_fn, before the batch is split, and put the mixed inputs and both targets (or soft"
    " targets) into the batch, one row per sample"
)
"""What is seen of a loss that gives the model mixed inputs, which no mode can cure, and what to do."""

_SHOWN = 5


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

    def warnings(self, covered: Collection[str] = (), *, is_joint: bool = False) -> tuple[str, ...]:
        """Return the warnings for an update in several micro-batches.

        Args:
            covered: Modules that are warned of elsewhere.
            is_joint: The loss is computed once, of the outputs of the whole batch.
        """
        names = [name for name in self.modules if name not in {*covered, *self.pairs}]
        messages = [COMPARES_SAMPLES] if self.pairs else []
        if names:
            messages.append(
                f"the output of {describe_modules(names)} for a sample depends on the others of its micro-batch, so"
                " that the gradient is not the full batch's: let it compute from autoaccum.whole_batch(x), or use a"
                " layer that looks at one sample at a time (GroupNorm)"
            )
        if self.inputs:
            messages.append(f"{MIXES_INPUTS}: {NOT_FULL}; {MIX_BEFORE}")
        elif self.loss and not is_joint:
            messages.append(_MIXES)
        return tuple(messages)


def list_names(names: Sequence[str]) -> str:
    """Join the first names to a list in words, and add how many more there are.

    >>> list_names(["a", "b"]), list_names([f"layer{index}" for index in range(7)])
    ('a and b', 'layer0, layer1, layer2, layer3, layer4 and 2 more')
    """
    shown, more = list(names[:_SHOWN]), len(names) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return join_words(shown)


def describe_modules(names: Sequence[str]) -> str:
    """Return the names of modules in words.

    >>> describe_modules(["0"]), describe_modules(["0", "2"])
    ('module 0', 'modules 0 and 2')
    """
    inner = [name for name in names if name != WHOLE_MODEL]
    if not inner:
        return WHOLE_MODEL
    outer = f", and {WHOLE_MODEL}" if len(inner) < len(names) else ""
    return f"module{'s' * (len(inner) > 1)} {list_names(inner)}{outer}"
