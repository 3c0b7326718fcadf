"""Micro-batches by a token budget: the update is the padded full batch's, to 1e-10 in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from factories import make_plan, make_token_budget
from memory_errors import OutOfMemoryAt
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import Accumulator, whole_batch
from autoaccum.accumulation.packing import part_cost
from autoaccum.accumulation.step_result import AccumulationWarning, StepObserver
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.sources.workload import Workload
from autoaccum.spec import Padding

pytestmark = [
    pytest.mark.filterwarnings("ignore:a sample of"),
    pytest.mark.filterwarnings("ignore:batch.*has ignored entries"),  # Of losses that do not read them.
]
LENGTHS = (3, 9, 0, 4, 1, 9, 2, 12, 5)
BUDGET = 18
WORDS, WIDTH = 13, 5


class Reader(nn.Module):
    """A sum over earlier tokens at each token, and the mean over tokens as the embedding of a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.ran: list[tuple[int, ...]] = []

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.ran.append(tuple(ids.shape))
        seen = self.embed(ids) * mask.unsqueeze(-1)
        return torch.tanh(self.mix(seen.cumsum(1)))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.states(ids, mask))
        return logits

    def embedding(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.states(ids, mask) * mask.unsqueeze(-1)
        return functional.normalize(states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1) + 0.1, dim=-1)


def padded(lengths: Any = LENGTHS) -> dict[str, Tensor]:
    """Return samples padded to the longest one and two columns more."""
    generator = torch.Generator().manual_seed(0)
    width = max(LENGTHS) + 2
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(0, WORDS, mask.shape, generator=generator)
    scores = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "scores": scores}


def token_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    losses: Tensor = functional.cross_entropy(logits.view(-1, WORDS), batch["labels"].view(-1), reduction="none")
    return losses


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.as_tensor(token_losses(model, batch).sum() / count_labels(batch))


def token_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch).sum()


def sample_mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
    embedding = model.embedding(batch["input_ids"], batch["attention_mask"])
    return torch.as_tensor((embedding.sum(1) - batch["scores"]).square().mean())


def both(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"tokens": token_mean(model, batch), "samples": sample_mean(model, batch)}


def count_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def count_both(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"tokens": count_labels(batch), "samples": len(batch["scores"])}


def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.embedding(batch["input_ids"], batch["attention_mask"])
    return found


