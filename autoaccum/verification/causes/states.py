"""What one part leaves for the next: state that is kept, and draws that are not of one sample each."""

from __future__ import annotations

from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.words import listed
from autoaccum.verification.outcomes import Change
from autoaccum.verification.records import Cause


def state_cause(inquiry: Inquiry, names: tuple[str, ...], without: Change) -> Cause:
    """State that is kept between calls.

    Args:
        inquiry: What came out unequal.
        names: Attributes, variables and buffers that a run changes.
        without: What else was put out of the way, but not this.
    """
    differing = set(inquiry.differences(without) or ())
    parts = len(inquiry.lab.sizes)
    if differing == {"buffers"}:
        return Cause(
            kind="state",
            found=f"{listed(names)} changes with every call, {parts} times in an update; gradients are the same",
            change="change it once per update, outside of forward, or count on it less",
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
        found=f"{listed(names)} is kept between calls: each part begins with what the one before has left",
        change="reset it before each part, pass it in with the batch, or leave it alone while training",
        where=names,
    )


def draw_cause(*, proved: bool) -> Cause:
    """Draws that differ in meaning between a part and the whole batch."""
    return Cause(
        kind="randomness",
        found=(
            "a random draw is not of one sample each: it mixes samples of a part, as a permutation does; with draws"
            " that do nothing, both are the same"
        ),
        change="draw for each sample by itself, or mix samples where the batch is made, before it is cut",
        proved=proved,
    )
