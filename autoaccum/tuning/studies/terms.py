"""What must be the same for all trials of a study, whoever runs them and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.planning.shapes import ShapeError, shape, thaw
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan

SCHEMA = 1
_WORDS = {
    "digest": "source files",
    "learning_rates": "learning rates",
    "target_batches": "target batches",
    "batchnorm": "BatchNorm mode",
    "held_out": "held-out data",
}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What trials have in common; kept in the study, and compared before it is gone on with.

    Attributes:
        workload: What reports call it.
        digest: Over its source files.
        learning_rates: Searched.
        target_batches: Searched.
        budget: Of every trial.
        seed: Of the sampler and of every trial.
        sampler: Its kind.
        pruner: Its kind.
        precision: As of `Facts`, as the rest is.
        batchnorm: Mode.
        optimizer: Class.
        held_out: What losses are measured on, as a phrase.
        device: `cpu`, or the card's name.
        schema: Version of this record.
    """

    workload: str
    digest: str
    learning_rates: RateSpan
    target_batches: BatchSpan
    budget: Budget
    seed: int
    sampler: str
    pruner: str
    precision: str
    batchnorm: str
    optimizer: str
    held_out: str
    device: str
    schema: int = SCHEMA

    @classmethod
    def of(cls, request: TuneRequest, facts: Facts, budget: Budget, learning_rates: RateSpan) -> Terms:
        """The terms of what is asked for."""
        return cls(
            workload=facts.name,
            digest=facts.digest,
            learning_rates=learning_rates,
            target_batches=request.target_batch,
            budget=budget,
            seed=request.seed,
            sampler=request.sampler,
            pruner=request.pruner,
            precision=facts.precision,
            batchnorm=facts.batchnorm,
            optimizer=facts.optimizer,
            held_out=facts.held_out,
            device=facts.card or facts.device,
        )

    def to_record(self) -> dict[str, Any]:
        """As what JSON knows."""
        return {field.name: thaw(getattr(self, field.name)) for field in fields(self)}


def check_terms(kept: object, asked: Terms, study: str) -> None:
    """See that a study was made for what is asked now.

    Args:
        kept: The record of its terms, as the study has it.
        asked: The terms of now.
        study: Its name.

    Raises:
        UsageError: It was made for something else, or not by autoaccum.
    """
    hint = "take another name by --study, or ask for the same again"
    if not isinstance(kept, Mapping) or not isinstance(kept.get("schema"), int):
        raise UsageError(f"the study {study!r} is there already, and not of autoaccum", hint="take another by --study")
    if kept["schema"] > SCHEMA:
        raise UsageError(
            f"the study {study!r} was made by a newer autoaccum (schema {kept['schema']})", hint="upgrade autoaccum"
        )
    try:
        terms = Terms(**shape(kept, Terms))
    except ShapeError as error:
        raise UsageError(f"the study {study!r} is damaged: in its terms, {error}", hint=hint) from None
    differing = [
        f"{_WORDS.get(name, name)} {_shown(name, getattr(terms, name))}, now {_shown(name, getattr(asked, name))}"
        for name in (field.name for field in fields(Terms))
        if getattr(terms, name) != getattr(asked, name)
    ]
    if differing:
        raise UsageError(f"the study {study!r} was made with other terms ({'; '.join(differing)})", hint=hint)


def _shown(name: str, value: object) -> str:
    if isinstance(value, RateSpan):
        return f"{value.low:.6g}..{value.high:.6g}"
    if isinstance(value, BatchSpan):
        return f"{value.low}" if value.single else f"{value.low}..{value.high}"
    if isinstance(value, Budget):
        return f"{value.amount:g} {value.unit}"
    return str(value)[:12] if name == "digest" else str(value)
