"""What a study has to know of a workload, as a process of its own has found it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A workload, as far as a study is concerned.

    Attributes:
        name: What reports call it.
        digest: Over its source files.
        model: The model's class.
        parameters: How many numbers train.
        optimizer: The optimizer's class.
        learning_rate: Of its first parameter group: the workload's own.
        schedule: The class of the schedule; None when there is none.
        precision: `fp32`, `bf16` or `fp16`.
        batchnorm: `micro`, `running` or `frozen`.
        has_batch: Whether it defines `batch(size)`.
        training_samples: To train on, without what is held out; None where the data does not tell.
        held_out: What losses are measured on, as a phrase: `evaluation_dataset (360 samples)`, `180 of 1797 samples of
            dataset, drawn by seed 0`.
        device: What it trains on: `cpu`, `cuda:0`.
        card: The card's name; None on the CPU.
        batchnorms: Names of the modules that are BatchNorms and normalise by the batch, unless `batchnorm` freezes
            them.
    """

    name: str
    digest: str
    model: str
    parameters: int
    optimizer: str
    learning_rate: float
    schedule: str | None
    precision: str
    batchnorm: str
    has_batch: bool
    training_samples: int | None
    held_out: str
    device: str
    card: str | None = None
    batchnorms: tuple[str, ...] = ()
