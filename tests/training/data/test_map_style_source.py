from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import (
    DrawingRows,
    UnevenRows,
    assert_same,
    drawing_collate,
    indices_of,
    padding_collate,
    remaining,
    windows_of,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data.source import Source, open_source

COUNT, TARGET = 37, 10


class GlobalSampler(Sampler[int]):
    """Draws from every global generator, as late as it can."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(COUNT))
        while rest:
            place = int((random.random() + np.random.rand() + torch.rand(()).item()) / 3 * len(rest))
            yield rest.pop(place)

    def __len__(self) -> int:
        return COUNT


class EpochSampler(Sampler[int]):
    """Knows its epoch only if it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % COUNT for index in range(COUNT)])

    def __len__(self) -> int:
        return COUNT


class EndlessSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(COUNT)


class OwnGenerators(DrawingRows):
    """Draws from generators that it, and a transform of it, keep."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.own: list[Any] = [random.Random(1), np.random.default_rng(1), np.random.RandomState(np.random.PCG64(1))]
        self.transform = Noise()

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        python, numpy, legacy = (one.random() for one in self.own)
        return self.transform(torch.tensor([index, python, numpy, legacy], dtype=torch.float64))


class Noise:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        row[1:] += torch.rand(3, generator=self.generator)
        return row


def sharing() -> Any:
    """A loader and its dataset, which draw from one generator."""
    rows, shared = OwnGenerators(COUNT), generator()
    rows.transform.generator = shared
    return DataLoader(Subset(rows, range(COUNT)), 4, sampler=LateSampler(shared), generator=shared)


class LateSampler(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(COUNT, (), generator=self.own)) for _ in range(COUNT))

    def __len__(self) -> int:
        return COUNT


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


FORMS: dict[str, Any] = {
    "dataset": lambda: DrawingRows(COUNT),
    "loader": lambda: DataLoader(DrawingRows(COUNT), 4, shuffle=True, collate_fn=drawing_collate),
    "larger batches": lambda: DataLoader(DrawingRows(COUNT), 16, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(DrawingRows(COUNT), 7, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        DrawingRows(COUNT), 4, sampler=RandomSampler(range(COUNT), replacement=True, generator=generator())
    ),
    "weighted": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),
    "global generators": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=GlobalSampler()),
    "batch sampler": lambda: DataLoader(
        DrawingRows(COUNT), batch_sampler=BatchSampler(SubsetRandomSampler(range(COUNT)), 3, False)
    ),
    "dataset's generators": lambda: DataLoader(Subset(OwnGenerators(COUNT), range(COUNT)), 4, shuffle=True),
    "shared generator": sharing,
    "epochs": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=EpochSampler()),
}


def opened(data: Any, target: int = TARGET, *, part_size: int = 4, seed: int = 3, **more: Any) -> Source:
    source = open_source(data, target_batch=target, seed=seed, **{"workers": 0, **more})
    source.part_size = part_size
    return source


@given(
    count=st.integers(1, 60),
    target=st.integers(1, 60),
    part_size=st.integers(1, 70),
    loader_batch=st.none() | st.integers(1, 70),
)
def test_windows_hold_every_sample_once_an_epoch(
    count: int, target: int, part_size: int, loader_batch: int | None
) -> None:
    rows = DrawingRows(count)
    data = rows if loader_batch is None else DataLoader(rows, loader_batch, shuffle=True)
    if count < target:
        with pytest.raises(UsageError, match=f"has {count} samples, fewer than the target batch of {target}"):
            opened(data, target)
        return
    source = opened(data, target, part_size=part_size)
    windows = windows_of(source, range(2))
    assert source.samples_per_epoch == count
    for epoch in range(2):
        sizes = [window.samples for at, window in windows if at == epoch]
        assert sizes == [target] * (count // target) + [count % target] * (count % target > 0)
        assert sorted(indices_of(windows, epoch)) == list(range(count))
    assert all(sum(len(part) for part in window.parts) == window.samples for _, window in windows)
    if loader_batch is None:
        assert max(len(part) for _, window in windows for part in window.parts) <= part_size


def test_parts_are_divided_as_a_plan_divides_them() -> None:
    windows = windows_of(opened(DrawingRows(COUNT)), range(1))
    assert [[len(part) for part in window.parts] for _, window in windows] == [[4, 3, 3]] * 3 + [[4, 3]]


def test_each_part_has_a_padding_of_its_own() -> None:
    lengths = [3, 9, 1, 4, 4, 8, 2, 7]
    windows = windows_of(opened(UnevenRows(lengths), 8, part_size=2, collate=padding_collate), range(1))
    (_, window), *others = windows
    assert not others
    for part in window.parts:
        assert part.shape[1] == max(lengths[int(row[0]) - 1] for row in part)


@pytest.mark.parametrize("form", FORMS)
def test_goes_on_at_any_window_bit_for_bit(form: str) -> None:
    more: dict[str, Any] = {"collate": drawing_collate} if form == "dataset" else {}
    whole, states = remaining(opened(FORMS[form](), **more), range(3))
    for number, state in enumerate(states):
        data = FORMS[form]()
        resumed = opened(data, **more)
        assert resumed.restore(state) is None
        windows = windows_of(resumed, range(whole[number][0], 3))
        assert_same(windows, whole[number + 1 :])
        rows = data if form == "dataset" else getattr(data.dataset, "dataset", data.dataset)
        assert len(rows.read) == sum(window.samples for _, window in windows), "nothing is read twice"


@pytest.mark.parametrize("form", ["own generator", "global generators", "epochs"])
def test_goes_on_with_the_epoch_behind_a_finished_one(form: str) -> None:
    whole, states = remaining(opened(FORMS[form]()), range(3))
    last = max(number for number, (epoch, _) in enumerate(whole) if epoch == 1)
    resumed = opened(FORMS[form]())
    resumed.restore(states[last])
    assert_same(windows_of(resumed, range(2, 3)), whole[last + 1 :])
    ended = opened(FORMS[form]())
    remaining(ended, range(2))
    resumed = opened(FORMS[form]())
    resumed.restore(ended.state())
    assert_same(windows_of(resumed, range(2, 3)), whole[last + 1 :])


def test_reads_a_window_again_that_was_not_trained_on() -> None:
    source = opened(DrawingRows(COUNT))
    source.start_epoch(0)
    source.next_window()
    source.commit()
    before = source.state()
    lost = source.next_window()
    assert source.state() == before
    resumed = opened(DrawingRows(COUNT))
    resumed.restore(before)
    resumed.start_epoch(0)
    again = resumed.next_window()
    assert lost is not None
    assert again is not None
    assert_same([(0, lost)], [(0, again)])


@pytest.mark.parametrize("form", ["dataset", "loader", "global generators", "own generator"])
def test_leaves_the_callers_generators_alone(form: str) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    np.random.standard_normal()  # leaves one in store
    torch.randn(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    source = opened(FORMS[form]())
    source.planning_batch()(5)
    remaining(source, range(2))
    resumed = opened(FORMS[form]())
    resumed.restore(source.state())
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == str(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("form", FORMS)
def test_the_callers_generators_have_no_say(form: str) -> None:
    random.seed(1)
    torch.manual_seed(1)
    first = windows_of(opened(FORMS[form]()), range(2))
    random.seed(2)
    torch.manual_seed(2)
    assert_same(windows_of(opened(FORMS[form]()), range(2)), first)


def test_generators_that_a_dataset_keeps_are_seeded_and_put_back() -> None:
    rows = OwnGenerators(COUNT)
    before = [one.random() for one in OwnGenerators(COUNT).own]
    source = opened(rows)
    source.planning_batch()(3)
    windows = windows_of(source, range(2))
    assert [one.random() for one in rows.own] == before
    assert torch.equal(rows.transform.generator.get_state(), Noise().generator.get_state())
    drawn = torch.cat([part[:, 1:] for _, window in windows for part in window.parts])
    assert len(set(drawn.flatten().tolist())) == drawn.numel()
    assert_same(windows_of(opened(OwnGenerators(COUNT), workers=1), range(2)), windows)


def test_seeds_and_epochs_differ() -> None:
    windows = windows_of(opened(DrawingRows(COUNT)), range(2))
    others = windows_of(opened(DrawingRows(COUNT), seed=4), range(1))
    assert indices_of(windows, 0) != indices_of(windows, 1) != indices_of(others, 0) != indices_of(windows, 0)
    drawn = torch.cat([part[:, 1:] for _, window in windows for part in window.parts])
    assert len(set(drawn.flatten().tolist())) == drawn.numel(), "no number is drawn twice"


def test_the_order_is_the_one_a_loop_over_the_loader_sees() -> None:
    loader = DataLoader(DrawingRows(COUNT), 4, shuffle=True, generator=generator())
    seen = [int(row[0]) for _ in range(2) for batch in loader for row in batch]
    loader = DataLoader(DrawingRows(COUNT), 4, shuffle=True, generator=generator())
    source = opened(loader)
    source.planning_batch()
    windows = windows_of(source, range(2))
    assert indices_of(windows, 0) + indices_of(windows, 1) == seen


def test_an_endless_sampler_is_read_as_it_comes() -> None:
    source = opened(DataLoader(DrawingRows(COUNT), 4, sampler=EndlessSampler()))
    assert source.samples_per_epoch is None
    source.start_epoch(0)
    windows = []
    for _ in range(9):
        window = source.next_window()
        assert window is not None
        source.commit()
        windows.append((0, window))
    resumed = opened(DataLoader(DrawingRows(COUNT), 4, sampler=EndlessSampler()))
    resumed.restore({**source.state(), "samples": 80})
    resumed.start_epoch(0)
    last = resumed.next_window()
    assert last is not None
    assert_same([(0, last)], windows[8:])


def test_loader_batches_of_one_form_are_joined_and_differently_padded_ones_are_not() -> None:
    lengths = [2, 2, 2, 2, 5, 5, 2, 2]
    loader = DataLoader(UnevenRows(lengths), 2, collate_fn=padding_collate)
    (_, window), *_ = windows_of(opened(loader, 8, part_size=8), range(1))
    assert [tuple(part.shape) for part in window.parts] == [(4, 2), (2, 5), (2, 2)]


TENSORS = TensorDataset(torch.randn(COUNT, 3, 4), torch.arange(COUNT), torch.randn(COUNT, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "dataset",
    [TENSORS, Subset(TENSORS, [5, 3, 3, -1, 8, 20, 9]), Subset(Subset(TENSORS, range(1, 30)), range(0, 28, 2))],
    ids=["tensors", "subset", "subset of a subset"],
)
def test_rows_of_tensors_are_gathered_as_a_loader_would_stack_them(dataset: Any) -> None:
    size = len(dataset)
    (_, window), *_ = windows_of(opened(DataLoader(dataset, size), size, part_size=size), range(1))
    expected = next(iter(DataLoader(dataset, size)))
    assert type(window.parts[0]) is type(expected)
    for mine, theirs in zip(window.parts[0], expected, strict=True):
        assert torch.equal(mine, theirs)
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())


def test_only_what_draws_is_seeded() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return self.tensors[1][index] + torch.rand(())

    plain: list[Any] = [TENSORS, Subset(TENSORS, range(20)), ConcatDataset([TENSORS, TENSORS])]
    assert not any(draws(data) for data in plain)
    assert all(draws(data) for data in (Noisy(*TENSORS.tensors), Subset(Noisy(*TENSORS.tensors), range(20))))


def draws(dataset: Any) -> bool:
    from autoaccum.training.data.fetching import PartFetcher

    return PartFetcher(dataset, None).draws


def test_plans_with_the_longest_samples() -> None:
    lengths = [3] * 40 + [11, 7] + [3] * 40
    batch = opened(UnevenRows(lengths), collate=padding_collate).planning_batch()
    assert tuple(batch(2).shape)[0] == 2
    few = opened(UnevenRows([1, 2, 9, 4, 4, 4, 4, 4, 4, 4]), collate=padding_collate).planning_batch()
    assert tuple(few(3).shape) == (3, 9)


def test_a_sampler_chooses_what_is_planned_with() -> None:
    rows = UnevenRows([1, 2, 9, 4] + [4] * 10)
    loader = DataLoader(rows, 2, sampler=SubsetRandomSampler([0, 1, 3] * 4), collate_fn=padding_collate)
    assert tuple(opened(loader).planning_batch()(3).shape) == (3, 4)


class Sequenced:
    """No Dataset, but has its two methods."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Any:
        return self.entries[index]


