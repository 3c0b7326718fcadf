"""A batch sampler that packs the samples of each update by tokens, deals them to ranks, and resumes anywhere."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autoaccum import Accumulator, TokenBudgetSampler
from autoaccum.accumulation.packing import part_cost
from autoaccum.errors import UsageError

LENGTHS = [7, 1, 30, 4, 4, 12, 9, 0, 22, 3, 5, 5, 8, 16, 2]
TARGETS = st.sampled_from(["target_batch", "target_tokens"])


class Rows(Dataset[Tensor]):
    """The row at an index holds that index as often as the row is long."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((LENGTHS[index],), index)

    def __len__(self) -> int:
        return len(LENGTHS)


def indices(rows: list[Tensor]) -> list[int]:
    """Return a micro-batch as the lengths of its samples."""
    return [len(row) for row in rows]


def epoch_of(sampler: TokenBudgetSampler, workers: int = 0) -> list[list[list[int]]]:
    """Return the lengths of the samples of each micro-batch of each window that is left of the epoch."""
    loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=indices, num_workers=workers)
    return list(sampler.windows(loader))


def windows_of(sampler: TokenBudgetSampler) -> list[list[list[int]]]:
    """Return the indices of each micro-batch of each window that is left of the epoch."""
    return list(sampler.windows(sampler))


