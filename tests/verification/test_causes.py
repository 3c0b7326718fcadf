"""The planted list: what is wrong with an update, and the cause that is named; all else is unequal, cause unknown."""

from __future__ import annotations

from typing import Any

import planted_causes as planted
import pytest
import small_verified as small
import torch
from torch import Tensor, nn

from autoaccum import Workload, verify
from autoaccum.verification.verification_result import Verification

CRITERION = nn.CrossEntropyLoss()


def pairs(loss: Any, model: Any = small.Mlp, **more: Any) -> Workload:
    return Workload(model=model, batch=small.pairs, loss=loss, **more)


def captions(loss: Any) -> Workload:
    return Workload(model=small.Clip, batch=small.captions, loss=loss)


def found(workload: Workload, **more: Any) -> Verification:
    return verify(workload, target_batch=8, micro_batch=2, **more)


def broadcast() -> Workload:
    def numbers(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, small.FEATURES), torch.randn(size)

    return Workload(model=nn.Linear(small.FEATURES, 1), batch=numbers, criterion=nn.MSELoss())


NORMED = Workload(model=small.Residual, batch=small.images, criterion=CRITERION)
WELL: dict[str, Workload] = {
    "MLP": small.classes(),
    "MLP, a sum": pairs(small.summed_loss, reduction="sum"),
    "a sparse gradient": small.classes(small.Looking),
    "BatchNorm at rest": Workload(
        model=lambda: small.Residual().eval(), batch=small.images, criterion=CRITERION, batchnorm="frozen"
    ),
    "padding and dropout": small.sentences(weight=small.token_weight),
    "two losses, of tokens and samples": small.sentences(small.text_losses, weight=small.text_weights),
    "Hugging Face, shifted tokens": small.sentences(
        small.huggingface_loss, small.HuggingFace, weight=small.shifted_weight
    ),
    "CLIP, each pair by itself": captions(small.matched_loss),
    "a loop": small.classes(accumulate=planted.right_loop),
    "a loop with dropout": small.classes(small.dropped, accumulate=planted.right_loop),
}


@pytest.mark.parametrize("case", WELL)
def test_claims_no_cause_where_all_is_well(case: str) -> None:
    verification = found(WELL[case])
    assert verification.equivalent
    assert verification.causes == ()


TOKENS = '(batch["labels"] != -100).sum()'
SHIFTED = '(batch["labels"][:, 1:] != -100).sum()'
COUPLED = {"where": ("the loss",), "mode": {"coupled": True}}