class CountingSampler(Sampler[int]):
    """Knows how often it was gone through."""

    def __init__(self, data: Any, rounds: int = 0) -> None:
        self.data, self.rounds = data, rounds

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter(range(len(self.data)))

    def __len__(self) -> int:
        return len(self.data)


class UncopiedSampler(CountingSampler):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not this")


@pytest.mark.parametrize("sampler", [CountingSampler, UncopiedSampler])
def test_planning_leaves_no_trace_in_a_sampler(sampler: type[CountingSampler]) -> None:
    rows = UnevenRows([1, 2, 9, 4] + [4] * 10)
    own = sampler(rows)
    for loader in (
        DataLoader(rows, 2, sampler=own, collate_fn=padding_collate),
        DataLoader(rows, batch_sampler=BatchSampler(own, 3, True), collate_fn=padding_collate),
    ):
        assert tuple(opened(loader).planning_batch()(3).shape) == (3, 9)
    assert own.rounds == 0
    assert not hasattr(own, "epoch")


@pytest.mark.parametrize("form", FORMS)
def test_planning_changes_nothing_that_is_trained_on(form: str) -> None:
    planned = opened(FORMS[form]())
    planned.planning_batch()
    assert_same(windows_of(planned, range(1)), windows_of(opened(FORMS[form]()), range(1)))


