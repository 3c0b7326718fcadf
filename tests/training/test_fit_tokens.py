"""Training by a token budget is training by count: other micro-batches, the same updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import assert_close, make_plan, make_token_budget
from on_ranks import on_ranks
from small_data import StatefulSamples, drawn_row, opened, windows_of
from small_fit import Interrupted, after_update, fit, interrupt_after, of_kind
from state_digests import digest as digest_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autoaccum
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.fit_report import fit_blocks, headline
from autoaccum.sources.token_costs import TokenCosts
from autoaccum.training.fit_events import Started, Updated

LENGTHS = [7, 1, 30, 4, 4, 12, 9, 2, 22, 3, 5, 5, 8, 16, 2, 6, 11, 3, 40, 7, 1, 9, 13]
TARGET, MICRO_TOKENS, EPOCHS = 8, 32, 2

pytestmark = pytest.mark.filterwarnings("ignore:a sample of .* tokens is over the token budget")


class Texts(Dataset[Any]):
    """Tokens with labels; all values are drawn anew each time if it is augmented."""

    def __init__(self, *, augmented: bool = False) -> None:
        self.augmented, self.read = augmented, list[int]()

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        draw = None if self.augmented else torch.Generator().manual_seed(index)
        ids = torch.randint(1, 20, (LENGTHS[index],), generator=draw)
        return {"input_ids": ids, "labels": ids % 5}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Texts()[index] for index in range(len(LENGTHS)))


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(name: str, value: int) -> Tensor:
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


class Reader(nn.Module):
    """Reads tokens and the mean of all in their sample; notes the shapes of its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(20, 6), nn.Linear(12, 5)
        self.shapes: list[tuple[int, ...]] = []
        self.most = 10**9

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.shapes.append(tuple(ids.shape))
        if ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        read = self.embed(ids) * mask[:, :, None]
        mean = read.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        scores: Tensor = self.score(torch.cat([read, mean.expand_as(read)], -1))
        return scores


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def weight(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Reader().double()


def workload(**fields: Any) -> autoaccum.Workload:
    settings: dict[str, Any] = {"model": build, "loss": loss, "weight": weight, "dataset": Texts(), "collate": collate}
    settings |= {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.05), "lengths": LENGTHS}
    return autoaccum.Workload(**settings | fields)


def plan_of(micro_tokens: int = MICRO_TOKENS, target_tokens: int | None = None, target: int = TARGET) -> Plan:
    budget = make_token_budget(micro_tokens, target_tokens=target_tokens)
    return dataclasses.replace(make_plan(target, 2, workload={}), tokens=budget)


def batches(size: int) -> list[dict[str, Tensor]]:
    rows = [Texts()[index] for index in range(len(LENGTHS))]
    return [collate(rows[first : first + size]) for first in range(0, len(rows), size)]


KINDS: dict[str, dict[str, Any]] = {
    "dataset": {},
    "measured": {"lengths": None, "length": lambda sample: len(sample["input_ids"])},
    "measured in batches": {"lengths": lambda batch: batch["attention_mask"].sum(1)},
    "loader": {"dataset": DataLoader(Texts(), batch_size=3, shuffle=True, collate_fn=collate)},
    "stream": {"dataset": Stream(), "lengths": None, "length": lambda sample: len(sample["input_ids"])},
    "batches": {"dataset": batches(5), "lengths": None},
    "large batches": {"dataset": batches(20), "lengths": None},
}