def contrastive(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Each sample is to be near the one with the next higher score: outputs and batch have to be in one order."""
    by_score = batch["scores"].argsort()
    targets = torch.empty_like(by_score).scatter_(0, by_score, by_score.roll(-1))
    return functional.cross_entropy(outputs @ outputs.T / 0.3, targets)


def near_all(model: Any, batch: dict[str, Tensor]) -> Tensor:
    own = embeddings(model, batch)
    return torch.as_tensor((own @ whole_batch(own).T / 0.3).logsumexp(1).mean())


LOSSES: dict[str, dict[str, Any]] = {
    "token mean": {"loss": token_mean, "weight": count_labels},
    "sum": {"loss": token_sum, "reduction": "sum"},
    "sample mean": {"loss": sample_mean},
    "terms": {"loss": both, "weight": count_both},
    "contrastive": {"outputs": embeddings, "coupled_loss": contrastive},
    "whole batch": {"loss": near_all},
}


class Rows(NamedTuple):
    """Samples one after the other, without padding."""

    rows: list[dict[str, Tensor]]


def to_rows(batch: dict[str, Tensor]) -> Rows:
    counts = batch["attention_mask"].sum(1).tolist()
    rows = [
        {name: value[index] if name == "scores" else value[index, :count] for name, value in batch.items()}
        for index, count in enumerate(counts)
    ]
    return Rows(rows)


def split_rows(batch: Rows, sizes: list[int]) -> list[Rows]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [Rows(batch.rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def pad_rows(batch: Rows) -> dict[str, Tensor]:
    def column(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in batch.rows], batch_first=True, padding_value=value)

    scores = torch.stack([row["scores"] for row in batch.rows])
    return {name: column(name, value) for name, value in PADDING.items()} | {"scores": scores}


PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}
OWN = {
    "padding": "none",
    "split": split_rows,
    "size": lambda batch: len(batch.rows),
    "lengths": lambda batch: [len(row["input_ids"]) for row in batch.rows],
}


def reading_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given[:-1], pad_rows(given[-1]))


def full_update(loss: dict[str, Any], batch: dict[str, Tensor]) -> nn.Module:
    """Return a model after one update by the gradient of the full padded batch."""
    model = Reader().double()
    if "coupled_loss" in loss:
        value = loss["coupled_loss"](loss["outputs"](model, batch), batch)
    else:
        value = loss["loss"](model, batch)
    terms = value.values() if isinstance(value, dict) else [value]
    torch.autograd.backward([*terms])
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model


def make(micro_tokens: int | None = BUDGET, **options: Any) -> tuple[Accumulator, Reader]:
    model = Reader().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Accumulator(model, optimizer, micro_tokens=micro_tokens, **({"check": "strict"} | options)), model


def assert_exact(model: nn.Module, full: nn.Module) -> None:
    before = Reader().double()
    largest = max(
        float((a - b).detach().abs().max()) for a, b in zip(before.parameters(), full.parameters(), strict=True)
    )
    for mine, theirs in zip(model.parameters(), full.parameters(), strict=True):
        assert float((mine.detach() - theirs.detach()).abs().max()) <= 1e-10 * largest


def rows_of(batch: dict[str, Tensor], *ends: int) -> list[dict[str, Tensor]]:
    """Return consecutive rows of a batch, up to each of these."""
    starts = (0, *ends)
    return [{name: value[start:end] for name, value in batch.items()} for start, end in zip(starts, ends, strict=False)]


def facts_of(caught: Iterable[warnings.WarningMessage], code: str) -> list[Any]:
    """Return the facts of the messages with this code."""
    told = [one.message.message for one in caught if isinstance(one.message, AccumulationWarning)]
    return [one.facts for one in told if one.code == code]


@pytest.mark.parametrize("parts", [False, True], ids=["step", "step_parts"])
@pytest.mark.parametrize("budget", [BUDGET, 10, 1, 1000], ids=["several", "one over budget", "single", "within"])
@pytest.mark.parametrize("name", LOSSES)
def test_padded_parts_give_the_full_batch_s_update(name: str, budget: int, parts: bool) -> None:
    loss, batch = LOSSES[name], padded()
    accumulator, model = make(budget, **loss)
    result = accumulator.step_parts(rows_of(batch, 4, 9)) if parts else accumulator.step(batch)
    assert result.samples == sum(result.micro_batches) == len(LENGTHS)
    ran = list(model.ran)
    assert_exact(model, full_update(loss, batch))
    assert all(rows == 1 or rows * width <= budget for rows, width in ran)
    assert all(width <= max(LENGTHS) for _, width in ran), "every part is trimmed"


@pytest.mark.parametrize("budget", [BUDGET, 10])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_without_padding_give_the_full_batch_s_update(name: str, budget: int) -> None:
    loss = {key: reading_rows(value) if callable(value) else value for key, value in LOSSES[name].items()}
    accumulator, model = make(budget, **loss, **OWN)
    result = accumulator.step(to_rows(padded()))
    assert_exact(model, full_update(LOSSES[name], padded()))
    ends = torch.tensor(result.micro_batches).cumsum(0).tolist()
    counts = [LENGTHS[end - size : end] for size, end in zip(result.micro_batches, ends, strict=True)]
    assert all(len(part) == 1 or part_cost(part, "none") <= budget for part in counts), "in the order of the batch"


def test_rows_without_padding_are_packed() -> None:
    """A list of samples can be taken apart, so that they need not stay in order."""

    def loss(model: Any, rows: list[dict[str, Tensor]]) -> Tensor:
        return token_mean(model, pad_rows(Rows(rows)))

    def weight(rows: list[dict[str, Tensor]]) -> int:
        return sum(len(row["labels"]) for row in rows)

    def lengths(rows: list[dict[str, Tensor]]) -> list[int]:
        return [len(row["labels"]) for row in rows]

    accumulator, model = make(16, loss=loss, weight=weight, padding="none", lengths=lengths)
    result = accumulator.step(to_rows(padded()).rows)
    assert len(result.micro_batches) == 3, "46 tokens"
    assert_exact(model, full_update(LOSSES["token mean"], padded()))


def test_a_batch_within_the_budget_keeps_its_order_and_is_trimmed() -> None:
    seen, batch = list[dict[str, Tensor]](), padded()

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        seen.append(part)
        return sample_mean(model, part)

    make(1000, loss=loss)[0].step(batch)
    [part] = seen
    assert torch.equal(part["input_ids"], batch["input_ids"][:, : max(LENGTHS)])
    assert torch.equal(part["scores"], batch["scores"])


def test_a_sample_over_the_budget_is_told_once() -> None:
    accumulator, _ = make(10, **LOSSES["token mean"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [accumulator.step(padded()) for _ in range(2)]
    assert facts_of(caught, "sample_over_budget") == [{"length": 12, "micro_tokens": 10}]
    assert {result.micro_batches for result in results} == {(1, 1, 1, 2, 2, 2)}


def test_a_loss_that_counts_the_padding_is_found() -> None:
    """Trimmed parts have less of it than the full batch."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        states: Tensor = model.states(batch["input_ids"], batch["attention_mask"])
        return states.square().mean()

    accumulator, _ = make(36, loss=loss)
    with pytest.raises(WorkloadError, match="the weighting does not match the loss"):
        accumulator.step(padded((12, 7, 3, 2, 1)))


class Recorder(StepObserver):
    def __init__(self) -> None:
        self.told = list[tuple[str, int, int]]()

    def out_of_memory(self, phase: str, micro_batch: int, next_micro_batch: int) -> None:
        self.told.append((phase, micro_batch, next_micro_batch))


@pytest.mark.parametrize("name", ["token mean", "contrastive"])
@pytest.mark.parametrize(("phase", "number"), [("batch", 25), ("forward", 5), ("backward", 5)])
def test_out_of_memory_lowers_the_budget(name: str, phase: str, number: int) -> None:
    accumulator, model = make(BUDGET, **LOSSES[name])
    batch = padded()
    with (
        OutOfMemoryAt(number, lambda: accumulator.phase == phase) as injected,
        pytest.warns(AccumulationWarning, match="out of memory") as caught,
    ):
        result = accumulator.step(batch)
    assert injected.fired
    assert result.retries == 1
    assert_exact(model, full_update(LOSSES[name], padded()))
    told = [{"phase": phase, "size": 18, "unit": "token", "lowered": 15}]
    assert facts_of(caught, "repeated_smaller") == told
    assert accumulator.micro_tokens == 15
    accumulator.micro_tokens = BUDGET
    assert accumulator.step(padded()).micro_batches == (1, 2, 2, 2, 2)


def test_the_observer_is_told_of_tokens() -> None:
    observer = Recorder()
    accumulator, _ = make(BUDGET, observer=observer, **LOSSES["token mean"])
    with OutOfMemoryAt(5, lambda: accumulator.phase == "forward"):
        accumulator.step(padded())
    assert observer.told == [("forward", 18, 15)]


def test_single_samples_cannot_be_made_smaller() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if batch["input_ids"].shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return token_mean(model, batch)

    accumulator, model = make(BUDGET, loss=loss, weight=count_labels)
    with (
        pytest.warns(AccumulationWarning, match="out of memory") as caught,
        pytest.raises(DoesNotFitError, match="not even one sample at a time fits"),
    ):
        accumulator.step(padded())
    assert [facts["size"] for facts in facts_of(caught, "repeated_smaller")] == [18, 10, 6, 2]
    assert accumulator.micro_tokens == BUDGET, "memory may come back"
    assert_exact(model, Reader().double())


def step_on_rank(name: str, rank_samples: list[int], fails: bool) -> Any:
    """Step with this rank's samples; the first rank has the smallest budget, and the second may run out of memory."""
    rank = dist.get_rank()
    end = sum(rank_samples[: rank + 1])
    accumulator, model = make(BUDGET + rank, **LOSSES[name])
    assert accumulator.micro_tokens == BUDGET
    batch = rows_of(padded(), end - rank_samples[rank], end)[-1]
    with OutOfMemoryAt(5, lambda: fails and rank == 1 and accumulator.phase == "forward"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = accumulator.step(batch)
    return model.state_dict(), result.micro_batches, result.retries, accumulator.micro_tokens


def steps_on_rank(*given: Any) -> list[Any]:
    return [step_on_rank(name, *given) for name in LOSSES]


@pytest.mark.parametrize(
    ("rank_samples", "fails", "parts"),
    [
        ([2, 7], False, [(2,), (1, 1, 2, 3)]),
        ([6, 0, 3], False, [(2, 2, 2), (), (1, 1, 1)]),
        ([2, 7], True, [(1, 1), (1, 1, 1, 1, 1, 2)]),
    ],
    ids=["2 ranks", "3 ranks, one without samples", "2 ranks, out of memory on one"],
)
def test_an_update_over_ranks_is_the_full_batch_s(rank_samples: list[int], fails: bool, parts: Any) -> None:
    seen = on_ranks(len(rank_samples), steps_on_rank, rank_samples, fails)
    for of_ranks, (name, loss) in zip(zip(*seen, strict=True), LOSSES.items(), strict=True):
        for state, *_ in of_ranks:
            model = Reader().double()
            model.load_state_dict(state)
            assert_exact(model, full_update(loss, padded()))
        assert [rank[1] for rank in of_ranks] == parts, name
        assert {rank[2:] for rank in of_ranks} == {(1, 8) if fails else (0, BUDGET)}, name


def set_apart() -> str:
    accumulator, _ = make(**LOSSES["sum"])
    accumulator.micro_tokens = 10 + dist.get_rank()
    with pytest.raises(UsageError) as refused:
        accumulator.step(padded())
    return str(refused.value)


def test_all_ranks_have_one_budget() -> None:
    assert on_ranks(2, set_apart) == ["micro_tokens differs between ranks: (10, 11): set the same on all"] * 2


def test_a_plan_with_a_budget_goes_by_tokens() -> None:
    plan = make_plan(9, 3, workload={}, tokens=make_token_budget(BUDGET, padding="none"))
    accumulator, model = make(None, plan=plan, **LOSSES["token mean"])
    assert (accumulator.micro_tokens, accumulator.micro_batch) == (BUDGET, None)
    assert accumulator.step(padded()).micro_batches == (3, 2, 4), "by the sum of lengths, without padding"
    given, _ = make(None, plan=plan, padding="longest", **LOSSES["token mean"])
    assert given.step(padded()).micro_batches == (1, 2, 2, 2, 2)


def test_a_workload_says_what_samples_cost() -> None:
    def lengths(batch: dict[str, Tensor]) -> Tensor:
        return batch["attention_mask"].sum(1)

    def trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        most = max(1, int(lengths(batch).max()))
        return {name: value if value.ndim == 1 else value[:, :most].contiguous() for name, value in batch.items()}

    workload = Workload(
        model=Reader, batch=padded, loss=token_mean, weight=count_labels, lengths=lengths, trim=trim, precision="fp32"
    )
    accumulator, model = make(spec=workload, loss=workload.objective)
    assert accumulator.step(padded()).micro_batches == (1, 2, 2, 2, 2)
    assert_exact(model, full_update(LOSSES["token mean"], padded()))
    assert all(width <= max(LENGTHS) for _, width in model.ran)


@pytest.mark.parametrize("padding", ["longest", "none"])
def test_batchnorm_by_micro_batch_is_told_as_always(padding: Padding) -> None:
    model = nn.Sequential(nn.BatchNorm1d(14), nn.Linear(14, 1)).double()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.as_tensor(
            model(functional.pad(batch["input_ids"], (0, 14 - batch["input_ids"].shape[1])).double()).mean()
        )

    options: dict[str, Any] = {"micro_tokens": 30, "padding": padding, "check": "off"}
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), loss, **options)
    with pytest.warns(AccumulationWarning, match="BatchNorm normalises by the micro-batch"):
        accumulator.step(padded((5, 5, 5, 5, 5, 5, 5, 5)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batch": 3}, "micro_batch and micro_tokens are given: give one of them"),
        ({"micro_tokens": 0}, "micro_tokens is 0: give a whole number of at least 1"),
        ({"multiple_of": 2}, "multiples of 2 samples, and a token budget has any number: give micro_batch, or"),
        ({"padding": "left"}, "there is no padding 'left'"),
        (
            {"micro_tokens": None, "micro_batch": 3, "lengths": len},
            "lengths is only used with micro_tokens: give micro_tokens",
        ),
        ({"batchnorm": "exact"}, 'batchnorm is "exact", and BatchNorm would normalise over less padding than the full'),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(**({"micro_tokens": BUDGET} | LOSSES["sum"] | options))


def test_the_number_that_counts_is_set() -> None:
    by_tokens, by_samples = make(**LOSSES["sum"])[0], make(None, micro_batch=2, **LOSSES["sum"])[0]
    assert (by_samples.micro_batch, by_samples.micro_tokens) == (2, None)
    with pytest.raises(UsageError, match="this Accumulator counts tokens: set micro_tokens"):
        by_tokens.micro_batch = 3
    with pytest.raises(UsageError, match="this Accumulator counts samples: set micro_batch"):
        by_samples.micro_tokens = 3
    with pytest.raises(UsageError, match="micro_tokens is 0"):
        by_tokens.micro_tokens = 0


def test_lengths_that_are_not_known_are_refused() -> None:
    accumulator, _ = make(loss=lambda model, batch: model(*batch).sum())
    with pytest.raises(WorkloadError, match="the tokens of a batch's samples are not known: write def lengths"):
        accumulator.step((torch.ones(4, 3), torch.ones(4, 3)))