def test_a_weighted_sampler_chooses_what_is_planned_with() -> None:
    rows = UnevenRows([1, 2, 9, 4])
    loader = DataLoader(rows, 2, sampler=WeightedRandomSampler([1.0, 1.0, 0.0, 1.0], 12), collate_fn=padding_collate)
    assert tuple(opened(loader).planning_batch()(3).shape) == (3, 4)


def test_another_kind_of_order_is_another_run() -> None:
    forms = ["dataset", "loader", "sampler's generator", "weighted", "global generators", "batch sampler"]
    assert len({str(opened(FORMS[form]()).fingerprint()["order"]) for form in forms}) == 5
    assert opened(FORMS["loader"]()).fingerprint() == opened(FORMS["sampler's generator"]()).fingerprint()


def test_samples_that_cannot_be_measured_are_planned_with_as_they_come() -> None:
    assert opened(Sequenced([1.0, 2.0]), 2).planning_batch()(2).tolist() == [1.0, 2.0]


def test_a_collate_that_drops_samples_is_told() -> None:
    source = opened(DrawingRows(COUNT), collate=lambda rows: torch.stack(rows[1:]))
    source.start_epoch(0)
    with pytest.raises(WorkloadError, match="collate made 3 samples of 4: return as many as it is given"):
        source.next_window()


