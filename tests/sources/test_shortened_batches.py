"""Samples that are shortened: what says how much of them counts, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.sources.pytree import tensors
from autoaccum.sources.weight_candidates import shorten

SAMPLES, LENGTH = 8, 10
IDS = torch.randint(5, 90, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
ONES = torch.ones(SAMPLES, LENGTH)
HALVES = (4, 4)


def shortened(batch: Any) -> Any:
    return shorten(batch, HALVES, new_labels=True)[0].batch


def test_ids_labels_masks_and_lengths_are_shortened_together() -> None:
    lengths = torch.full((SAMPLES,), LENGTH)
    made = shortened({"ids": IDS, "attention_mask": ONES.long(), "labels": IDS, "lengths": lengths})
    kept = made["attention_mask"].bool()
    assert torch.equal(made["attention_mask"], kept.long())
    assert torch.equal(made["labels"], IDS.masked_fill(~kept, -100))
    assert torch.equal(made["ids"], IDS.masked_fill(~kept, 0))
    assert torch.equal(made["lengths"], kept.sum(1))
    assert kept.sum(1).min() >= 2, "one is left where labels are shifted"
    assert kept[0].all(), "the length of the batch stays"
    assert kept[:4].sum() != kept[4:].sum()


@pytest.mark.parametrize(
    "batch",
    [
        (torch.randn(SAMPLES, 3, 4, 4), torch.arange(SAMPLES)),
        (IDS, IDS),
        (torch.randn(SAMPLES, 4), torch.nn.functional.one_hot(torch.arange(SAMPLES) % 4).float()),
        {"ids": IDS, "attention_mask": torch.arange(LENGTH)[None] <= torch.arange(SAMPLES)[:, None]},
        [torch.zeros(3)] * SAMPLES,
    ],
    ids=["images", "ids of a fixed length", "one-hot targets", "uneven already", "no masks"],
)
def test_what_says_nothing_of_lengths_is_left_alone(batch: Any) -> None:
    assert shorten(batch, HALVES, new_labels=True) == []


@pytest.mark.parametrize(
    ("leaf", "known"),
    [
        ({"mask": ONES}, True),
        ((ONES,), False),
        ((ONES.long(),), False),
        ((torch.zeros(SAMPLES, LENGTH).bool(),), False),
        ((torch.ones(SAMPLES, 1, 4, 4),), False),
        ((torch.ones(SAMPLES),), False),
        (({"labels": IDS.masked_fill(torch.arange(LENGTH) < 3, -100)}), True),
    ],
    ids=["named", "float", "integers", "padding is True", "pixels", "samples", "a prompt that is ignored"],
)
def test_masks_and_labels_are_recognised(leaf: Any, known: bool) -> None:
    (way,) = shorten(leaf, HALVES, new_labels=True)
    assert way.is_known is known
    (before,), (after,) = tensors(leaf), tensors(way.batch)
    assert not torch.equal(before, after)
    assert before.shape == after.shape


def test_labels_that_ignore_nothing_stay_where_a_loss_could_not_bear_it() -> None:
    batch = {"mask": ONES, "labels": IDS}
    assert [way.paths for way in shorten(batch, HALVES, new_labels=False)] == [('batch["mask"]',)]
    assert [way.paths for way in shorten(batch, HALVES, new_labels=True)] == [
        ('batch["labels"]', 'batch["mask"]'),
        ('batch["mask"]',),
    ]


def test_no_two_tensors_count_alike_where_counts_are_told_apart() -> None:
    mask = torch.arange(LENGTH)[None] < torch.tensor([10, 4, 7, 3, 9, 6, 5, 8])[:, None]
    batch = IDS.masked_fill(~mask, 0), IDS.masked_fill(~mask, -100), mask
    (way,) = shorten(batch, HALVES, new_labels=True, apart=True)
    ids, labels, kept = (counted.sum(1).tolist() for counted in (way.batch[0] != 0, way.batch[1] != -100, way.batch[2]))
    assert len({tuple(ids), tuple(labels), tuple(kept)}) == 3
