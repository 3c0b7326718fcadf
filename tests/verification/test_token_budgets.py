"""Micro-batches by a token budget, cut to their longest sample: the gradient must not depend on padding."""

from __future__ import annotations

from typing import Any

import pytest
import small_verified as small
import torch
from factories import codes
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import Workload, verify
from autoaccum.verification.verification_result import Verification


def mask(batch: Any) -> Tensor:
    return torch.as_tensor(batch["labels"] != -100)


def lengths(batch: Any) -> Tensor:
    return mask(batch).sum(1)


def trim(batch: Any) -> Any:
    most = int(lengths(batch).max())
    return {name: tensor[:, :most] for name, tensor in batch.items()}


def trim_too_much(batch: Any) -> Any:
    return {name: tensor[:, : max(2, int(lengths(batch).max()) - 1)] for name, tensor in batch.items()}


def masked(size: int) -> dict[str, Tensor]:
    batch = small.texts(size)
    return {**batch, "attention_mask": mask(batch).long()}


class Attending(small.Gpt):
    """Attends to all tokens; to padding, too, unless it is given a mask."""

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        allowed = None if attention_mask is None else attention_mask.bool()[:, None]
        return torch.as_tensor(self.head(x + functional.scaled_dot_product_attention(q, k, v, allowed)))


def attending_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def pooled_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over all positions of a sample, padding too."""
    return functional.cross_entropy(model(batch["input_ids"]).mean(1), batch["input_ids"][:, 0])


def padded_loss(model: nn.Module, batch: Any) -> Tensor:
    """Divides by positions, padding too."""
    each = functional.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    return each.mean()


def found(loss: Any = small.token_loss, model: Any = small.Gpt, **more: Any) -> Verification:
    given: dict[str, Any] = {"batch": small.texts, "lengths": lengths, "trim": trim, **more}
    return verify(Workload(model=model, loss=loss, **given), target_batch=8, micro_batch=2)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Of packed samples: all their tokens in one row, and where each begins."""
    counts = torch.split(batch["counts"], sizes)
    rows = torch.split(batch["tokens"], [int(count.sum()) for count in counts])
    return [{"tokens": row, "counts": count} for row, count in zip(rows, counts, strict=True)]


def packed(size: int) -> dict[str, Tensor]:
    counts = torch.tensor([small.LENGTHS[index % len(small.LENGTHS)] for index in range(size)])
    return {"tokens": torch.randn(int(counts.sum()), small.FEATURES), "counts": counts}


RIGHT: dict[str, dict[str, Any]] = {
    "a causal model": {"weight": small.token_weight},
    "a masked model, by the names of its tensors": {
        "loss": attending_loss,
        "model": Attending,
        "batch": masked,
        "trim": None,
        "weight": small.token_weight,
    },
    "packed without padding": {
        "loss": lambda model, batch: model(batch["tokens"]).square().mean(),
        "model": small.Mlp,
        "batch": packed,
        "weight": lambda batch: len(batch["tokens"]),
        "lengths": lambda batch: batch["counts"],
        "padding": "none",
        "split": split,
        "size": lambda batch: len(batch["counts"]),
    },
}


@pytest.mark.parametrize("case", RIGHT)
def test_micro_batches_of_unequal_samples_give_the_full_batchs_gradient(case: str) -> None:
    verification = found(**RIGHT[case])
    assert verification.equivalent
    compared = verification.comparisons[-1]
    assert (compared.window, sum(compared.micro_batches)) == ("tokens", 8)
    assert len(compared.micro_batches) > 1


WRONG: dict[str, dict[str, Any]] = {
    "padding is attended to": {"model": Attending, "weight": small.token_weight},
    "a mean over padding": {"loss": pooled_loss},
    "a loss over padding": {"loss": padded_loss},
    "a wrong trim": {"trim": trim_too_much, "weight": small.token_weight},
}


@pytest.mark.parametrize("case", WRONG)
def test_names_padding_as_the_cause(case: str) -> None:
    verification = found(**WRONG[case])
    assert [comparison.window for comparison in verification.comparisons if not comparison.equal] == ["tokens"]
    (cause,) = verification.causes
    assert (cause.kind, cause.found.code, cause.proved) == ("padding", "padding_counts", True)


def test_the_batch_has_short_and_long_samples_of_the_dataset() -> None:
    counts = torch.randint(2, 7, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    dataset = [torch.randint(1, small.WORDS, (count,)) for count in counts]
    given: dict[str, Any] = {"dataset": dataset, "collate": collate, "length": len, "weight": small.token_weight}
    verification = verify(Workload(model=small.Gpt, loss=small.token_loss, **given), target_batch=8, micro_batch=2)
    assert verification.equivalent
    assert verification.comparisons[-1].micro_batches == (2, 2, 4)


def test_says_that_equal_lengths_did_not_allow_it() -> None:
    verification = found(
        lambda model, batch: model(batch).square().mean(),
        small.Mlp,
        batch=lambda size: torch.randn(size, small.FEATURES),
        lengths=lambda batch: [5] * 8,
    )
    assert verification.equivalent
    assert codes(verification.notes) == ["tokens_alike"]


def test_several_ranks_share_the_micro_batches() -> None:
    workload = Workload(
        model=small.Gpt,
        batch=masked,
        loss=small.token_loss,
        weight=small.token_weight,
        lengths=lengths,
    )
    verification = verify(workload, target_batch=8, micro_batch=2, world_size=2)
    assert verification.equivalent
    assert verification.comparisons[-1].window == "tokens"