@settings(max_examples=count_examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    target=TARGETS,
    of_target=st.integers(1, 60),
    micro_tokens=st.integers(1, 60),
    padding=st.sampled_from(["longest", "none"]),
    ranks=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_sample_once_over_all_ranks_within_the_budget_and_balanced(
    lengths: list[int],
    target: str,
    of_target: int,
    micro_tokens: int,
    padding: Any,
    ranks: int,
    shuffle: bool,
) -> None:
    options: dict[str, Any] = {target: of_target, "micro_tokens": micro_tokens, "padding": padding}
    options |= {"shuffle": shuffle, "world_size": ranks}
    samplers = [TokenBudgetSampler(lengths, **options, rank=rank) for rank in range(ranks)]
    sizes = [len(sampler) for sampler in samplers]
    by_rank = [windows_of(sampler) for sampler in samplers]
    lengths = [max(1, length) for length in lengths]
    assert sizes == [sum(map(len, windows)) for windows in by_rank]
    sums = []
    for shares in zip(*by_rank, strict=True):
        for part in chain.from_iterable(shares):
            assert len(part) == 1 or part_cost([lengths[index] for index in part], padding) <= micro_tokens
        tokens = [sum(lengths[index] for index in chain.from_iterable(share)) for share in shares]
        window = [lengths[index] for share in shares for index in chain.from_iterable(share)]
        assert max(tokens) - min(tokens) <= max(window)
        sums.append(len(window) if target == "target_batch" else sum(window))
    assert all(reached >= of_target for reached in sums[:-1])
    read = sorted(chain.from_iterable(chain.from_iterable(chain.from_iterable(by_rank))))
    assert read == list(range(len(lengths)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_resumes_at_every_window_with_what_was_left_also_where_workers_read_ahead(
    workers: int, rank: int
) -> None:
    def sampler(**settings: Any) -> TokenBudgetSampler:
        return TokenBudgetSampler(LENGTHS, target_batch=4, rank=rank, world_size=5, **{"micro_tokens": 20, **settings})

    whole = sampler()
    expected = [epoch_of(whole), epoch_of(whole)]
    for handed_out in range(len(expected[0]) + 1):
        interrupted = sampler()
        loader = DataLoader(Rows(), batch_sampler=interrupted, collate_fn=indices, num_workers=workers)
        reading = interrupted.windows(loader)
        assert list(islice(reading, handed_out)) == expected[0][:handed_out]
        state = interrupted.state_dict()
        reading.close()  # type: ignore[attr-defined]
        resumed = sampler()
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert [epoch_of(resumed, workers), epoch_of(resumed)] == [expected[0][handed_out:], expected[1]]
    larger = sampler(micro_tokens=40)
    larger.load_state_dict({**sampler().state_dict(), "windows": 1})
    assert [sorted(chain(*window)) for window in epoch_of(larger)] == [
        sorted(chain(*window)) for window in expected[0][1:]
    ]


def test_epochs_differ_by_their_number_and_seed_alone() -> None:
    def order(epoch: int, **settings: Any) -> list[list[int]]:
        sampler = TokenBudgetSampler(np.array(LENGTHS), target_batch=5, micro_tokens=30, **settings)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1) == order(1)
    assert len({str(order(*of)) for of in [(0,), (1,)]} | {str(order(1, seed=1))}) == 3
    assert order(0, shuffle=False) == order(1, shuffle=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_batch": None}, "no target"),
        ({"target_tokens": 50}, "both target_batch and target_tokens are given"),
        ({"target_batch": 0}, "target_batch is 0"),
        ({"micro_tokens": None}, "micro_tokens is None"),
        ({"padding": "left"}, "there is no padding 'left'"),
        ({"lengths": Rows()}, "lengths is a Rows"),
        ({"lengths": [4.5]}, "lengths is a list"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": torch.tensor([4.5])}, "a length is 4.5"),
        ({"lengths": [4, -1]}, "a length is -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2: ranks count from 0"),
        ({"world_size": 2}, "rank None of world_size 2"),
    ],
)
def test_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TokenBudgetSampler(**{"lengths": LENGTHS, "micro_tokens": 20, "target_batch": 4, **settings})


@pytest.mark.parametrize("settings", [{"lengths": LENGTHS[::-1]}, {"target_batch": 5}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_other_windows_is_refused(settings: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"lengths": LENGTHS, "micro_tokens": 20, "target_batch": 4}
    state = TokenBudgetSampler(**arguments).state_dict()
    with pytest.raises(UsageError, match="the saved state has .*, this sampler"):
        TokenBudgetSampler(**{**arguments, **settings}).load_state_dict(state)


def test_a_loader_of_other_batches_is_refused() -> None:
    sampler = TokenBudgetSampler(LENGTHS, micro_tokens=20, target_batch=4)
    with pytest.raises(UsageError, match="the loader has another batch_sampler"):
        list(sampler.windows(DataLoader(Rows(), batch_size=4)))
    with pytest.raises(UsageError, match="the loader ends within an update"):
        list(sampler.windows(list(sampler)[:-1]))


def share_of_group() -> list[list[list[int]]]:
    windows = windows_of(TokenBudgetSampler(LENGTHS, micro_tokens=20, target_batch=4))
    torch.distributed.barrier()  # A rank that ended would leave another without the connection that it still makes.
    return windows


def test_ranks_are_those_of_the_process_group() -> None:
    expected = [
        windows_of(TokenBudgetSampler(LENGTHS, micro_tokens=20, target_batch=4, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert on_ranks(2, share_of_group) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_updates_of_its_windows_are_those_of_whole_batches(workers: int) -> None:
    class Costs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(len(LENGTHS), 4, padding_idx=0, dtype=torch.float64)

        def forward(self, rows: Tensor) -> Tensor:
            summed: Tensor = self.table(rows).sum(1)
            return summed

    def pad(samples: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def train(step: Any) -> Tensor:
        torch.manual_seed(0)
        model = Costs()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        sampler = TokenBudgetSampler(LENGTHS, micro_tokens=20, target_batch=4)
        loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=pad, num_workers=workers)
        accumulator = Accumulator(model, optimizer, lambda model, rows: model(rows).tanh().mean(), micro_batch=100)
        for _ in range(2):
            for window in sampler.windows(loader):
                step(accumulator, window)
        return model.table.weight.detach()

    def whole(accumulator: Accumulator, window: list[Tensor]) -> None:
        accumulator.step(pad([row for part in window for row in part]))

    parts = train(lambda accumulator, window: accumulator.step_parts(window))
    torch.testing.assert_close(parts, train(whole), rtol=1e-10, atol=1e-10)
