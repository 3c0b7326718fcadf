"""The table: models, what is planted wrong, and the cause that is found. None is claimed where all is well."""

from __future__ import annotations

import re
from typing import Any

import planted_causes as planted
import planted_loops as loops
import pytest
import small_verified as small
import torch
from torch import nn

from autoaccum import Workload, verify
from autoaccum.errors import WorkloadError
from autoaccum.reporting.verify_report import verdict
from autoaccum.verification.verification_result import Verification

CRITERION = nn.CrossEntropyLoss()


def classes(model: Any, **more: Any) -> Workload:
    return Workload(model=model, batch=small.pairs, criterion=CRITERION, **more)


def pairs(loss: Any, model: Any = small.Mlp, **more: Any) -> Workload:
    return Workload(model=model, batch=small.pairs, loss=loss, **more)


def pictures(model: Any, **more: Any) -> Workload:
    return Workload(model=model, batch=small.images, criterion=CRITERION, **more)


def texts(loss: Any, model: Any = small.Gpt, **more: Any) -> Workload:
    return Workload(model=model, batch=small.texts, loss=loss, **more)


def captions(loss: Any, model: Any = small.Clip, **more: Any) -> Workload:
    return Workload(model=model, batch=small.captions, loss=loss, **more)


def sequences(model: Any, **more: Any) -> Workload:
    return Workload(model=model, batch=small.sequences, criterion=CRITERION, **more)


def found(workload: Workload, **more: Any) -> Verification:
    return verify(workload, target_batch=8, micro_batch=2, **more)


def without_line(place: str) -> str:
    return re.sub(r"\.py:\d+", ".py", place)