# Workload, kind, and some of what is said. All are proved.
PLANTED: dict[str, tuple[Workload, str, dict[str, Any]]] = {
    "BatchNorm": (NORMED, "batchnorm", {"where": ("norm1", "norm2"), "mode": {"batchnorm": "exact"}}),
    "tokens that are not weighted": (
        small.sentences(small.huggingface_loss, small.HuggingFace),
        "weight",
        {"code": SHIFTED, "divisor": "samples", "where": ()},
    ),
    "two losses, one weight": (
        small.sentences(small.text_losses),
        "weight",
        {"where": ("tokens",), "code": f'{{"tokens": {TOKENS}, "size": len(batch["input_ids"])}}'},
    ),
    "tokens, said to be a sum": (
        small.sentences(reduction="sum"),
        "reduction",
        {"code": TOKENS, "is_sum": True, "divisor": None},
    ),
    "a sum, said to be a mean": (pairs(small.summed_loss), "reduction", {"change": "write_sum"}),
    "in-batch negatives": (captions(planted.contrastive_loss), "coupled loss", COUPLED),
    "the root of a mean": (pairs(planted.root_loss), "coupled loss", COUPLED),
    "a regulariser in a sum": (pairs(planted.penalised_sum, reduction="sum"), "coupled loss", COUPLED),
    "outputs that are broadcast against targets": (broadcast(), "coupled loss", COUPLED),
    "a random order": (small.classes(planted.Shuffling), "randomness", {"mode": {}}),
    "a loop that does not divide": (
        small.classes(accumulate=planted.undivided_loop),
        "accumulate",
        {
            "mistake": "undivided",
            "factors": pytest.approx([1.0] * 4),
            "shares": pytest.approx([0.25] * 4),
            "over_ranks": False,
        },
    ),
    "a loop that divides twice": (
        small.classes(accumulate=planted.twice_divided_loop),
        "accumulate",
        {"mistake": "divided twice"},
    ),
    "a loop that averages means of tokens": (
        small.sentences(weight=small.token_weight, accumulate=planted.loop_of_means),
        "accumulate",
        {"mistake": "mean of means", "divisor": "weight(part)"},
    ),
    "a loop that divides the last window as a whole one": (
        small.classes(accumulate=planted.configured_loop),
        "last window",
        {"mistake": "last window"},
    ),
    "a loop that zeroes gradients between parts": (
        small.classes(accumulate=planted.zeroing_loop),
        "accumulate",
        {"mistake": "weights", "factors": pytest.approx([0.0, 0.0, 0.0, 0.25])},
    ),
    "a loop that clips after each part": (
        small.classes(accumulate=planted.clipping_loop),
        "accumulate",
        {"mistake": "weights"},
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_names_and_proves_the_one_cause(case: str) -> None:
    workload, kind, expected = PLANTED[case]
    verification = found(workload)
    assert not verification.equivalent
    (cause,) = verification.causes
    assert (cause.kind, cause.proved) == (kind, True)
    said = {**cause.found.facts, **cause.change.facts, **vars(cause), "change": cause.change.code}
    assert {name: said[name] for name in expected} == expected


SEEN: dict[str, tuple[Workload, str, tuple[str, ...]]] = {
    "a norm of one's own": (small.classes(planted.Standardising), "coupled model", ("the model itself",)),
    "a term that is a sum among means": (pairs(planted.mixed_reductions), "reduction", ("size",)),
    "means over different counts, added up": (small.sentences(planted.mixed_counts), "coupled loss", ("the loss",)),
    "a variable that counts calls": (pairs(planted.counted_loss), "non-determinism", ()),
}


@pytest.mark.parametrize("case", SEEN)
def test_names_what_it_sees_but_cannot_take_away(case: str) -> None:
    workload, kind, where = SEEN[case]
    (cause,) = found(workload).causes
    assert (cause.kind, cause.where, cause.proved) == (kind, where, False)


UNKNOWN: dict[str, tuple[Workload, str]] = {
    "state that is kept between calls": (small.classes(planted.Remembering), "first.weight"),
    "a buffer that counts calls": (small.classes(planted.Counting), "calls"),
    "a feature without its graph": (small.classes(planted.Caching), "first.weight"),
    "weights that follow others": (small.classes(planted.Following), "first.weight"),
    "a hook on a gradient": (small.classes(planted.hooked), "first.weight"),
    "a loop with a regulariser for each part": (
        pairs(small.penalised_loss, accumulate=planted.penalised_loop),
        "first.weight",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_all_else_is_unequal_with_the_first_tensor_that_differs(case: str) -> None:
    workload, tensor = UNKNOWN[case]
    verification = found(workload)
    assert not verification.equivalent
    (cause,) = verification.causes
    assert (cause.kind, cause.found.code, cause.proved) == ("unknown", "unexplained", False)
    assert cause.found.facts["tensor"] == cause.where[0] == tensor


def test_batchnorm_is_told_beside_what_is_unknown() -> None:
    assert [cause.kind for cause in found(small.classes(planted.RememberingNormalised)).causes] == [
        "batchnorm",
        "unknown",
    ]


def test_a_permutation_is_neutral_and_said() -> None:
    verification = found(small.classes(planted.Mixing))
    assert verification.equivalent
    assert verification.neutral_random
    (*_, note) = verification.notes
    assert note.code == "random_neutral"
    assert "randperm" in note.facts["reason"].facts["error"]


def test_two_samples_are_enough() -> None:
    (cause,) = verify(small.sentences(), target_batch=2, micro_batch=1).causes
    assert cause.change.facts["code"] == TOKENS


def test_running_statistics_do_not_mend_the_gradient() -> None:
    (cause,) = found(NORMED, batchnorm="running").causes
    assert (cause.kind, cause.mode) == ("batchnorm", {"batchnorm": "exact"})
