"""Samples that depend on the others of their batch: what is known of them, and how it is said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

WHOLE_MODEL = "the model itself"
"""The name of the outermost module."""

COMPARES_SAMPLES = (
    "the loss compares samples with each other (in-batch negatives?) and sees one micro-batch at a time, so that the"
    " gradient is not the full batch's: `autoaccum verify` tells by how much"
)
"""Where a table of samples by samples is seen on the way to the loss."""

_SHOWN = 5


@dataclass(frozen=True)
class Coupling:
    """Whether a sample's gradient depends on the others of its batch, as far as that is known.

    Attributes:
        modules: Those whose own computation gives a sample another output beside other samples, in the order of their
            calls.
        loss: Whether the loss mixes the rows of the model's outputs, or adds to a sum over them; None: untold.
        reason: Why the experiment could not be made, or not wholly; None: nothing was in its way.
        pairs: Those of the modules that give a table of all samples by all samples.
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
        said = [COMPARES_SAMPLES] if self.pairs else []
        if names:
            said.append(
                f"what {describe_modules(names)} {'give' if len(names) > 1 else 'gives'} for a sample depends on the"
                " others of its micro-batch, so that the gradient is not the full batch's: use what looks at one sample"
                " at a time (GroupNorm)"
            )
        if self.loss:
            said.append(
                "the loss mixes the samples of a batch, as contrastive losses and those that balance experts do, or"
                " adds to a sum over them what does not grow with them, as weight decay: the gradient of micro-batches"
                " is not the full batch's; make it a mean over samples"
            )
        return tuple(said)


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    >>> list_names(["a", "b"]), list_names([f"layer{index}" for index in range(7)])
    ('a and b', 'layer0, layer1, layer2, layer3, layer4 and 2 more')
    """
    shown, more = list(names[:_SHOWN]), len(names) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def describe_modules(names: Sequence[str]) -> str:
    """Modules by name.

    >>> describe_modules(["0"]), describe_modules(["0", "2"])
    ('module 0', 'modules 0 and 2')
    """
    inner = [name for name in names if name != WHOLE_MODEL]
    if not inner:
        return WHOLE_MODEL
    outer = f", and {WHOLE_MODEL}" if len(inner) < len(names) else ""
    return f"module{'s' * (len(inner) > 1)} {list_names(inner)}{outer}"
