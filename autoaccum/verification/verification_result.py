"""The events of a verification, and the frozen record of its result with its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from autoaccum.messages import Message
from autoaccum.serialization import HtmlRecord, freeze, to_plain

SCHEMA = 3

Method = Literal["accumulator", "accumulate", "command"]
Window = Literal["whole", "uneven", "last", "tokens"]
Quantity = Literal["loss", "gradients", "buffers"]
CauseKind = Literal[
    "batchnorm",
    "coupled model",
    "coupled loss",
    "weight",
    "reduction",
    "last window",
    "padding",
    "accumulate",
    "randomness",
    "non-determinism",
    "unknown",
]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference from the full batch in one kind of quantity.

    Attributes:
        quantity: What was compared.
        compared: The number of tensors (for the loss: of terms).
        error: The largest difference, relative to the largest entry; of gradients, of the full batch's whole gradient.
            For a command, relative to the norm of the tensor. Infinite where only one side exists or is finite.
        where: The tensor or term with the largest error; None where there is nothing to compare.
        tolerance: The largest error that rounding explains.
        equal: Whether all errors are within their tolerance.
        first: The first tensor or term, in the model's order, whose error is not; None where all are equal.
    """

    quantity: Quantity
    compared: int
    error: float
    where: str | None
    tolerance: float
    equal: bool
    first: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One way to accumulate one batch, compared with the full batch.

    Attributes:
        method: `accumulator`, `accumulate` for the workload's own loop, or `command` for a training command.
        window: `whole` for the target batch, `uneven` for the same batch with samples shortened, `last` for a shorter
            window, as at the end of an epoch, `tokens` for the target batch cut by a token budget.
        micro_batches: The parts, in samples; of a command, those of a rank.
        differences: One for each quantity.
    """

    method: Method
    window: Window
    micro_batches: tuple[int, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """True if all quantities are the full batch's."""
        return all(difference.equal for difference in self.differences)

    @property
    def gradients(self) -> Difference:
        """The difference of the gradients."""
        return next(difference for difference in self.differences if difference.quantity == "gradients")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of an accumulated update that is not the full batch's.

    Attributes:
        kind: The kind of cause.
        found: What the experiment showed.
        change: What makes it equal.
        where: The modules, attributes, terms or lines concerned; may be empty.
        proved: The same comparison without this cause (and the others that were found) was equal.
        mode: The option of autoaccum that takes it away, as in `{"batchnorm": "exact"}`; empty where there is none.
    """

    kind: CauseKind
    found: Message
    change: Message
    where: tuple[str, ...] = ()
    proved: bool = False
    mode: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verification(HtmlRecord):
    """The result of a verification: equivalent or not, and the causes.

    Attributes:
        equivalent: Whether every comparison was equal, and the weighting was tested.
        target_batch: Samples in the whole window.
        micro_batch: The most samples in a part.
        precision: `fp64` or `fp32`; of a command, the coarsest dtype of its gradients.
        device: `cpu` or `cuda:N`.
        batchnorm: The mode that was verified.
        tolerance: How much rounding alone may change an update, relative to the largest entry.
        comparisons: All comparisons, in order; none where the runs of a command cannot be compared.
        causes: Why they were not equal; empty where they were.
        notes: What was done beside the comparison, such as with neutral random numbers.
        workload: Name, digest, model, parameters, reduction, weight.
        environment: Versions of Python, PyTorch and so on.
        seconds: The time it took.
        coupled: Whether the loss was computed of the outputs of the whole batch.
        world_size: The ranks that shared each accumulated update.
        untested: Masks and labels that count the same in all samples and could not be shortened, so weighting by them
            was not tested.
        neutral_random: Whether random numbers were replaced by neutral values, since they could not be replayed.
        schema: The version of the record.
    """

    equivalent: bool
    target_batch: int
    micro_batch: int
    precision: str
    device: str
    batchnorm: str
    tolerance: float
    comparisons: tuple[Comparison, ...]
    causes: tuple[Cause, ...]
    notes: tuple[Message, ...]
    workload: Mapping[str, Any]
    environment: Mapping[str, Any]
    seconds: float
    coupled: bool = False
    world_size: int = 1
    untested: tuple[str, ...] = ()
    neutral_random: bool = False
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("workload", "environment"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def __repr__(self) -> str:
        """Return the answer in one line; `to_json` has all of it."""
        causes = ", ".join(cause.kind for cause in self.causes)
        sizes = f"target_batch {self.target_batch}, micro_batch {self.micro_batch}, {self.precision} on {self.device}"
        return f"<Verification: {'' if self.equivalent else 'not '}equivalent{causes and f' ({causes})'}, {sizes}>"

    @property
    def exit_code(self) -> int:
        """0: equivalent; 1: not; 3: the updates cannot be compared, or the weighting was not tested."""
        return 0 if self.equivalent else 3 if self.untested or not self.comparisons else 1

    def to_json(self) -> str:
        """Return the record as indented JSON, the schema first; numbers that are not finite are null.

        Errors are written out in `error_text` as well, and numbers of messages in their `text`.
        """
        record = to_plain(self)
        for difference in chain.from_iterable(comparison["differences"] for comparison in record["comparisons"]):
            error = difference["error"]
            difference["error_text"] = f"{error:.3g}" if math.isfinite(error) else "infinite"
        plain = json.dumps({"schema": record.pop("schema"), **record})
        return json.dumps(json.loads(plain, parse_constant=lambda constant: None), indent=2) + "\n"


@dataclass(frozen=True)
class VerificationStarted:
    """The workload is loaded; comparisons come next."""

    name: str
    model: str
    parameters: int
    precision: str
    device: str


@dataclass(frozen=True)
class Compared:
    """A window was accumulated and compared with the full batch."""

    comparison: Comparison


@dataclass(frozen=True)
class Diagnosing:
    """A comparison differs, so the answer is known; experiments search for the cause, at most for `limit_seconds`."""

    comparison: Comparison
    limit_seconds: float


Event = VerificationStarted | Compared | Diagnosing
