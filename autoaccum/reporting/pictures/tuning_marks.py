"""How trials are drawn: by what they came to, and where there are several effective batches in colours by those."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from autoaccum.reporting.pictures.theme import colour
from autoaccum.reporting.pictures.tuning_page import Remark
from autoaccum.reporting.pictures.tuning_scale import Losses, choose_losses
from autoaccum.reporting.tune_words import last_loss
from autoaccum.tuning.records import Row, Tuning
from autoaccum.tuning.settings import BatchSpan

_ROLES = ("parameters", "activations", "optimizer_state", "gradients")
"""Of the colours of effective batches, ascending."""


@dataclass(frozen=True)
class Batches:
    """Effective batches in a few ranges, each with a colour of its own."""

    span: BatchSpan

    @property
    def count(self) -> int:
        """How many ranges there are."""
        if self.span.single:
            return 1
        return max(1, min(len(_ROLES), round(math.log2(self.span.high / self.span.low))))

    def role(self, target_batch: int) -> str:
        """The colour of a batch."""
        if self.span.single:
            return "ran"
        share = math.log(target_batch / self.span.low) / math.log(self.span.high / self.span.low)
        return _ROLES[min(self.count - 1, int(self.count * share))]

    def marks(self) -> Iterator[Remark]:
        """What the colours mean."""
        if self.span.single:
            return
        factor = (self.span.high / self.span.low) ** (1 / self.count)
        ends = [round(self.span.low * factor**number) for number in range(self.count + 1)]
        for number in range(self.count):
            yield f"\N{BLACK CIRCLE} batch {ends[number]} to {ends[number + 1]}", _ROLES[number]


def loss_scale(tuning: Tuning) -> Losses:
    """The scale that all trials of a study are drawn on."""
    return choose_losses([loss for row in tuning.rows if (loss := _final_loss(row)) is not None])


def _final_loss(row: Row) -> float | None:
    return last_loss(row) if row.state in ("complete", "pruned") else None


def draw_trial(axes: Axes, x: float, row: Row, losses: Losses, batches: Batches) -> None:
    """One trial at `x`: where it is off the scale, at the edge."""
    if row.state in ("running", "waiting"):
        return
    loss = last_loss(row)
    style: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 4}
    if loss is None or not math.isfinite(loss):
        cross = {"marker": "x", "color": colour("limit"), "markersize": 6.5, "markeredgewidth": 1.6}
        axes.plot([x], [1.0], transform=axes.get_xaxis_transform(), **style | cross)
        return
    role = "muted" if row.state == "pruned" or row.setting is None else batches.role(row.setting.target_batch)
    beyond = loss > losses.high
    style |= {"marker": "^" if beyond else "o", "color": colour(role), "markersize": 5.5}
    if row.state == "pruned":
        style |= {"markerfacecolor": colour("panel")}
    if row.confirms is not None:
        style |= {"markersize": 3.5, "zorder": 5}
    axes.plot([x], [losses.place(loss)], **style)


def trial_marks(rows: Sequence[Row], losses: Losses, batches: Batches) -> Iterator[Remark]:
    """What the marks of `rows` mean, as far as there are any."""
    states = {row.state for row in rows}
    if "complete" in states:
        if batches.count > 1:
            yield from batches.marks()
        else:
            yield "\N{BLACK CIRCLE} complete", batches.role(batches.span.low)
    if any(row.confirms is not None for row in rows):
        yield "\N{BULLET} with other seeds", "ran"
    if "pruned" in states:
        yield "\N{WHITE CIRCLE} pruned, loss where it ended", "muted"
    if states & {"diverged", "out_of_memory", "failed"}:
        yield f"\N{MULTIPLICATION SIGN} {_ended_badly(states)}", "limit"
    if any(losses.high < (last_loss(row) or 0) < math.inf for row in rows):
        yield "\N{BLACK UP-POINTING TRIANGLE} off the scale", "muted"


def _ended_badly(states: Collection[str]) -> str:
    found = [state.replace("_", " ") for state in ("diverged", "out_of_memory", "failed") if state in states]
    return " or ".join(found)
