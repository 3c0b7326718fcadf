"""Predictions beside measurements, one line for each that was measured, and how right many of them are. Pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

OTHERS: Final = "others"
FITS: Final = "fits"
"""What is measured of a limit: whether a run goes through within it."""
UNKNOWN_LENGTHS: Final = "reserved with unknown lengths"
"""What is measured where a prediction is of the longest samples: its order and slope count, and no error."""

_FAMILIES: Final[tuple[tuple[str, str], ...]] = (
    ("T5", r"(^|/|flan-|m|by)t5|umt5"),
    ("BERTs", r"bert|electra|deberta"),
    ("GPTs", r"gpt|(^|/)opt-|llama|pythia|bloom|qwen(?!3_vit)|mistral|falcon|(^|/)phi|codegen|gemma(?!4_vit)"),
    (
        "attention hybrids",
        r"bot(net|next)|halo(net|next|regnet)|lambda_|(^|_)bat_|coat|max(x)?vit|mobilevit|edgenext|levit|visformer"
        r"|efficient(former|vit|vim)|nextvit|fastvit|repvit|tiny_vit|swiftformer|shvit|iformer|caformer|lowformer"
        r"|cpubone|csatv2|mobilenetv5|mobilenetv4_hybrid|vitamin|vit_.*_(resnet|r\d)|cvt",
    ),
    ("mixers", r"mixer|(g|res)mlp|poolformer|sequencer|convmixer"),
    (
        "ViTs",
        r"vit|deit|beit|(^|_)eva|swin|twins|nest_|(^|_)pit_|(^|_)tnt_|xformer|volo|pvt|focalnet|hiera|aimv2|sam2|xcit"
        r"|cait",
    ),
    (
        "EfficientNets",
        r"efficientnet|mob(il)?e(net|one)|mnasnet|mixnet|fbnet|tinynet|ghostnet|rexnet|hardcorenas|lcnet|spnasnet|starnet"
        r"|shufflenet|squeezenet",
    ),
    (
        "other CNNs",
        r"vgg|densenet|inception|xception|nasnet|nfnet|repvgg|vovnet|darknet|edgenet|dla\d|dpn\d|hrnet|hgnet|selecsls"
        r"|conv(next|former)|cspnext|rdnet|mambaout|fasternet|googlenet|alexnet|repghost",
    ),
    ("ResNets", r"res(net|next|nest|2ne)|(^|_)senet|regnet|gernet"),
)
"""Each class and what its families' names have in them; the first that is found counts.

A `vit` with a ResNet below is a hybrid, and so is a ResNet with attention in its blocks."""


def class_of(model: str) -> str:
    """The class of `model`.

    >>> class_of("tf_efficientnet_b1_ap"), class_of("vit_base_resnet26d_224"), class_of("t5-base")
    ('EfficientNets', 'attention hybrids', 'T5')
    """
    name = model.lower()
    return next((kind for kind, pattern in _FAMILIES if re.search(pattern, name)), OTHERS)


class NotBuilt(Exception):
    """A run is not rebuilt here, for the reason that is given."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction for one batch of a run.

    Attributes:
        batch: In samples.
        outcome: At `capacity_bytes`: `ok`, `tight` or `oom`.
        capacity_bytes: What the allocator may hold on the card, beside what the process holds outside of it.
        phases_bytes: See `loops.phase_peaks`; empty if it does not fit.
        shown_bytes: The most it holds on the card, where it gives cached segments back before it runs out.
        min_budget_bytes: The smallest capacity at which it goes through.
        start_bytes: What the process is taken to hold outside of the allocator before it runs any kernel,
        modules_bytes: and what is loaded there later.
        note: As of the score of its allocated memory.
    """

    batch: int
    outcome: str
    capacity_bytes: int
    phases_bytes: Mapping[str, int]
    shown_bytes: int
    min_budget_bytes: int
    start_bytes: int
    modules_bytes: int
    note: str = ""

    @property
    def trains(self) -> bool:
        """True if it is predicted to fit on the card."""
        return self.outcome != "oom"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One measurement of a run beside its prediction, a line of `scores.csv`.

    Attributes:
        table: The file of measurements, without its ending.
        card: That the run was on.
        group: Runs that are scored together.
        model: As the table names it.
        run: What else tells it from the other runs of its model.
        quantity: What was measured: `fits`, or memory by name. Empty if the run could not be predicted.
        measured: MiB; of `fits` 1 if it went through and 0 if it ran out of memory.
        predicted: Likewise.
        fitcheck: What fitcheck states of the same run, MiB.
        accelerate: What `accelerate estimate-memory` states, MiB.
        note: How near the limit is, where requests for memory part, or why the run could not be predicted.
    """

    table: str
    card: str
    group: str
    model: str
    run: str
    quantity: str
    measured: float | None = None
    predicted: float | None = None
    fitcheck: float | None = None
    accelerate: float | None = None
    note: str = ""

    @property
    def would_crash(self) -> bool:
        """Something is predicted to fit that did not."""
        return self.quantity == FITS and self.measured == 0 and self.predicted == 1

    @property
    def too_timid(self) -> bool:
        """Something is predicted not to fit that did."""
        return self.quantity == FITS and self.measured == 1 and self.predicted == 0

    def error(self, by: str = "predicted") -> float | None:
        """The error of a prediction, relative to the measurement; None if either is missing."""
        value = getattr(self, by)
        if value is None or not self.measured or self.quantity in (FITS, UNKNOWN_LENGTHS):
            return None
        return float(value / self.measured - 1)


