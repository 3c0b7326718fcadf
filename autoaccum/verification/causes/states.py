"""What one part leaves for the next: state that is kept, and draws that are not of one sample each."""

from __future__ import annotations

from autoaccum.accumulation.company.words import listed
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause

KEPT_STATE = (
    "it runs where every part begins anew: forward keeps state between calls, of the size of a batch; reset it before"
    " each part"
)
"""The way out where `has_kept_state`."""


def has_kept_state(lab: Laboratory) -> bool:
    """Whether an accumulated update that raises would run if each part began with the state that the first began with.

    So it is with an RNN that keeps its hidden state, whose first dimension is that of the part before.
    """
    try:
        lab.full(Change(fresh_state=True))
    except AutoaccumError:
        return False
    return True


def state_cause(inquiry: Inquiry, names: tuple[str, ...], without: Change) -> Cause:
    """State that is kept between calls.

    Args:
        inquiry: What came out unequal.
        names: Attributes and buffers that a run changes.
        without: What else was put out of the way, but not this.
    """
    differing = set(inquiry.differences(without) or ())
    parts = len(inquiry.lab.sizes)
    if differing == {"buffers"}:
        return Cause(
            kind="state",
            found=(
                f"every call changes {listed(names)}, {parts} times in an update, as it counts or averages over"
                " micro-batches; losses and gradients are the same"
            ),
            change=(
                "change it once per update, in the training loop and not in forward; where a value by micro-batches"
                " will do, leave it as it is"
            ),
            where=names,
        )
    if "gradients" in differing and "loss" not in differing and inquiry.method == "accumulator":
        return Cause(
            kind="detached",
            found=(
                f"{listed(names)} is kept from the first part without its graph: losses agree, and later parts have"
                " no gradient through it"
            ),
            change="compute it in every call while training, or keep it only under eval()",
            where=names,
        )
    return Cause(
        kind="state",
        found=f"state is kept between calls: each part begins with what the one before has left in {listed(names)}",
        change="reset it before each part, pass it in with the batch, or leave it alone while training",
        where=names,
    )


def draw_cause(sites: tuple[str, ...], *, proved: bool) -> Cause:
    """Draws that differ in meaning between a part and the whole batch."""
    return Cause(
        kind="randomness",
        found=(
            f"what is drawn is not of one sample each, in {listed(sites)}: it mixes samples, as an order does; with"
            " draws that do nothing, both are the same"
        ),
        change="draw for each sample by itself, or mix samples where the batch is made, before it is cut",
        where=sites,
        proved=proved,
    )


def hook_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """Hooks that change gradients, which see each part's own."""
    return Cause(
        kind="hook",
        found=f"hooks on the gradient of {listed(names)} see that of each micro-batch, not that of the update",
        change="change gradients once per update, after the last micro-batch and before optimizer.step()",
        where=names,
        proved=proved,
    )
