"""The emitted lines that weigh the parts of a batch: nothing for a sum, nothing to count for a mean over samples."""

from __future__ import annotations

from collections.abc import Iterator

from autoaccum.reporting.emitted.batches import rows_in
from autoaccum.reporting.emitted.choices import Choices

_ROOM_FOR_WHY = 50

_WHY = """\
# Each part counts by its share of what the mean divides by, so all of that is
# known before the first backward: a mean of means would be another loss."""

_BY_TERM = """\
weights = [{k: float(v) for k, v in weight(part).items()} for part in parts]
totals = {k: sum(own[k] for own in weights) for k in weights[0]}
if not any(totals.values()):
    return math.nan"""

_BY_CLASS = """\
class_weights = criterion.get_buffer("weight").double().cpu()
weights: list[float] = []
for part in parts:
    kept = part[1][part[1] != IGNORE_INDEX].cpu()
    weights.append(float(class_weights[kept].sum()))"""

_COUNTS = {
    "weight": "weights = [float(weight(part)) for part in parts]",
    "targets": "weights = [int((part[1] != IGNORE_INDEX).sum()) for part in parts]",
    "class weights": _BY_CLASS,
}

_TOTAL = """\
total = sum(weights)
if total == 0:
    return math.nan"""


def weight_lines(choices: Choices) -> Iterator[str]:
    """Before the first backward: the weights of all parts."""
    if not choices.weighs:
        return
    yield from _WHY.splitlines()
    if choices.weighs_terms:
        yield from _BY_TERM.splitlines()
    else:
        yield from _COUNTS[choices.divisor].splitlines()
        yield from _TOTAL.splitlines()


def loop_lines(choices: Choices) -> Iterator[str]:
    """The head of the loop over the parts: those without weight are left out, since their mean is 0/0."""
    if not choices.weighs:
        yield "for part in parts:"
        return
    yield "for part, own in zip(parts, weights, strict=True):"
    if choices.weighs_terms:
        yield "    if not any(own.values()):"
        yield "        continue  # its means over nothing are NaN"
    else:
        yield "    if own == 0:"
        yield "        continue  # its mean over nothing is NaN"


def share_lines(choices: Choices) -> Iterator[str]:
    """Within the loop: the share of one part, or its terms' shares; with wide sums, their common one besides."""
    if choices.weighs_terms:
        yield "shares = {k: own[k] / totals[k] for k in own if own[k] > 0}"
        if choices.sums_wide:
            yield "share = max(shares.values())  # collect multiplies by it, in float32"
    elif choices.weighs:
        yield "share = own / total"
    elif choices.divisor == "samples":
        line = f"share = len({rows_in(choices.form, 'part')}) / len({rows_in(choices.form, 'batch')})"
        yield line + ("  # the parts may be uneven" if len(line) < _ROOM_FOR_WHY else "")


def terms_lines(choices: Choices) -> Iterator[str]:
    """From `terms` to the loss of one part."""
    if not choices.weighs_terms:
        yield "part_loss = torch.stack(list(terms.values())).sum()"
    elif choices.sums_wide:
        yield "scaled = [terms[k] * (s / share) for k, s in shares.items()]"
        yield "part_loss = torch.stack(scaled).sum()"
    else:
        yield "part_loss = torch.stack([terms[k] * s for k, s in shares.items()]).sum()"