def train(kind: str = "dataset", **options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    fields = dict(KINDS[kind])
    data = fields.pop("dataset", Texts(augmented=bool(options.pop("augmented", False))))
    return fit(workload(**fields), data, **{"epochs": EPOCHS, "target_batch": TARGET} | options)


def cases(kinds: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return each kind of data with each kind of target that it may have."""
    of_samples = [kind for kind in kinds if not isinstance(KINDS[kind].get("dataset"), list)]
    by_tokens: dict[str, Any] = {"target_batch": None, "target_tokens": 60}
    return [*((kind, {"target_batch": TARGET}) for kind in kinds), *((kind, by_tokens) for kind in of_samples)]


def shapes_of(result: autoaccum.FitResult) -> list[tuple[int, ...]]:
    """Return the shapes of all micro-batches that were run."""
    model: Any = result.model
    shapes: list[tuple[int, ...]] = model.shapes
    return shapes


@pytest.mark.parametrize(("kind", "target"), cases(KINDS))
def test_it_trains_as_by_count_in_other_micro_batches_within_the_budget(kind: str, target: dict[str, Any]) -> None:
    by_count, counted = train(kind, **target, micro_batch=2)
    plan = plan_of(target_tokens=target.get("target_tokens"))
    by_tokens, events = train(kind, **target, plan=plan)
    assert_close(by_tokens.model, by_count.model)
    assert [event.samples for event in of_kind(Updated, events)] == [
        event.samples for event in of_kind(Updated, counted)
    ]
    shapes = shapes_of(by_tokens)
    assert all(count == 1 or count * length <= MICRO_TOKENS for count, length in shapes)
    if "batches" not in kind:
        assert sum(count * length for count, length in shapes) < 0.9 * sum(
            count * length for count, length in shapes_of(by_count)
        )
    assert by_tokens.samples == EPOCHS * len(LENGTHS)


def test_an_update_has_as_many_samples_as_reach_the_tokens() -> None:
    reader = opened(Texts(), None, target_tokens=60, lengths=LENGTHS, collate=collate)
    tokens = [
        [int(part["attention_mask"][row].sum()) for part in window.parts for row in range(len(part["labels"]))]
        for _, window in windows_of(reader, range(1))
    ]
    assert all(sum(lengths) >= 60 > sum(lengths) - lengths[-1] for lengths in tokens[:-1])
    assert sum(map(len, tokens)) == len(LENGTHS)


@pytest.mark.parametrize("target_tokens", [None, 60])
def test_a_sample_keeps_its_random_numbers_in_whatever_micro_batch_it_is(target_tokens: int | None) -> None:
    class Rows(Dataset[Tensor]):
        def __len__(self) -> int:
            return len(LENGTHS)

        def __getitem__(self, index: int) -> Tensor:
            return drawn_row(index)

    costs = TokenCosts(length=lambda row: LENGTHS[int(row[0])])
    target = TARGET if target_tokens is None else None
    seen = []
    for micro_tokens in (None, 16, 50):
        reader = opened(Rows(), target, target_tokens=target_tokens, costs=costs)
        reader.micro_tokens = micro_tokens
        rows = [torch.cat(window.parts) for _, window in windows_of(reader, range(2))]
        seen.append([sorted(window.tolist()) for window in rows])
    assert seen[0] == seen[1] == seen[2]


def test_samples_without_known_lengths_are_measured_once() -> None:
    data = Texts()
    fit(workload(**KINDS["measured"]), data, target_batch=TARGET, epochs=3, plan=plan_of())
    assert sorted(data.read) == sorted([*range(len(LENGTHS))] * 4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("measured", {}),
        ("loader", {"target_tokens": 60}),
        ("dataset", {"workers": 2}),
        ("measured in batches", {"target_tokens": 60}),
        ("kept", {}),
        ("stream", {"target_tokens": 60}),
        ("batches", {}),
    ],
)
def test_a_run_stopped_anywhere_ends_where_it_would_have_ended(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    options = {"augmented": True, "plan": plan_of(target_tokens=options.get("target_tokens")), **options}
    options["target_batch"] = None if "target_tokens" in options else TARGET
    KINDS["kept"] = KINDS["stream"] | {"dataset": StatefulSamples(Texts(augmented=True))}

    def digest(result: autoaccum.FitResult) -> str:
        return digest_of([result.model.state_dict(), result.optimizer.state_dict()])

    whole, _ = train(kind, **options)
    for stop in (1, 2, whole.updates // 2 + 1):
        with pytest.raises(Interrupted):
            train(kind, **options, run_dir=tmp_path, callbacks=[interrupt_after(stop)])
    resumed, _ = train(kind, **options, run_dir=tmp_path)
    assert digest(resumed) == digest(whole)
    assert (resumed.updates, resumed.samples) == (whole.updates, EPOCHS * len(LENGTHS))


def test_the_budget_falls_when_memory_runs_out_and_rises_again_also_after_a_stop(tmp_path: Path) -> None:
    events: list[Any] = []

    def crowd(event: Any) -> None:
        events.append(event)
        if isinstance(event, Started):
            models.append(event.model)
        if isinstance(event, Updated):
            models[-1].most = 17 if 2 <= event.update < 6 else 10**9
            if event.update == 10 and len(models) == 1:
                raise KeyboardInterrupt

    models: list[Any] = []
    options: dict[str, Any] = {"plan": plan_of(), "run_dir": tmp_path, "callbacks": [crowd], "epochs": None}
    options |= {"steps": 50, "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        short(**options)
    result, _ = short(**options)
    started = of_kind(Started, events)
    assert started[0].micro_tokens == result.micro_tokens == MICRO_TOKENS
    assert 8 <= started[1].micro_tokens < MICRO_TOKENS
    assert {event.micro_batch for event in started} == {2}
    assert result.oom_retries > 0
    assert_close(result.model, short(steps=50, epochs=None, micro_batch=8)[0].model)


def test_a_budget_that_ended_a_run_is_lower_at_the_next_start(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path, "plan": plan_of(), "epochs": None}
    short(**options, steps=1)
    (tmp_path / "ceiling.json").write_text('{"micro_tokens": 9}')
    lowered, _ = short(**options, steps=2)
    assert (lowered.micro_tokens, lowered.micro_batch, lowered.plan) == (9, 2, None)
    assert all(rows == 1 or rows * length <= 9 for rows, length in shapes_of(lowered))
    (tmp_path / "ceiling.json").unlink()
    options["plan"] = None
    assert short(**options, steps=3)[0].micro_tokens == 9


def short(**options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    """Train on samples of at most eight tokens."""
    places = [at for at, length in enumerate(LENGTHS) if length <= 8]
    data = torch.utils.data.Subset(Texts(), places)
    settings: dict[str, Any] = {"target_batch": TARGET, **options}
    return fit(workload(lengths=[LENGTHS[at] for at in places]), data, **settings)


def test_lines_say_tokens() -> None:
    result, events = train(target_batch=None, target_tokens=60, plan=plan_of(target_tokens=60), epochs=1)
    (started,) = of_kind(Started, events)
    assert headline(started).endswith("60 tokens per update, in micro-batches of up to 32 padded tokens")
    assert started.updates is None
    for micro_tokens, line in ((32, "32 padded tokens"), (16, "lowered to 16 padded tokens (32 planned)")):
        facts: Any = fit_blocks(dataclasses.replace(result, micro_tokens=micro_tokens), command=[])[0]
        assert line in [str(text) for name, text in facts.rows if name == "micro-batch"]


def on_rank(kind: str, target: dict[str, Any], plan: Plan) -> Any:
    result, _ = train(kind, **target, plan=plan)
    return result.model.state_dict(), [rows * length for rows, length in shapes_of(result)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "target"), cases(["dataset", "stream", "batches"]))
def test_ranks_share_updates_by_tokens(kind: str, target: dict[str, Any]) -> None:
    target_tokens = target.get("target_tokens")
    alone, _ = train(kind, **target, plan=plan_of(target_tokens=target_tokens))
    plan = plan_of(target_tokens=target_tokens)
    plan = dataclasses.replace(make_plan(TARGET, 2, workload={}, world_size=2), tokens=plan.tokens)
    (first, one), (second, two) = on_ranks(2, on_rank, kind, target, plan)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-10, atol=1e-10)
        assert torch.equal(first[name], second[name])
    if kind != "batches":
        assert max(sum(one), sum(two)) < 0.65 * (sum(one) + sum(two))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_tokens": 60}, "both target_batch and target_tokens are given"),
        ({"target_batch": None, "plan": None}, "no target"),
        ({"target_tokens": 60, "target_batch": None}, "for updates of 8 samples; here is updates of 60 tokens"),
        (
            {"target_tokens": 1000, "target_batch": None, "plan": plan_of(target_tokens=1000)},
            "has 220 tokens, fewer than one update .1,000.: use --target-tokens 220 or less",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(**{"plan": plan_of(), **options})


def test_updates_of_tokens_are_not_cut_from_batches() -> None:
    with pytest.raises(
        UsageError, match="target_tokens is 60, and a list of batches has no single samples: give target"
    ):
        train("batches", target_batch=None, target_tokens=60, micro_batch=2)


def test_updates_of_tokens_cannot_be_multiples() -> None:
    with pytest.raises(UsageError, match="updates of 60 tokens have any number of samples, not multiples of 2"):
        fit(workload(multiple_of=2), target_batch=None, target_tokens=60, steps=1, micro_batch=2)


def test_lengths_of_other_samples_are_refused() -> None:
    with pytest.raises(WorkloadError, match="there are 5 lengths, and the dataset has 23 samples"):
        fit(workload(lengths=[1] * 5), target_batch=TARGET, steps=1, plan=plan_of())


def test_updates_of_other_tokens_are_another_training(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_batch": None, "run_dir": tmp_path}
    with pytest.raises(Interrupted):
        train(**options, target_tokens=60, plan=plan_of(target_tokens=60), callbacks=[interrupt_after(1)])
    train(**options, target_tokens=60, plan=plan_of(16, target_tokens=60), callbacks=[after_update(2, lambda: True)])
    with pytest.raises(UsageError, match="target tokens was 60, is 61"):
        train(**options, target_tokens=61, plan=plan_of(target_tokens=61))
