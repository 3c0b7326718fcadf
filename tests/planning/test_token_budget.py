"""Budgets of tokens: the shapes that take the most memory, the search for the largest budget, and what it is worth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from factories import codes
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import faults
from planned import plan_on
from scripted_device import ScriptedDevice

from autoaccum.accumulation.packing import pack, part_cost
from autoaccum.devices.base import Sizes, Trial
from autoaccum.errors import UsageError
from autoaccum.planning.plan_events import ValueTried
from autoaccum.planning.plan_record import Plan, TokenBudget
from autoaccum.planning.token_budget import expected_samples, extreme_shapes
from autoaccum.spec import SampleLengths
from autoaccum.units import MIB

LENGTHS = tuple(sorted((max(1, 4096 // (index + 1)) for index in range(300)), reverse=True))


def known(read: tuple[int, ...], **facts: Any) -> SampleLengths:
    return SampleLengths(
        read=tuple(sorted(read, reverse=True)), buildable=tuple(sorted({*read}, reverse=True)), **facts
    )


class TokenDevice(ScriptedDevice):
    """A device whose trials take memory by samples and lengths, by a rule in MiB, of 1 GiB."""

    def __init__(self, rule: Callable[[int, int], float], lengths: SampleLengths | None, **facts: Any) -> None:
        super().__init__(sample_lengths=lengths, **facts)
        self.rule, self.longest = rule, 1 if lengths is None else lengths.read[0]
        self.shapes: list[list[tuple[int, int]]] = []

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        trial = super().trial(parts, lengths=lengths, fresh=fresh, limit_seconds=limit_seconds)
        shapes = [*zip(parts, lengths or [self.longest] * len(parts), strict=True)]
        if lengths:
            self.shapes.append(shapes)
        needs = 100 + max(self.rule(*shape) for shape in shapes)
        peak = int(needs * MIB) if needs <= 1024 else None
        return dataclasses.replace(
            trial, outcome="ok" if peak else "oom", phase=None if peak else "backward", peak_reserved_bytes=peak
        )


def by_tokens(samples: int, length: int) -> float:
    return samples * length / 20


def by_scores(samples: int, length: int) -> float:
    return samples * length / 50 + samples * length**2 / 50_000


def by_samples(samples: int, length: int) -> float:
    return samples * (2 + length / 40)


def largest_that_fits(device: TokenDevice, lengths: SampleLengths, most: int) -> int:
    """Return by brute force the largest budget of which every shape fits."""

    def fits(budget: int) -> bool:
        shapes = ((min(most, max(1, budget // length)), length) for length in lengths.read)
        return all(100 + device.rule(*shape) <= 1024 for shape in shapes)

    return max(budget for budget in range(1, 80_000, 8) if fits(budget))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(1, 20_000),
    st.integers(1, 300),
    st.booleans(),
    st.tuples(*[st.floats(0, 1) for _ in range(3)]),
)
def test_no_shape_within_a_budget_takes_more_than_the_extreme_ones(
    read: list[int], budget: int, most: int, is_whole: bool, shares: tuple[float, float, float]
) -> None:
    lengths = known(tuple(read), is_whole=is_whole)

    def memory(samples: int, length: int) -> float:
        one, two, three = shares
        return one * samples + two * samples * length / 100 + three * samples * length**2 / 100_000

    extremes = extreme_shapes(lengths, budget, most)
    assert [length for _, length in extremes] == sorted({length for _, length in extremes}, reverse=True)
    for samples, length in extremes:
        assert samples == 1 or samples * length <= budget
        assert samples <= most
    bound = max(memory(*shape) for shape in extremes)
    packed = pack(read, budget)
    for part in packed:
        shape = min(len(part), most), max(read[index] for index in part)
        assert memory(*shape) <= 1.02 * bound


def test_a_length_of_which_no_batch_can_be_made_is_replaced_by_the_next_longer_one() -> None:
    lengths = SampleLengths(read=(100, 99, 51, 50, 10), buildable=(100, 51, 10))
    assert extreme_shapes(lengths, 102, 64) == [(1, 100), (2, 51), (10, 10)]
    assert extreme_shapes(dataclasses.replace(lengths, read=(99, 50, 10)), 102, 64) == [(1, 100), (2, 51), (10, 10)]


def test_as_many_of_the_shortest_are_tried_as_the_data_has() -> None:
    assert extreme_shapes(known((100, 10, 10, 10)), 200, 64)[-1] == (20, 10)
    assert extreme_shapes(known((100, 10, 10, 10), is_whole=True), 200, 64)[-1] == (3, 10)


@pytest.mark.parametrize("rule", [by_tokens, by_scores, by_samples])
def test_the_largest_budget_is_found_of_which_every_shape_fits(rule: Callable[[int, int], float]) -> None:
    lengths, heard = known(LENGTHS), list[Any]()
    device = TokenDevice(rule, lengths)
    plan = plan_on(device, 256, on_event=heard.append)
    tokens = plan.tokens
    assert tokens is not None
    expected = largest_that_fits(device, lengths, 256)
    assert expected * 0.95 - tokens.search.step <= tokens.micro_tokens <= expected + 8
    assert tokens.micro_tokens == tokens.search.value
    assert len(tokens.search.tried) <= 12
    proof = tokens.search.proof
    assert proof.fresh
    assert proof.lengths[-2] == LENGTHS[0], "freed blocks of the longest samples fit all others"
    assert proof.parts[0] == proof.parts[-1], "memory peaks where the gradients of others exist"
    told = [event for event in heard if isinstance(event, ValueTried) and event.trial is not None]
    assert [event.value for event in told] == [tried.value for tried in tokens.search.tried]


def test_what_a_budget_is_worth_is_counted_on_the_data() -> None:
    plan = plan_on(TokenDevice(by_tokens, known(LENGTHS)), 64)
    tokens = plan.tokens
    assert tokens is not None
    assert (tokens.lengths.least, tokens.lengths.most) == (LENGTHS[-1], LENGTHS[0])
    assert 1 <= tokens.samples.least <= tokens.samples.median <= tokens.samples.most <= 64
    assert tokens.costs.most <= tokens.micro_tokens
    assert 1 <= tokens.iter_sizes.least <= tokens.iter_sizes.most
    assert tokens.padding_saved > 0.3
    assert tokens.speed_up > 1.5
    packed = dataclasses.replace(known(LENGTHS), padding="none")
    dense = plan_on(TokenDevice(by_tokens, packed), 64).tokens
    assert dense is not None
    assert (dense.padding, dense.padding_saved) == ("none", 0.0)


def test_an_update_that_fits_at_once_ends_the_search_with_one_budget() -> None:
    plan = plan_on(TokenDevice(lambda *_: 1.0, known((8, 4, 2))), 16)
    assert plan.tokens is not None
    assert {tried.value for tried in plan.tokens.search.tried} == {plan.tokens.micro_tokens} == {16 * 8}


def test_a_plan_with_a_budget_is_the_same_after_json() -> None:
    plan = plan_on(TokenDevice(by_scores, known(LENGTHS)), 64)
    again = Plan.from_json(plan.to_json())
    assert isinstance(again.tokens, TokenBudget)
    assert (again, again.digest()) == (plan, plan.digest())
    changed = json.loads(plan.to_json())
    changed["tokens"]["micro_tokens"] += 1
    with pytest.raises(Exception, match="micro_tokens is"):
        Plan.from_json(json.dumps(changed))


@pytest.mark.parametrize("facts", [{"whole_batch": "lockstep"}, {"multiple_of": 2}])
def test_where_no_budget_can_be_found_a_warning_says_why(facts: dict[str, Any]) -> None:
    plan = plan_on(TokenDevice(by_tokens, known((64, 32)), **facts), 64)
    assert plan.tokens is None
    assert "no_token_budget" in codes(plan.warnings)


def test_a_workload_without_lengths_has_no_budget() -> None:
    plan = plan_on(TokenDevice(by_tokens, None), 64)
    assert plan.tokens is None
    assert "no_token_budget" not in codes(plan.warnings)


def test_a_limit_on_trials_ends_the_search_with_the_largest_that_ran() -> None:
    tokens = plan_on(TokenDevice(by_samples, known(LENGTHS)), 64, max_trials=4).tokens
    assert tokens is not None
    assert tokens.search.stopped == "trials"
    assert part_cost([LENGTHS[0]]) >= tokens.search.low


def test_a_budget_that_is_the_whole_update_has_room_for_its_longest_sample() -> None:
    tokens = plan_on(TokenDevice(lambda *_: 1, known((199, 1))), 1).tokens
    assert tokens is not None
    assert tokens.micro_tokens == 199


def test_an_update_of_tokens_has_as_many_samples_as_reach_them_on_average() -> None:
    assert expected_samples(known((30, 20, 10)), 100) == 5
    assert expected_samples(known((30, 20, 10)), 101) == 6
    with pytest.raises(UsageError, match="100 tokens, and what a sample costs is not known: write def length"):
        expected_samples(None, 100)


WORKLOAD = """
import random, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)

    def forward(self, ids, mask):
        return self.head(self.layer(self.embed(ids), src_key_padding_mask=mask == 0))

