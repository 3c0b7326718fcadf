"""`TrainingSpec`: how an update is run, the one record of it that every part of autoaccum passes on.

A workload has a complete one, the options of a command are a partial one, and a plan holds the one that was tried.
`options.resolve_spec` decides which value wins; `sources.samples.apply_spec` puts given values into a workload, by the
same rule: None is not given. To add an option, add a field to `TrainingSpec` and to `SpecArguments`, a check to
`read_spec` if its type is not enough, a flag to `cli/flags.py`, and the code that honours it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypedDict, cast, get_args

from autoaccum.checks import check_flag, check_word, read_count
from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.messages import Message

Precision = Literal["fp32", "bf16", "fp16"]
BatchNormMode = Literal["micro", "running", "frozen", "exact"]
"""`micro`: as in PyTorch, each micro-batch by itself. `running`: normalise by the micro-batch, but update the running
statistics as the full batch would. `frozen`: normalise by the running statistics and do not update them. `exact`:
normalise by the whole effective batch, as without accumulation; its activations wait in host memory."""

WholeBatchMode = Literal["lockstep", "recompute"]
"""How parts of an update run that need each other: in lock step, or forward once more after the loss of all parts."""

AccumulateIn = Literal["fp32", "parameters"]
"""The dtype in which gradients of half-precision parameters are summed: `fp32`, rounded once at the end, or that of the
`parameters`, which needs no further memory and rounds with every micro-batch."""

Padding = Literal["longest", "none"]
"""How a micro-batch of samples of unequal length is laid out: padded to its `longest`, or packed with `none`."""

RECOMPUTE: Final = "recompute"
OFFLOADS: Final = ("offload-activations", "offload-gradients", "offload-optimizer")
"""Savers, ways to take less memory of the device for the same gradient; `recompute=N` is for N blocks of the model."""
AUTO: Final = "auto"
"""In place of savers: a plan chooses them."""
NO_SAVERS: Final = "none"
"""In place of savers: there are none, whatever the workload says."""


class SpecArguments(TypedDict, total=False):
    """The fields of `TrainingSpec` as keyword arguments; None, or left out: not given."""

    optimizer: Any
    precision: str | None
    batchnorm: str | None
    coupled: bool | None
    accumulate_in: str | None
    savers: str | Iterable[str] | None
    ema: bool | None
    hold_outputs: bool | None
    evaluation_batch: int | None
    longest_of: int | None
    multiple_of: int | None


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """How an update is run.

    Attributes:
        optimizer: A function of the list of trainable parameters, a class, or a name in `torch.optim`; None: AdamW. In
            a plan: the name, if one was given as an option.
        precision: Precision of forward and backward: `fp32`, or `bf16` / `fp16` under autocast.
        batchnorm: How BatchNorm treats a batch in parts (`BatchNormMode`).
        coupled: Whether the loss compares samples, and is computed of the outputs of the whole effective batch.
        accumulate_in: The dtype in which gradients of half-precision parameters are summed (`AccumulateIn`).
        savers: Ways to take less memory of the device for the same gradient: `recompute` (all repeated blocks of the
            model run again in backward), `recompute=N` (N of them), `offload-activations`, `offload-gradients`,
            `offload-optimizer`.
        ema: Whether the training loop keeps an exponential moving average of the weights, with a copy of the buffers,
            on the same device.
        hold_outputs: Whether it holds the outputs and the loss of a micro-batch until the next one has its own, as a
            loop that logs them.
        evaluation_batch: Samples per batch of the evaluation between updates, which is part of every trial; None: no
            evaluation is planned.
        longest_of: Batches are made of the longest of this many samples of the dataset; None: by the workload's
            `batch`.
        multiple_of: Every micro-batch, and the target, is a multiple of this many samples, as timm's Mixup and fixed
            shapes need; None: 1, unless planning finds that other sizes do not run.

    Raises:
        UsageError: A value cannot be used.
    """

    optimizer: Any = None
    precision: Precision = "fp32"
    batchnorm: BatchNormMode = "micro"
    coupled: bool = False
    accumulate_in: AccumulateIn = "fp32"
    savers: Sequence[str] = ()
    ema: bool = False
    hold_outputs: bool = False
    evaluation_batch: int | None = None
    longest_of: int | None = None
    multiple_of: int | None = None

    error_type: ClassVar[type[AutoaccumError]] = UsageError

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in SPEC_FIELDS}
        for name, value in read_spec(given, self.error_type).items():
            object.__setattr__(self, name, value)

    def arguments(self) -> SpecArguments:
        """Return the fields as keyword arguments, of a subclass those of `TrainingSpec` alone."""
        return cast("SpecArguments", {name: getattr(self, name) for name in SPEC_FIELDS})

    def recorded(self) -> TrainingSpec:
        """Return the spec as it is written to JSON: an optimizer that is no name is left to the workload."""
        optimizer = self.optimizer if isinstance(self.optimizer, str) else None
        return TrainingSpec(**{**self.arguments(), "optimizer": optimizer})  # type: ignore[arg-type]


SPEC_FIELDS: Final = tuple(field.name for field in dataclasses.fields(TrainingSpec))
FLAGS: Final = ("coupled", "ema", "hold_outputs")
"""The fields that are True or False: `--ema` and `--no-ema` on the command line."""


def read_spec(
    given: Mapping[str, Any],
    error: type[AutoaccumError] = UsageError,
    precisions: Iterable[str] = get_args(Precision),
) -> SpecArguments:
    """Return the values of a partial spec that are given, each checked and in one form.

    Raises:
        UsageError: A value cannot be used; or `error`, where that is given.
    """
    read = {name: value for name, value in given.items() if value is not None}
    words = {
        "precision": ("precision", precisions),
        "batchnorm": ("batchnorm mode", get_args(BatchNormMode)),
        "accumulate_in": ("accumulate_in", get_args(AccumulateIn)),
    }
    for name, (what, known) in words.items():
        if name in read:
            check_word(read[name], what, known, error=error)
    for name in FLAGS:
        if name in read:
            check_flag(read[name], name, error=error)
    if "savers" in read:
        read["savers"] = read_savers(read["savers"], error)
    for name in ("evaluation_batch", "longest_of", "multiple_of"):
        if name in read:
            read[name] = read_count(read[name], name, error=error)
    return cast("SpecArguments", read)


@dataclass(frozen=True, kw_only=True)
class SampleLengths:
    """The lengths of a workload's samples, in tokens, as far as they were read: descending, at least 1.

    Attributes:
        read: Of the samples that were read.
        buildable: Those of which batches can be made: the longest of `read`, and below them one for each 2 % of length.
        padding: How micro-batches are laid out.
        is_whole: Whether all samples of the dataset were read.
    """

    read: tuple[int, ...]
    buildable: tuple[int, ...]
    padding: Padding = "longest"
    is_whole: bool = False


Divisor = Literal["nothing", "weight", "samples", "targets", "class weights"]
"""How the share of a part is computed. `nothing`: the loss is a sum. `weight`: by the workload's function. `targets`:
by the integer targets that are not ignored. `samples`: by samples, or by elements if every sample has as many."""


@dataclass(frozen=True, kw_only=True)
class StepRecipe:
    """What a training step needs to know of a loss and its batches to be written out (`sources.step_recipe`).

    Attributes:
        divisor: How the share of a part is computed.
        ignore_index: The class that the criterion ignores; None: none.
        calls_criterion: Whether the loss is a criterion of outputs and targets.
        own: The code that takes the loss that the model computes (`loss`), and that of its weight (`weight`; None:
            there is none); None: the model computes no loss.
        terms: The names of the loss's terms; empty if there is one.
        weights: The names of its weights; empty if there is one.
        batch: The form of a batch: a word, or a container's word with the forms in it.
        half: The half-precision dtypes of trained parameters.
        misweighted: The warning on what the loss divides by instead of its weight; None: nothing is known to be wrong.
        checkpointing: Whether a model of transformers has gradient checkpointing switched on.
        ignores_items: Whether a model of transformers ignores `num_items_in_batch`.
        trainer: The framework of the Trainer that the loss was taken from; None: of none.
    """

    divisor: Divisor = "samples"
    ignore_index: int | None = None
    calls_criterion: bool = False
    own: Mapping[str, str | None] | None = None
    terms: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    batch: Any = "other"
    half: tuple[str, ...] = ()
    misweighted: Message | None = None
    checkpointing: bool = False
    ignores_items: bool = False
    trainer: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What is known of a device once its budget was chosen; an empty or missing value is not known.

    Attributes:
        name: Its name in reports: `cpu`, `cuda:0`, `rtx3090 (simulated)`.
        kind: What it is.
        card: The name that its driver gives it, for a card.
        total_bytes: Its memory.
        free_bytes: What was free of it.
        used_by_others_bytes: What other processes held of it.
        properties: What else a plan records: how the budget is enforced and the peak measured, and of a card its
            properties and their sources, and the allocator's settings.
    """

    name: str = ""
    kind: Literal["cpu", "cuda", "simulated"] = "cpu"
    card: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_by_others_bytes: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """What is known of a workload once it was built; an empty or missing value is not known.

    Attributes:
        reference: How it was named: `model.py`, `model.py:name`, `hf:gpt2`, or `Net (made in code)`.
        overrides: The values that were set in place of its constants (`Options.overrides`).
        name: Its name in reports.
        digest: SHA-256 of its file and the local modules it imports.
        model: The class of the model.
        parameters: The number of parameters.
        parameter_bytes: Their bytes.
        dtypes: The dtypes of the parameters, such as `bf16`.
        blocks: Its repeated blocks that can run again in backward.
        optimizer: The class of the optimizer.
        loss: What computes the loss: a function of model and batch ("loss"), of outputs and targets ("criterion"), or
            the model itself.
        reduction: `mean` or `sum`.
        weight: What the mean of the loss divides by, in words.
        has_weight: Whether the workload says so itself, by a function `weight`.
        assumes_weight: Whether it was taken from the model's class, and nothing has checked it.
        whole_batch: How the parts of an update run if they need each other; None: one after the other.
        modules: Bytes of the modules beside the model (`accumulation.reachable_objects`), by name.
        recipe: What a training step written out needs to know.
        token_functions: Those of `lengths` and `trim` that it has.
        command: The words of a command, with places for sizes; empty for a workload.
    """

    reference: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    digest: str = ""
    model: str = ""
    parameters: int | None = None
    parameter_bytes: int | None = None
    dtypes: tuple[str, ...] = ()
    blocks: int = 0
    optimizer: str = ""
    loss: Literal["loss", "criterion", "model"] = "loss"
    reduction: Literal["mean", "sum"] = "mean"
    weight: str = ""
    has_weight: bool = False
    assumes_weight: bool = False
    whole_batch: WholeBatchMode | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    recipe: StepRecipe = StepRecipe()
    token_functions: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def product_precision(self, spec: TrainingSpec) -> str:
        """Return the precision of its matrix products: without autocast, that of half-precision parameters if any."""
        half = [dtype for dtype in self.dtypes if dtype in ("bf16", "fp16")]
        return half[0] if half and spec.precision == "fp32" else spec.precision


