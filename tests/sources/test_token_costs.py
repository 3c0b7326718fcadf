"""Lengths of samples and what is cut of their padding, for batches as collators make them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import Batching
from autoaccum.sources.pytree import tensors
from autoaccum.sources.token_costs import TokenCosts, is_length_sequence
from autoaccum.spec import Padding

BY_NAME = TokenCosts()


def mask(*lengths: int, width: int, left: bool = False) -> Tensor:
    ones = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return ones.flip(1) if left else ones


def ids(rows: int, width: int) -> Tensor:
    return torch.arange(rows * width).reshape(rows, width)


def labels(*lengths: int, width: int, of_prompt: int = 0) -> Tensor:
    counted = mask(*lengths, width=width).bool() & (torch.arange(width) >= of_prompt)
    return torch.where(counted, 1, -100)


def encoded(*lengths: int, width: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids(len(lengths), width), "attention_mask": mask(*lengths, width=width), **more}


@dataclass
class Record:
    input_ids: Tensor
    attention_mask: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding."""


CASES: dict[str, tuple[Any, list[int], list[tuple[int, ...]]]] = {
    "mask": (encoded(2, 0, 4, width=6), [2, 1, 4], [(3, 4), (3, 4)]),
    "nothing to cut": (encoded(6, 2, width=6), [6, 2], [(2, 6), (2, 6)]),
    "all empty": (encoded(0, 0, width=6), [1, 1], [(2, 1), (2, 1)]),
    "no column": (encoded(0, 0, width=0), [1, 1], [(2, 0), (2, 0)]),
    "mask of booleans": ({"input_ids": ids(1, 4), "attention_mask": mask(3, width=4).bool()}, [3], [(1, 3), (1, 3)]),
    "left padding": (
        {"input_ids": ids(2, 5), "attention_mask": mask(2, 3, width=5, left=True)},
        [5, 5],
        [(2, 5), (2, 5)],
    ),
    "no mask": ({"input_ids": ids(2, 5), "labels": labels(2, 3, width=5)}, [5, 5], [(2, 5), (2, 5)]),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1, 0]])}, [3], [(1, 3)]),
    "labels of tokens": (
        encoded(2, 4, width=6, labels=labels(2, 4, width=6, of_prompt=1)),
        [2, 4],
        [(2, 4), (2, 4), (2, 4)],
    ),
    "spectra": ({"input_features": torch.ones(2, 9, 5), "labels": labels(2, 4, width=6)}, [2, 4], [(2, 9, 5), (2, 4)]),
    "labels as wide as features": (
        {"input_features": torch.ones(2, 6, 9), "labels": labels(2, 4, width=6)},
        [6, 6],
        [(2, 6, 9), (2, 6)],
    ),
    "labels of samples": (encoded(2, 4, width=6, labels=torch.tensor([0, 1])), [2, 4], [(2, 4), (2, 4), (2,)]),
    "scores of several classes": (encoded(2, 4, width=6, labels=torch.ones(2, 9)), [2, 4], [(2, 4), (2, 4), (2, 9)]),
    "scores of as many classes as columns": (encoded(6, 4, width=6, labels=torch.ones(2, 6)), [6, 4], [(2, 6)] * 3),
    "encoder and decoder": (
        encoded(2, 4, width=6, labels=labels(5, 1, width=8), decoder_attention_mask=mask(5, 1, width=8)),
        [5, 4],
        [(2, 4), (2, 4), (2, 5), (2, 5)],
    ),
    "encoder and labels of the same width": (
        encoded(2, 4, width=6, labels=labels(5, 1, width=6)),
        [5, 4],
        [(2, 5), (2, 5), (2, 5)],
    ),
    "sound": (
        {"input_values": torch.ones(2, 7), "attention_mask": mask(3, 5, width=7), "labels": labels(2, 2, width=4)},
        [3, 5],
        [(2, 5), (2, 5), (2, 2)],
    ),
    "embeddings": (
        {"inputs_embeds": torch.ones(2, 7, 3), "attention_mask": mask(3, 5, width=7)},
        [3, 5],
        [(2, 5, 3), (2, 5)],
    ),
    "features of sentences": (
        [encoded(2, 4, width=6), encoded(1, 5, width=5), torch.ones(2)],
        [2, 5],
        [(2, 4), (2, 4), (2, 5), (2, 5), (2,)],
    ),
    "columns of sentence-transformers": (
        {
            **{f"anchor_{name}": value for name, value in encoded(2, 4, width=6).items()},
            **{f"positive_{name}": value for name, value in encoded(1, 5, width=9).items()},
            "label": torch.ones(2),
        },
        [2, 5],
        [(2, 4), (2, 4), (2, 5), (2, 5), (2,)],
    ),
    "images beside": (
        encoded(2, 4, width=6, pixel_values=torch.ones(2, 3, 6, 6)),
        [2, 4],
        [(2, 4), (2, 4), (2, 3, 6, 6)],
    ),
    "record": (Record(**encoded(2, 4, width=6)), [2, 4], [(2, 4), (2, 4)]),
    "encoding": (Encoding(encoded(2, 4, width=6)), [2, 4], [(2, 4), (2, 4)]),
    "in a tuple": ((encoded(2, 4, width=6), torch.ones(2)), [2, 4], [(2, 4), (2, 4), (2,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_the_standard_names_are_known(name: str) -> None:
    batch, lengths, shapes = CASES[name]
    assert BY_NAME.of_batch(batch) == lengths
    cut = BY_NAME.cut(batch)
    assert type(cut) is type(batch)
    assert [tuple(tensor.shape) for tensor in tensors(cut)] == shapes
    assert all(tensor.is_contiguous() for tensor in tensors(cut))
    for mine, whole in zip(tensors(cut), tensors(batch), strict=True):
        assert torch.equal(mine, whole[:, : mine.shape[1]] if mine.ndim > 1 else whole)
        assert (mine is whole) == (mine.shape == whole.shape), "what is not cut is not copied"
    assert BY_NAME.of_batch(cut) == lengths


@pytest.mark.parametrize(
    "more",
    [{"weights": torch.ones(2, 6)}, {"mask": torch.ones(2, 1, 6, 6)}, {"position_ids": torch.ones(2, 3, 6)}],
    ids=["weights", "square mask", "positions of three kinds"],
)
def test_other_tensors_of_the_same_width_are_refused(more: dict[str, Tensor]) -> None:
    batch = encoded(2, 4, width=6, **more)
    assert BY_NAME.of_batch(batch) == [2, 4]
    [name] = more
    with pytest.raises(
        WorkloadError, match=f"{name} of shape .* has the width of the padded tensors, but its name is not known"
    ):
        BY_NAME.cut(batch)
    assert BY_NAME.cut(encoded(6, 4, width=6, **more))[name] is more[name], "nothing is cut of it"


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2, 6), torch.ones(2)),
        {"x": torch.ones(2, 6)},
        {"input_ids": torch.arange(6)},
        [{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(2)}],
        {"a": encoded(2, 3, width=3), "b": encoded(2, width=3), "labels": torch.ones(2)},
    ],
    ids=["tuple", "other names", "packed", "one mapping per sample", "rows that differ"],
)
def test_lengths_that_are_not_known_are_refused(batch: Any) -> None:
    with pytest.raises(WorkloadError):
        BY_NAME.of_batch(batch)