model = Net
LENGTHS = [max(2, min(256, int(random.Random(index).lognormvariate(3.5, 0.8)))) for index in range(400)]

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((LENGTHS[index],), index % 100)

dataset = Texts()

def length(sample):
    return len(sample)

def collate(samples):
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(sample)] for sample in samples])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

def loss(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

def weight(batch):
    return (batch["labels"] != -100).sum()
"""


@pytest.mark.parametrize(
    "where",
    [["--memory", "14MiB"], ["--gpu", "1GiB", "--memory", "50MiB"]],
    ids=["cpu", "simulated"],
)
def test_a_command_plans_by_tokens(tmp_path: Path, where: list[str], command: Command) -> None:
    (tmp_path / "texts.py").write_text(WORKLOAD)
    done = command(tmp_path, "plan", "texts.py", "--target-tokens", "2048", "--max-trials", "3", "--json", *where)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert faults("plan", json.loads(done.stdout)) == []
    tokens = plan.tokens
    assert tokens is not None
    assert (tokens.target_tokens, tokens.padding) == (2048, "longest")
    assert plan.target_batch * 45 == pytest.approx(2048, rel=0.3), "the median of the lengths is about 33"
    assert (tokens.lengths.most, plan.iter_size > 1) == (256, True)
    proof = tokens.search.proof
    assert (proof.ran, proof.fresh) == (True, True)
    assert {256} < {*proof.lengths}
