"""The first updates compare the loss of a few samples with those of two parts, and change nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from state_digests import state_digest
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Accumulator
from autoaccum.accumulation.rng_state import RngState
from autoaccum.accumulation.step_result import WeightingWarning
from autoaccum.errors import RankFailedError, WorkloadError

WORDS, LENGTH = 20, 9
RIGHT = "the right weight is probably: def weight(batch): return (batch[1] != -100).sum()"


class Tagger(nn.Module):
    """Has all that a forward may change: running statistics, random numbers, a buffer, an attribute."""

    calls_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(WORDS, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.out, self.calls = nn.Linear(8, WORDS), 0
        self.register_buffer("calls_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        self.calls_seen += 1
        hidden = self.norm(self.embed(words).flatten(0, 1)).view(*words.shape, -1)
        return torch.as_tensor(self.out(self.drop(hidden)))


def tagger() -> Any:
    torch.manual_seed(1)
    return Tagger().double()


def rows(*lengths: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(1, WORDS, (len(lengths), LENGTH), generator=generator)
    counted = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return words, words.where(counted, -100)


EVEN, UNEVEN = (6,) * 8, (9, 2, 5, 1, 8, 3, 3, 7)


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tokens(batch: Any) -> Tensor:
    return torch.as_tensor((batch[1] != -100).sum())


def accumulator_of(model: nn.Module, loss: Any = token_loss, micro_batch: int = 4, **options: Any) -> Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, loss, micro_batch=micro_batch, **options)


def said(steps: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(one.message) for one in caught if issubclass(one.category, WeightingWarning)]


def test_a_mean_over_tokens_without_weight_is_warned_of_once_where_rows_first_differ() -> None:
    accumulator, words = accumulator_of(tagger()), list[list[str]]()
    for lengths in (EVEN, UNEVEN, UNEVEN, UNEVEN, UNEVEN):
        words.append(said(lambda lengths=lengths: accumulator.step(rows(*lengths))))  # type: ignore[misc]
    assert [len(one) for one in words] == [0, 1, 0, 0, 0]
    assert words[1][0].startswith("the weighting does not match the loss (the loss of 4 samples is 2.")
    assert words[1][0].endswith(RIGHT)


def test_nothing_but_the_warning_depends_on_the_check() -> None:
    ends = []
    for check in ("warn", "off"):
        torch.manual_seed(3)
        model, own = tagger(), torch.Generator().manual_seed(4)

        def loss(model: nn.Module, batch: Any, own: torch.Generator = own) -> Tensor:
            return token_loss(model, batch) + 0.0 * (random.random() + torch.rand((), generator=own))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, loss, micro_batch=4, precision="bf16", check=check)
        random.seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [accumulator.step(rows(*UNEVEN)).loss for _ in range(3)]
        generators = RngState(generators=[own]).digest()
        ends.append((losses, state_digest(model, optimizer), model.calls, generators))
    assert ends[0] == ends[1]


@pytest.mark.filterwarnings("ignore::autoaccum.AccumulationWarning")
def test_strict_raises_before_the_update() -> None:
    model = tagger()
    accumulator = accumulator_of(model, check="strict")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WorkloadError) as raised:
        accumulator.step(rows(*UNEVEN))
    assert str(raised.value).endswith(RIGHT)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def padded(model: nn.Module, batch: Any) -> Tensor:
    """A mean over a mask of floats; what is left out counts in neither."""
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1].clamp(min=0), reduction="none")
    return torch.as_tensor((losses * batch[2]).sum() / batch[2].sum())


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"tokens": token_loss(model, batch), "size": model(batch[0]).square().mean()}


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model, (batch[0].where(torch.rand(batch[0].shape) < 0.8, 0), batch[1]))


def in_training_only(model: nn.Module, batch: Any) -> Tensor:
    if not model.training:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return token_loss(model, batch)


RIGHT_ONES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens": (token_loss, {"weight": tokens}),
    "a mask": (padded, {"weight": lambda batch: batch[2].sum()}),
    "terms": (two_terms, {"weight": lambda batch: {"tokens": tokens(batch), "size": len(batch[0])}}),
    "a sum": (lambda model, batch: token_loss(model, batch) * tokens(batch), {"reduction": "sum"}),
    "random numbers": (noisy, {"weight": tokens}),
    "out of memory": (in_training_only, {"weight": tokens}),
}


@pytest.mark.parametrize("name", RIGHT_ONES)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 6])
def test_a_right_weighting_raises_no_alarm(name: str, micro_batch: int) -> None:
    loss, options = RIGHT_ONES[name]
    model = tagger().eval().float()
    batch = (*rows(*UNEVEN), (torch.arange(LENGTH) < torch.tensor(UNEVEN)[:, None]).float())
    model.train()
    model.norm.eval()
    accumulator = accumulator_of(model, loss, micro_batch, check="strict", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="forward (changes|updates)")
        for _ in range(3):
            assert accumulator.step(batch).updated


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tokens": (token_loss, {}, "return (batch[1] != -100).sum()"),
    "a mask": (padded, {}, "return batch[2].sum()"),
    "a sum": (lambda model, batch: token_loss(model, batch) * tokens(batch), {}, 'write reduction = "sum"'),
    "no sum": (token_loss, {"reduction": "sum"}, "return (batch[1] != -100).sum()"),
    "terms": (two_terms, {}, '{"tokens": (batch[1] != -100).sum(), "size": len(batch[0])}'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_weighting_is_named(name: str) -> None:
    loss, options, advice = WRONG[name]
    words, labels = rows(*UNEVEN)
    batch = (words, words if name == "a mask" else labels, (labels != -100).double())
    (message, *_) = said(lambda: accumulator_of(tagger(), loss, **options).step(batch))
    assert message.endswith(advice)


def test_weights_of_classes_show_once_there_are_several_classes() -> None:
    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 20.0]))

    model, inputs = nn.Linear(5, 2), torch.randn(8, 5)
    accumulator = accumulator_of(model, weighted, micro_batch=4)
    assert not said(lambda: accumulator.step((inputs, torch.zeros(8, dtype=torch.long))))
    assert said(lambda: accumulator.step((inputs, torch.tensor([0, 1] * 4))))


def test_micro_batches_of_one_sample_are_joined() -> None:
    accumulator = accumulator_of(tagger(), micro_batch=1)
    (message,) = said(lambda: accumulator.step_parts([rows(length) for length in UNEVEN]))
    assert message.endswith(RIGHT)


def test_it_runs_no_more_than_a_micro_batch_and_ends() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]) if model.training else -len(batch[0]))
        return token_loss(model, batch)

    accumulator = accumulator_of(tagger(), loss, 3, weight=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            accumulator.step(rows(*UNEVEN))
    assert sizes == [-3, -1, -2, 3, 3, 2, 3, 3, 2]


def strict_on_ranks() -> str:
    accumulator = accumulator_of(tagger(), check="strict")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            accumulator.step(rows(*UNEVEN))
        except (WorkloadError, RankFailedError) as error:
            return str(error)
    return ""


def test_a_strict_check_ends_the_step_on_all_ranks() -> None:
    first, second = on_ranks(2, strict_on_ranks, timeout=60)
    assert first.endswith(RIGHT)
    assert second.startswith("rank 0 failed: WorkloadError: the weighting does not match the loss")


def step_on_ranks(talks: bool) -> list[str]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if talks:
            dist.all_reduce(torch.ones(1))
        return token_loss(model, batch)

    accumulator = accumulator_of(tagger(), loss)
    batch = rows(*UNEVEN) if dist.get_rank() == 0 else rows(*EVEN)
    return said(lambda: [accumulator.step(batch) for _ in range(2)])


@pytest.mark.parametrize("talks", [False, True])
def test_of_several_ranks_the_first_compares_by_itself(talks: bool) -> None:
    first, second = on_ranks(2, step_on_ranks, talks, timeout=60)
    assert second == []
    (message,) = first
    assert message.startswith("batch[1] has ignored entries" if talks else "the weighting does not match the loss")
    assert message.endswith(RIGHT)