def read_savers(savers: Any, error: type[AutoaccumError] = UsageError) -> tuple[str, ...]:
    """Return the words of `savers`, each once and in one order; `savers` may be one word or several.

    >>> read_savers(["offload-optimizer", "recompute=6"]), read_savers("recompute"), read_savers(None)
    (('recompute=6', 'offload-optimizer'), ('recompute',), ())

    Raises:
        UsageError: A word is unknown, or there is no number of blocks; or `error`, where that is given.
    """
    if not isinstance(savers, Iterable | None):
        raise error(f"savers is {savers!r}", hint="give a word, or several")
    given = [savers] if isinstance(savers, str) else list(savers or ())
    if AUTO in given:
        raise error(
            f"savers are {AUTO}, which stands alone and is for a plan to choose",
            hint=f"give --savers {AUTO} to autoaccum plan or fit, or name savers",
        )
    if given == [NO_SAVERS]:
        return ()
    if NO_SAVERS in given:
        raise error(f"{NO_SAVERS} is given with savers", hint=f"give {NO_SAVERS} alone, or leave it out")
    for word in given:
        if word not in (RECOMPUTE, *OFFLOADS) and not re.fullmatch(f"{RECOMPUTE}=[1-9][0-9]*", str(word)):
            raise error(
                f"{word!r} is no saver",
                hint=f"take {RECOMPUTE} (all repeated blocks), {RECOMPUTE}=N (N of them), {', '.join(OFFLOADS)}",
            )
    blocks = [word for word in given if word.startswith(RECOMPUTE)]
    return (*blocks[-1:], *(word for word in OFFLOADS if word in given))
