"""Batches of the longest samples of a dataset, and small batches for experiments."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from autoaccum.errors import WorkloadError
from autoaccum.sources.samples import apply_spec, longest_first, spread_indices, take_longest, take_small_batch
from autoaccum.sources.workload import Workload


def loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch)).mean()


def make(dataset: Any, **changes: Any) -> Workload:
    return Workload(model=nn.Identity, loss=loss, dataset=dataset, **changes)


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 40))
def test_the_longest_come_first_and_equal_ones_keep_their_order(lengths: list[int], most: int) -> None:
    samples = [(index, torch.zeros(length)) for index, length in enumerate(lengths)]
    taken = longest_first(iter(samples), most)
    assert taken == sorted(samples, key=lambda sample: -len(sample[1]))[:most]


@given(st.integers(0, 500), st.integers(1, 60))
def test_indices_are_spread_and_the_same_each_time(total: int, count: int) -> None:
    before = random.getstate()
    indices = spread_indices(total, count)
    assert indices == spread_indices(total, count)
    assert random.getstate() == before
    assert len(indices) == len(set(indices)) == min(total, count)
    assert indices == sorted(indices)
    if total > count:
        parts = [index * count // total for index in indices]
        assert all(abs(part - number) <= 1 for number, part in enumerate(parts))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 30))
def test_a_batch_repeats_the_longest_samples_if_there_are_too_few(lengths: list[int], most: int, size: int) -> None:
    dataset = [torch.full((length,), float(length)) for length in lengths]
    workload = take_longest(make(dataset, collate=padded), len(dataset), most)
    batch = workload.build_batch(size)
    kept = sorted(lengths, reverse=True)[:most]
    assert batch.shape == (size, kept[0])
    assert batch[:, 0].tolist() == [kept[index % len(kept)] for index in range(size)]
    assert workload.longest_of == len(dataset)


@dataclass
class Pair:
    text: Any
    label: int


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3, 2), torch.zeros(7)),
        (np.zeros(3), np.zeros(4)),
        ([1, 2], [1, 2, 3]),
        ([np.int64(1)], [np.int64(1), np.int64(2)]),
        ({"ids": [1, 2], "label": 0}, {"ids": [1, 2, 3], "label": 0}),
        (Pair(torch.zeros(2), 100), Pair(torch.zeros(3), 1)),
        ([torch.zeros(2), torch.zeros(2)], [torch.zeros(5)]),
        (torch.zeros(0), torch.zeros(1)),
    ],
)
def test_length_counts_the_elements_of_tensors_arrays_and_lists_of_numbers(short: Any, long: Any) -> None:
    assert longest_first([short, long], 1)[0] is long
    assert longest_first([long, short], 1)[0] is long


def test_worst_of_replaces_the_workloads_own_batch() -> None:
    workload = make([torch.zeros(2), torch.zeros(5)], batch=lambda size: torch.zeros(size, 1), collate=padded)
    assert apply_spec(workload, {}).build_batch(2).shape == (2, 1)
    assert apply_spec(workload, {"longest_of": 2}).build_batch(2).shape == (2, 5)


def test_uneven_samples_need_a_collate() -> None:
    workload = take_longest(make([torch.zeros(2), torch.zeros(5)]), 2)
    with pytest.raises(
        WorkloadError, match=r"longest samples raised RuntimeError: stack expects .*: write def collate\(samples\)"
    ):
        workload.build_batch(2)


def test_collate_must_keep_every_sample() -> None:
    workload = take_longest(make([torch.zeros(2)] * 3, collate=lambda samples: torch.zeros(1, 2)), 3)
    with pytest.raises(WorkloadError, match=r"collate\(\) returned 1 samples"):
        workload.build_batch(3)


class Broken:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "dataset is None, which has no single samples .*: define dataset"),
        ([], "the dataset has no samples"),
        (["a text", "another"], "no tensors to measure their length by, the first is a str"),
        ([{"path": "x.png", "label": 3}], "no tensors to measure their length by, the first is a dict"),
        (DataLoader([1, 2]), "dataset is a DataLoader, .*: define dataset = loader.dataset"),  # type: ignore[arg-type]
        (Broken(), "the dataset raised OSError: the disk is gone"),
    ],
)
def test_refuses_datasets_that_cannot_be_used(dataset: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        take_longest(make(dataset, batch=lambda size: torch.zeros(size, 1)), 2)


def test_without_batch_there_must_be_a_dataset_and_worst_of() -> None:
    with pytest.raises(WorkloadError, match="neither batch nor dataset"):
        make(None)
    workload = make([torch.zeros(2)])
    with pytest.raises(WorkloadError, match="defines no 'batch': write def batch.*--longest-of N"):
        apply_spec(workload, {})
    with pytest.raises(WorkloadError, match=r"there is no batch\(4\)"):
        workload.build_batch(4)


def longest_part(sample: dict[str, Tensor]) -> int:
    return max(map(len, sample.values()))


def test_a_batch_of_one_length_has_the_most_labels_of_any_shorter_sample() -> None:
    sizes = [(9, 1), (8, 2), (5, 5), (3, 7), (2, 1)]
    dataset = [{"ids": torch.zeros(ids), "labels": torch.zeros(labels)} for ids, labels in sizes]
    workload = make(dataset, length=longest_part, lengths=lambda batch: [*map(longest_part, batch)], collate=list)
    workload = apply_spec(workload, {"longest_of": 5})
    shapes = [(len(sample["ids"]), len(sample["labels"])) for sample in workload.build_batch(3, 8)]
    assert shapes == [(8, 2), (8, 2), (3, 7)]
    assert [len(sample["ids"]) for sample in workload.build_batch(2, 2)] == [2, 2]


def test_samples_that_cannot_be_measured_in_batches_are_refused() -> None:
    workload = make([torch.zeros(2), torch.zeros(5)], length=len, collate=padded)
    with pytest.raises(WorkloadError, match="tokens of a batch's samples are not known: write def lengths"):
        take_longest(workload, 2)


TEXTS = [torch.arange(length) for length in (5, 2, 3, 4)]


def test_a_small_batch_is_collated_from_short_and_long_samples_of_the_dataset() -> None:
    taken = take_small_batch(
        make(
            batch=lambda size: torch.zeros(size, 9, dtype=torch.int64),
            dataset=TEXTS,
            collate=lambda samples: pad_sequence(samples, batch_first=True, padding_value=-1),
        ),
        3,
    )
    assert taken.tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1], [0, 1, 2, 3, -1]]


def test_texts_are_as_long_as_what_collate_makes_of_them() -> None:
    def collate(texts: list[str]) -> Tensor:
        return torch.zeros(len(texts), max(len(text.split()) for text in texts))

    texts = ["Donaudampfschiff", "a b c", "a b", "d e f g"]
    assert longest_first(texts, 2, collate) == ["d e f g", "a b c"]
    with pytest.raises(WorkloadError, match=r"no tensors to measure their length by, the first is a str"):
        longest_first(texts, 2)