WELL: dict[str, Workload] = {
    "MLP, AdamW": classes(small.Mlp),
    "MLP, a sum": pairs(small.summed_loss, reduction="sum"),
    "MLP with a sparse gradient": Workload(
        model=small.Looking,
        batch=small.pairs,
        criterion=CRITERION,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "ResNet with BatchNorm at rest": pictures(small.frozen),
    "GPT with padding and dropout": texts(small.token_loss, weight=small.token_weight),
    "GPT with two losses, of tokens and samples": texts(small.text_losses, weight=small.text_weights),
    "Hugging Face, shifted tokens": texts(small.huggingface_loss, small.HuggingFace, weight=small.shifted_weight),
    "CLIP with temperature, each pair by itself": captions(small.matched_loss),
    "a loop of its own": classes(small.Mlp, accumulate=loops.right),
}


@pytest.mark.parametrize("case", WELL)
def test_claims_no_cause_where_all_is_well(case: str) -> None:
    verification = found(WELL[case])
    assert verification.equivalent
    assert verification.causes == ()


TOKENS = '(batch["labels"] != -100).sum()'
SHIFTED = '(batch["labels"][:, 1:] != -100).sum()'

# Workload, kind, where, what the change says.
PROVED: dict[str, tuple[Workload, str, tuple[str, ...] | None, str]] = {
    "ResNet with BatchNorm": (pictures(small.Residual), "batchnorm", ("norm1", "norm2"), 'batchnorm="exact"'),
    "BatchNorm after dropout": (classes(small.normalised_after_dropout), "batchnorm", ("2",), "GroupNorm"),
    "BatchNorm that only watches": (classes(planted.Watching), "batchnorm", ("norm",), 'batchnorm="running"'),
    "a norm of one's own": (classes(planted.standardised), "coupled model", ("1",), "eval()"),
    "Hugging Face without weight": (
        texts(small.huggingface_loss, small.HuggingFace),
        "weight",
        (),
        f"def weight(batch): return {SHIFTED}",
    ),
    "two losses of texts, one weight": (
        texts(small.text_losses),
        "weight",
        ("tokens",),
        f'return {{"tokens": {TOKENS}, "size": len(batch["input_ids"])}}',
    ),
    "classes that have weights in a buffer": (
        pairs(planted.buffer_weighted_loss, planted.Weighted),
        "weight",
        (),
        "def weight(batch): return model.weights[batch[1]].sum()",
    ),
    "a sum, said to be a mean": (pairs(small.summed_loss), "reduction", (), 'reduction = "sum"'),
    "an RNN that keeps its state": (sequences(planted.Keeping), "state", ("hidden",), "reset it"),
    "a buffer that counts calls": (classes(planted.Counting), "state", ("calls",), "once per update"),
    "a feature that is cached without its graph": (classes(planted.Caching), "detached", ("kept",), "in every call"),
    "samples mixed where only the loss is returned": (
        pairs(lambda model, batch: model(*batch), planted.ShufflingLoss),
        "randomness",
        ("aten.rand (planted_causes.py)",),
        "before it is split",
    ),
    "a loop that does not divide": (classes(small.Mlp, accumulate=loops.undivided), "accumulate", (), "count / total"),
    "a loop that averages means of tokens": (
        texts(small.token_loss, weight=small.token_weight, accumulate=loops.mean_of_means),
        "accumulate",
        (),
        "weight(part)",
    ),
    "a loop that divides the last window as a whole one": (
        classes(small.Mlp, accumulate=loops.configured),
        "last window",
        (),
        "of the window",
    ),
    "a loop that leaves out a part": (classes(small.Mlp, accumulate=loops.forgetting), "accumulate", (), "every part"),
    "a loop that zeroes gradients between parts": (
        classes(small.Mlp, accumulate=loops.zeroing),
        "accumulate",
        (),
        "zero_grad() once",
    ),
    "a loop that leaves a loss scale": (classes(small.Mlp, accumulate=loops.scaled), "accumulate", (), "count / total"),
    "a loop that clips after each part": (
        classes(small.Mlp, accumulate=loops.clipping_parts),
        "accumulate",
        (),
        "count / total",
    ),
}

CURED: dict[str, tuple[Workload, str, tuple[str, ...] | None, str]] = {
    "a regulariser in a sum": (pairs(planted.penalised_sum, reduction="sum"), "coupled loss", None, "coupled_loss"),
    "a sum and a regulariser, said to be a mean": (pairs(planted.penalised_sum), "coupled loss", None, "coupled_loss"),
    "a mean by what the batch does not tell": (pairs(planted.secret_loss), "coupled loss", None, "def weight(batch)"),
    "a mean that divides by one sample more": (
        pairs(planted.one_more_loss),
        "coupled loss",
        None,
        "adds up over parts",
    ),
    "the root of a mean": (pairs(planted.root_loss), "coupled loss", ("the loss",), "coupled_loss"),
    "CLIP with in-batch negatives": (captions(planted.contrastive_loss), "coupled loss", ("the loss",), "coupled_loss"),
    "outputs that are broadcast against targets": (
        Workload(model=planted.regressor, batch=planted.numbers, criterion=nn.MSELoss()),
        "coupled loss",
        ("the loss",),
        "the same shape",
    ),
}
"""Losses of the whole batch's outputs, which `coupled = True` was seen to make exact."""

UNPROVED: dict[str, tuple[Workload, str, tuple[str, ...] | None, str]] = {
    "a norm of one's own in any mode": (classes(planted.stubborn), "coupled model", ("1",), "autoaccum.whole_batch(x)"),
    "two losses with different divisors, added up": (
        texts(planted.mixed_counts),
        "coupled loss",
        ("the loss",),
        "return terms that divide by different counts, or a mean and a sum, as a dict",
    ),
    "a mean and a sum, added up": (
        pairs(planted.mean_and_sum),
        "coupled loss",
        ("the loss",),
        "return terms that divide by different counts, or a mean and a sum, as a dict",
    ),
    "weights that follow others in forward": (
        classes(planted.Following),
        "state",
        ("target.weight", "target.bias"),
        "once per update",
    ),
    "a term that is a sum among means": (pairs(planted.mixed_reductions), "reduction", ("size",), "all of them means"),
    "a variable that counts calls": (pairs(planted.counted_loss), "non-determinism", (), "globals"),
    "a factor from the system's entropy": (classes(planted.restless), "non-determinism", ("1",), "os.urandom"),
    "a teacher that was left in training mode": (
        pairs(planted.teacher_loss),
        "coupled model",
        ("<TEACHER>.1",),
        "eval() on it",
    ),
    "CLIP that gives all similarities": (
        captions(planted.similarity_loss, model=planted.Similarities),
        "coupled model",
        ("the model itself",),
        "no weight helps",
    ),
    "a loop that shares out two terms alike": (
        texts(small.text_losses, weight=small.text_weights, accumulate=loops.terms_alike),
        "accumulate",
        (),
        "total[name]",
    ),
    "a loop that adds a regulariser for each part": (
        pairs(small.penalised_loss, accumulate=loops.penalised),
        "accumulate",
        None,
        "as loss(model, part) does",
    ),
    "a regulariser as a term of a sum": (
        pairs(planted.penalised_terms, reduction="sum"),
        "reduction",
        ("penalty",),
        "all of them means",
    ),
    "a loop that detaches a loss": (
        pairs(small.two_losses, small.TwoHeads, accumulate=loops.detaching),
        "detached",
        ("decoder.weight", "decoder.bias"),
        "detach()",
    ),
}
"""Causes that no ablation proves."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PROVED, *CURED, *UNPROVED])
def test_finds_the_one_cause(case: str) -> None:
    workload, kind, where, change = {**PROVED, **CURED, **UNPROVED}[case]
    verification = found(workload)
    assert not verification.equivalent
    assert [cause.kind for cause in verification.causes] == [kind]
    assert where is None or tuple(map(without_line, verification.causes[0].where)) == where
    assert change in verification.causes[0].change
    assert verification.causes[0].proved is (case not in UNPROVED)
    if case in CURED:
        assert verification.causes[0].mode == "coupled = True"
        assert verification.causes[0].left is not None
        assert verification.causes[0].left < 1e-12


TOGETHER: dict[str, tuple[Workload, set[str]]] = {
    "state and BatchNorm": (classes(planted.KeepingNormalised), {"state", "batchnorm"}),
    "words that are hidden at random": (texts(planted.own_loss, planted.masked), {"randomness", "coupled loss"}),
    "state and a sum": (pairs(small.summed_loss, planted.Remembering), {"state", "reduction"}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_finds_all_causes_that_are_needed(case: str) -> None:
    workload, kinds = TOGETHER[case]
    causes = found(workload).causes
    assert sorted(cause.kind for cause in causes) == sorted(kinds)


def test_state_of_the_size_of_a_part_is_found_though_a_shorter_window_cannot_run() -> None:
    verification = verify(sequences(planted.KeepingSize), target_batch=8, micro_batch=4)
    assert [cause.kind for cause in verification.causes] == ["state"]
    assert any("the shorter window of 4 + 3 was left out" in note for note in verification.notes)


def test_state_is_the_hint_where_not_even_the_whole_window_runs() -> None:
    with pytest.raises(WorkloadError, match="forward keeps state between calls, of the size of a batch"):
        verify(sequences(planted.KeepingSize), target_batch=8, micro_batch=3)


def test_a_permutation_is_held_and_said() -> None:
    verification = found(classes(planted.Mixing))
    assert verification.equivalent
    assert verification.neutral_random
    assert "replaced by neutral values" in verdict(verification).plain.partition(":")[0]
    assert any("randperm" in note for note in verification.notes)


def test_notes_terms_without_a_gradient() -> None:
    verification = found(pairs(planted.constant_term))
    assert verification.equivalent
    assert any("b of the loss has no gradient" in note for note in verification.notes)


@pytest.mark.slow
def test_finds_causes_behind_rounding() -> None:
    (cause,) = found(texts(small.token_loss), precision="bf16").causes
    assert cause.kind == "weight"
    assert cause.change.endswith(TOKENS)


def test_an_optimizer_that_orthogonalises_is_no_cause() -> None:
    def wide() -> nn.Module:
        layers = nn.Linear(small.FEATURES, 24, bias=False), nn.Tanh(), nn.Linear(24, small.CLASSES, bias=False)
        return nn.Sequential(*layers)

    workload = classes(wide, optimizer=lambda parameters: torch.optim.Muon(parameters, lr=0.01))
    assert found(workload, precision="bf16").equivalent


def test_two_samples_are_enough() -> None:
    (cause,) = verify(texts(small.token_loss), target_batch=2, micro_batch=1).causes
    assert cause.change.endswith(TOKENS)


def test_running_statistics_do_not_mend_the_gradient() -> None:
    (cause,) = found(pictures(small.Residual), batchnorm="running").causes
    assert (cause.kind, cause.mode) == ("batchnorm", 'batchnorm="exact"')
    assert cause.left is not None
    assert cause.left < 1e-12


def test_what_is_advised_is_right() -> None:
    """Of a mean, and of one that is said to be a sum."""
    (cause,) = found(texts(small.token_loss, reduction="sum")).causes
    code = cause.change.split("return ")[1]
    assert found(texts(small.token_loss, weight=lambda batch: eval(code, {"batch": batch}))).equivalent