def test_a_loader_that_drops_all_but_a_few_is_too_short() -> None:
    with pytest.raises(UsageError, match="has 20 samples, fewer than the target batch of 30: use --target-batch 20"):
        opened(DataLoader(DrawingRows(25), 20, drop_last=True), 30)


def test_a_sampler_of_unknown_length_is_too_short_when_it_ends() -> None:
    loader = DataLoader(DrawingRows(COUNT), batch_sampler=[[1, 2], [3]])
    source = opened(loader)
    source.start_epoch(0)
    with pytest.raises(UsageError, match="has 3 samples, fewer than the target batch of 10"):
        source.next_window()


def test_what_the_dataset_raises_comes_through() -> None:
    class Broken(DrawingRows):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("mine")

    random.seed(1)
    state = random.getstate()
    source = opened(Broken(COUNT))
    source.start_epoch(0)
    with pytest.raises(KeyError, match="mine"):
        source.next_window()
    assert random.getstate() == state


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), target=st.integers(1, 12), data=st.data())
def test_lists_of_any_length_are_cut_at_the_same_places_again(
    cuts: list[int], target: int, data: st.DataObject
) -> None:
    batches, first = [], 0
    for size in cuts:
        batches.append(list(range(first, first + size)))
        first += size
    if first < target:
        return

    def make() -> Source:
        return opened(DataLoader(DrawingRows(first), batch_sampler=batches), target)

    whole, states = remaining(make(), range(1))
    assert indices_of(whole, 0) == list(range(first))
    number = data.draw(st.integers(0, len(states) - 1))
    resumed = make()
    resumed.restore(states[number])
    assert_same(windows_of(resumed, range(1)), whole[number + 1 :])


class SeveralRows(Dataset[Any]):
    """Gives several rows at once, and no single one."""

    def __len__(self) -> int:
        return COUNT

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor([index]) for index in indices]


class OnlySeveral:
    __len__, __getitems__ = SeveralRows.__len__, SeveralRows.__getitems__


@pytest.mark.parametrize("make", [SeveralRows, OnlySeveral, lambda: Subset(SeveralRows(), range(COUNT))])
def test_a_dataset_may_give_several_rows_at_once(make: Any) -> None:
    source = opened(make())
    assert source.planning_batch()(3).shape == (3, 1)
    assert sorted(indices_of(windows_of(source, range(1)), 0)) == list(range(COUNT))
