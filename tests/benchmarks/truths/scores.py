"""Predictions of measured runs, how they compare, and the scores of many as tables in markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from measuring import format_markdown

from autoaccum.units import MIB

OTHERS: Final = "others"

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


class UnknownModel(Exception):
    """The model of a row is not in the library that is installed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table.

    Attributes:
        table: The table's name: its file's, without the ending.
        row: The row, by column.
        model: As the row names it.
        batches: The batches of the row, in samples, that are to be predicted, ascending.
    """

    table: str
    row: Mapping[str, str]
    model: str
    batches: tuple[int, ...]

    @property
    def label(self) -> str:
        """The row in one line, to find it again."""
        return " ".join([self.table, *(value for value in self.row.values() if value)])


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction for one batch of a case.

    Attributes:
        batch: In samples.
        outcome: At `capacity_bytes`: `ok`, `tight` or `oom`.
        capacity_bytes: What the allocator may hold on the card, beside what the process holds outside of it.
        allocated_bytes: The most that is in use of it.
        shown_bytes: The most it holds on the card, where it gives cached segments back before it runs out.
        min_budget_bytes: The smallest capacity at which it goes through.
        start_bytes: What the process is taken to hold outside of the allocator before it runs any kernel,
        modules_bytes: and what is loaded there later.
    """

    batch: int
    outcome: str
    capacity_bytes: int
    allocated_bytes: int
    shown_bytes: int
    min_budget_bytes: int
    start_bytes: int
    modules_bytes: int

    @property
    def trains(self) -> bool:
        """True if it is predicted to fit on the card."""
        return self.outcome != "oom"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The predictions of one case compared with the measurements; None where nothing was measured.

    Attributes:
        would_crash: Something is predicted to fit that did not.
        too_timid: Something is predicted not to fit that did.
        complete: Both were measured: a size, or a cap, that went through and one that did not.
        peak_error: Of the predicted peak, relative to the measured one.
        allocated_error: Of the predicted peak of allocated memory, where that was measured apart.
    """

    would_crash: bool | None = None
    too_timid: bool | None = None
    complete: bool = False
    peak_error: float | None = None
    allocated_error: float | None = None

    @property
    def right(self) -> bool | None:
        """True if no measurement contradicts the prediction; None where fitting was not measured."""
        judged = [wrong for wrong in (self.would_crash, self.too_timid) if wrong is not None]
        return not any(judged) if judged else None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One case, done: with a verdict, or why there is none.

    Attributes:
        case: The row.
        predicted: For each of its batches.
        verdict: None where there are no predictions.
        unknown: The model is not in the installed library.
        failure: Why else there are none.
    """

    case: Case
    predicted: tuple[Predicted, ...] = ()
    verdict: Verdict | None = None
    unknown: bool = False
    failure: str | None = None


def format_scores(about: str, done: Sequence[Scored]) -> str:
    """The heading, a row for each class and for all, the cases that are not in it, and those that are not right.

    Columns for which nothing was measured are left out.
    """
    verdicts: dict[str, list[Verdict]] = {}
    for one in done:
        if one.verdict is not None:
            verdicts.setdefault(class_of(one.case.model), []).append(one.verdict)
    scores = [score(kind, verdicts[kind]) for kind in sorted(verdicts, key=str.lower)]
    scores.append(score("all", [verdict for group in verdicts.values() for verdict in group]))
    columns = [name for name in scores[0] if any(row[name] != "-" for row in scores)]
    parts = [f"### {about}", format_markdown([columns, *([row[name] for name in columns] for row in scores)])]
    unknown = dict.fromkeys(one.case.model for one in done if one.unknown)
    if unknown:
        parts.append(f"skipped, since the installed library has no such model: {', '.join(unknown)}")
    failed = [f"- {one.case.label}: {' '.join(one.failure.split())}" for one in done if one.failure]
    if failed:
        parts.append("\n".join([f"{len(failed)} rows could not be predicted:", *failed]))
    parts += filter(None, ("\n".join(filter(None, map(told, done))) for told in (_miss, _errors)))
    return "\n\n".join(parts)


def score(kind: str, verdicts: Sequence[Verdict]) -> dict[str, str]:
    """The score of some verdicts, by column."""
    judged = [verdict for verdict in verdicts if verdict.right is not None]
    errors = [abs(verdict.peak_error) for verdict in verdicts if verdict.peak_error is not None]
    allocated = [abs(verdict.allocated_error) for verdict in verdicts if verdict.allocated_error is not None]
    return {
        "class": kind,
        "judged": str(len(judged)) if judged else "-",
        "right": _share([verdict.right for verdict in judged]),
        "would crash": _share([verdict.would_crash for verdict in judged]),
        "too timid": _share([verdict.too_timid for verdict in judged]),
        "right of both sides": _share([verdict.right for verdict in judged if verdict.complete]),
        "peaks": str(len(errors)) if errors else "-",
        "median error": _quantile(errors, 0.5),
        "95th percentile": _quantile(errors, 0.95),
        "median error, allocated": _quantile(allocated, 0.5),
        "95th percentile, allocated": _quantile(allocated, 0.95),
    }


def _quantile(errors: Sequence[float], share: float) -> str:
    return f"{100 * np.quantile(errors, share):.1f} %" if errors else "-"


def _share(answers: Sequence[bool | None]) -> str:
    yes = sum(answer is True for answer in answers)
    return f"{yes} of {len(answers)} ({100 * yes / len(answers):.1f} %)" if answers else "-"


def _miss(one: Scored) -> str:
    """Return a line for a case that is not right."""
    if one.verdict is None or one.verdict.right is not False:
        return ""
    wrong = "would crash" if one.verdict.would_crash else "too timid"
    runs = ", ".join(
        f"{run.batch}: {run.outcome}, least {run.min_budget_bytes / MIB:.0f} of {run.capacity_bytes / MIB:.0f} MiB"
        for run in one.predicted
    )
    return f"{one.case.label} ({class_of(one.case.model)}): {wrong} ({runs})"


def _errors(one: Scored) -> str:
    """Return a line for a case of which both peaks were measured."""
    if one.verdict is None or one.verdict.allocated_error is None or one.verdict.peak_error is None:
        return ""
    errors = f"allocated {100 * one.verdict.allocated_error:+.3f} %, reserved {100 * one.verdict.peak_error:+.2f} %"
    return f"{errors}: {one.case.label}"