@pytest.mark.parametrize("padding", ["longest", "none"])
def test_functions_of_the_workload_are_asked(padding: Padding) -> None:
    costs = TokenCosts(padding=padding, lengths=lambda batch: batch[1], trim=lambda batch: (batch[0][:, :3], batch[1]))
    batch = (ids(2, 6), torch.tensor([3, 2]))
    assert costs.of_batch(batch) == [3, 2]
    assert costs.cut(batch)[0].shape == ((2, 3) if padding == "longest" else (2, 6))


@pytest.mark.parametrize("returned", [[3, 2], (3, 2), torch.tensor([3, 2]), np.array([3, 2]), [torch.tensor(3), 2]])
def test_lengths_come_in_any_sequence(returned: Any) -> None:
    assert TokenCosts(lengths=lambda batch: returned).of_batch(ids(2, 6)) == [3, 2]


@pytest.mark.parametrize("returned", [[3], 5, "35", None, torch.tensor(5), [3, -1], [3, 2.5]])
def test_other_lengths_are_refused(returned: Any) -> None:
    with pytest.raises(WorkloadError, match=r"lengths\(batch\)"):
        TokenCosts(lengths=lambda batch: returned).of_batch(ids(2, 6))


def test_a_batch_with_a_split_of_its_own_is_measured_and_trimmed_whole() -> None:
    batch = Batching(split=lambda batch, sizes: [batch], size=len).wrap([[1, 0], [1, 1]])
    costs = TokenCosts(lengths=lambda rows: [sum(row) for row in rows], trim=lambda rows: [row[:1] for row in rows])
    assert costs.of_batch(batch) == [1, 2]
    cut = costs.cut(batch)
    assert (cut.value, cut.samples) == ([[1], [1]], 2)


def test_how_to_trim_has_to_be_known() -> None:
    batch = (ids(2, 6), torch.tensor([3, 2]))
    costs = TokenCosts(lengths=lambda batch: batch[1])
    with pytest.raises(WorkloadError, match="cannot tell which tensors of the batch are padded: write def trim"):
        costs.cut(batch)
    with pytest.raises(WorkloadError, match=r"trim\(batch\) returned 1 of 2 samples"):
        TokenCosts(trim=lambda batch: [one[:1] for one in batch]).cut(batch)


@pytest.mark.parametrize("name", ["lengths", "length", "trim"])
def test_what_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name} is an int: write def {name}"):
        TokenCosts(**{name: 3})  # type: ignore[arg-type]


def test_a_sample_is_measured_by_length_or_as_a_batch() -> None:
    samples = [[1, 2, 3], [4]]

    def collate(rows: list[list[int]]) -> dict[str, Any]:
        return encoded(*map(len, rows), width=4)

    assert [BY_NAME.of_sample(sample, collate) for sample in samples] == [3, 1]
    assert [TokenCosts(length=len).of_sample(sample, collate) for sample in samples] == [3, 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [([1, 2], True), (np.array([1]), True), (torch.tensor([1]), True), ([], False), ("12", False), ([0.5], False)],
)
def test_lengths_of_a_dataset_are_told_apart(value: Any, expected: bool) -> None:
    assert is_length_sequence(value) == expected
