from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader
from tuned_workloads import Streamed, line_data, line_workload

from autoaccum.errors import WorkloadError
from autoaccum.tuning.running.held_out import split_data


def rows(data: Any) -> list[tuple[float, ...]]:
    return [tuple(data[index][0].tolist()) for index in range(len(data))]


def test_a_tenth_is_held_out_and_is_the_same_each_time() -> None:
    first, again = split_data(line_workload()), split_data(line_workload())
    assert (first.training_samples, len(first.training), len(first.held_out)) == (72, 72, 8)
    assert first.words == "8 of 80 samples of dataset, drawn by seed 0"
    assert rows(first.held_out) == rows(again.held_out)
    assert sorted(rows(first.training) + rows(first.held_out)) == sorted(rows(line_data()))
    assert not set(rows(first.training)) & set(rows(first.held_out))


def test_a_list_of_samples_is_split_too() -> None:
    split = split_data(line_workload(dataset=[line_data()[index] for index in range(3)]))
    assert (len(split.training), len(split.held_out)) == (2, 1)


def test_the_workloads_own_held_out_data_is_taken() -> None:
    held_out = line_data(5, seed=1)
    split = split_data(line_workload(evaluation_dataset=held_out))
    assert split.held_out is held_out
    assert (split.training_samples, split.words) == (80, "evaluation_dataset (5 samples)")
    streamed = split_data(line_workload(dataset=Streamed(), evaluation_dataset=Streamed(9)))
    assert (streamed.training_samples, streamed.words) == (None, "evaluation_dataset")


def test_no_dataset_is_refused() -> None:
    workload = line_workload(dataset=None, batch=lambda size: line_data(size)[:])
    with pytest.raises(WorkloadError, match="line has no dataset to train on: define dataset"):
        split_data(workload)


@pytest.mark.parametrize(
    ("data", "way_out"),
    [(Streamed(), "define evaluation_dataset"), (DataLoader(line_data()), "write dataset = loader.dataset")],
    ids=["stream", "loader"],
)
def test_what_gives_no_samples_by_index_needs_held_out_data_of_its_own(data: Any, way_out: str) -> None:
    with pytest.raises(WorkloadError, match=f"which does not give them by index: {way_out}"):
        split_data(line_workload(dataset=data))


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_data_is_refused(count: int) -> None:
    with pytest.raises(WorkloadError, match=rf"the dataset has {count} sample.*: none can be held out"):
        split_data(line_workload(dataset=line_data(count)))


def test_empty_held_out_data_is_refused() -> None:
    with pytest.raises(WorkloadError, match="evaluation_dataset has no samples"):
        split_data(line_workload(evaluation_dataset=line_data(0)))