@dataclass(frozen=True)
class Scores:
    """The scores of one table, and the command, the versions and the date that they are of."""

    origin: str
    lines: Sequence[Score]


def save(path: Path, scores: Scores) -> None:
    """Write the scores as CSV below a line with their origin, with bytes that depend on nothing else."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {scores.origin}\n")
        rows = csv.DictWriter(file, [field.name for field in fields(Score)], lineterminator="\n")
        rows.writeheader()
        rows.writerows({name: _text(value) for name, value in asdict(score).items()} for score in scores.lines)


def load(path: Path) -> Scores:
    """Read what `save` wrote."""
    numbers = {field.name for field in fields(Score) if "float" in str(field.type)}
    with path.open(encoding="utf-8", newline="") as file:
        origin = file.readline().removeprefix("# ").rstrip()
        rows = [
            {name: (float(text) if text else None) if name in numbers else text for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
    return Scores(origin, [Score(**row) for row in rows])  # type: ignore[arg-type]


def _text(value: str | float | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Limits:
    """How often limits are met. A run is right if none of its limits contradicts the prediction."""

    runs: int
    right: int
    would_crash: int
    too_timid: int


def judge_limits(scores: Iterable[Score], *, both_sides: bool = False) -> Limits:
    """Count the runs that have limits, or those alone that went through one and failed at another."""
    runs: dict[tuple[str, ...], list[Score]] = {}
    for score in scores:
        if score.quantity == FITS:
            runs.setdefault((score.table, score.model, score.run), []).append(score)
    known = [run for run in runs.values() if not both_sides or len({score.measured for score in run}) == 2]
    crash = [any(score.would_crash for score in run) for run in known]
    timid = [any(score.too_timid for score in run) for run in known]
    right = sum(not (early or late) for early, late in zip(crash, timid, strict=True))
    return Limits(len(known), right, sum(crash), sum(timid))


@dataclass(frozen=True)
class Errors:
    """Relative errors without their signs: how many, and those at a half, at 95 % and at the end of them."""

    runs: int
    median: float
    high: float
    worst: float


def errors_of(scores: Iterable[Score], quantity: str, by: str = "predicted") -> Errors | None:
    """The errors of a quantity, as predicted or as a peer states it; None if there are none."""
    errors = [score.error(by) for score in scores if score.quantity == quantity]
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return None
    return Errors(len(sizes), *(float(np.quantile(sizes, share)) for share in (0.5, 0.95, 1.0)))


def order_and_slope(scores: Iterable[Score]) -> tuple[int, float, float] | None:
    """How many runs, the correlation of their ranks (Spearman), and the slope of measured over predicted memory.

    A slope of 1 says that what one method needs more than another is predicted; what all have in common does not count.
    """
    pairs = [(score.predicted, score.measured) for score in scores if score.quantity not in ("", FITS)]
    if len(pairs) < 3:
        return None
    predicted, measured = np.array(pairs, float).T
    ranks = np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1]
    return len(pairs), float(ranks), float(np.polyfit(predicted, measured, 1)[0])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks, the mean of them for equal values."""
    order = np.sort(values)
    return (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right")) / 2
