"""Values that stay known on the card, and what is said of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.simulation import simulate

IDS = torch.tensor([[5, 3, 0, 2], [1, 0, 0, 7], [4, 4, 4, 4]])


def written(ids: Tensor) -> Tensor:
    copy = ids.clone()
    row = copy[0]
    copy[:, 1:3] = 9
    row.add_(row)
    copy.T[2].copy_(ids[:, 0][:3])
    return copy


def counted(ids: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.long, device=ids.device)
    for _ in range(2000):
        count += 1
    return count


def written_by_lists(ids: Tensor) -> Tensor:
    copy = ids.clone()
    copy[:, [3, 1]] = 9
    copy[[2, 0], range(2)] = ids[[0, 1], (2, 3)]
    return copy


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda ids: (ids != 0).cumsum(-1) * (ids > 0),
    "fractions": lambda ids: (1 - (ids == 0).float()) * -1e4,
    "triangle": lambda ids: torch.ones(4, 4, dtype=torch.bool, device=ids.device).tril() & (ids[:, None] > 0),
    "views": lambda ids: ids.T[1:].reshape(1, 3, 3).flip(-1),
    "writing": written,
    "rows by a list of truths": lambda ids: ids[[True, False, True]],
    "writing by lists": written_by_lists,
    "a mask of fractions": lambda ids: torch.ones(3, 4, device=ids.device) * (torch.eye(3, 4).to(ids.device) == 0),
    "what is added to scores": lambda ids: (
        torch.ones(3, 3).tril().log().to(ids.device) == torch.full((3, 3), -torch.inf, device=ids.device).triu(1)
    ),
    "a counter": counted,
    "nonzero": lambda ids: (ids == 4).nonzero(),
    "rows by a mask": lambda ids: ids[ids > 1],
    "writing by a mask": lambda ids: ids.clone().index_put_((ids > 1,), ids[ids > 1] * 2),
    "writing one number by a mask": lambda ids: ids.masked_fill(ids > 3, -100),
    "repeated": lambda ids: torch.repeat_interleave(ids[0], ids[0]),
    "unique": lambda ids: torch.unique(ids, return_inverse=True)[1],
    "split": lambda ids: torch.cat(torch.split(ids.flatten(), [int(n) for n in ids[2, :3]])),
    "a range of a value": lambda ids: torch.arange(int(ids.max()), device=ids.device)[: ids[0, 1]],
}


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_a_real_run(name: str, mode: FakeCudaMode) -> None:
    real, fake = SAME[name](IDS), SAME[name](IDS.to("cuda"))
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "cuda")
    assert fake.tolist() == real.tolist()
    assert (fake.cpu().numpy() == real.numpy()).all()
    assert not mode.checks


@pytest.mark.parametrize("mask", ["torch.ones(n, 6000)", "(torch.rand(n, 6000) > -1).float()"])
def test_a_large_mask_of_the_batch_is_known_as_a_small_one_is(mask: str, simulated: Callable[[str], Any]) -> None:
    lines = f"""
def model(): return nn.Linear(8, 4)
def batch(n): return torch.randn(n, 8), {mask}
del criterion
def loss(m, b):
    x = m(b[0]).mean()
    return x if (b[1] == 1).all() else torch.cat([x[None]] * 99).sum()
"""
    ask = simulated(lines)
    traces = [ask(TraceParts(parts=(n, n))) for n in (2, 3, 5)]
    assert traces[0].events == traces[1].events == traces[2].events


HEAD = """
import math
def model(): return nn.Linear(8, 4)
del criterion
def loss(m, b):
    x, y = m(b[0].requires_grad_()), b[1]
"""
PASSED = {
    "not finite": "if not torch.isfinite(x).all(): raise ValueError",
    "a count of nan": "bad = torch.isnan(x).sum().item()\nif bad > 0:\n    print(bad)",
    "finite, not to be raised for": "if not torch.isfinite(x).all():\n    x = x.clamp(-1, 1)",
}
POLICY = "policy = torch.distributions.Normal(x, x.exp())\nx = policy.log_prob(policy.sample())"


def workload(lines: str) -> str:
    return HEAD + indent(lines, "    ") + "\n    return F.cross_entropy(x, y) if x.dim() > 1 else x.mean()\n"


@pytest.fixture(autouse=True)
def validated() -> Iterator[None]:
    """Have distributions check their arguments, as in a new process: torch.compile in an earlier test ends that."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", PASSED)
def test_a_check_is_taken_as_passed(name: str, simulated: Callable[[str], Any]) -> None:
    reply = simulated(workload(PASSED[name]))(Inspect())
    assert not isinstance(reply, Failure), reply
    assert {note.code for note in reply.notes} == {"check_assumed"}
    assert all("model.py:1" in note.facts["place"] for note in reply.notes)


def test_distributions_do_not_check_their_arguments(simulated: Callable[[str], Any]) -> None:
    assert not isinstance(simulated(workload(POLICY))(Inspect()), Failure)


def test_checks_of_what_is_known_are_not_passed(simulated: Callable[[str], Any]) -> None:
    failure = simulated(workload("if y.max() >= 2 or y.min() < 9:\n    raise ValueError('labels')"))(Inspect())
    assert "ValueError: labels" in failure.message


LAYERS = "nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))"
TABLE = "table = torch.tensor([1.0, 2.0, 0.5, 3.0])\n"
ATTRIBUTE = f"""
del criterion
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.criterion = {LAYERS}, nn.CrossEntropyLoss(weight=table.clone())
    def forward(self, x, y):
        return self.criterion(self.layers(x), y)
model = M
def loss(model, batch):
    return model(*batch) + F.cross_entropy(model.layers(batch[0]), batch[1], weight=table.to(batch[0].device))
def weight(batch): return table[batch[1]].sum()
"""
WEIGHTED = {
    "a table on the card": f"model = {LAYERS}\ncriterion = nn.CrossEntropyLoss(weight=table.cuda())",
    "a moved criterion, smoothed": f"model = {LAYERS}\n"
    "criterion = nn.CrossEntropyLoss(weight=table, label_smoothing=0.1, ignore_index=2).to('cuda')",
    "a criterion of the model": ATTRIBUTE,
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_counted_and_no_trace_leaves_a_criterion_on_the_card(
    simulated: Callable[..., Any], name: str
) -> None:
    ask = simulated(TABLE + WEIGHTED[name])
    assert not isinstance(seen := ask(Inspect()), Failure), seen
    two, five = ask(TraceParts(parts=(2, 2))), ask(TraceParts(parts=(5, 5)))
    assert two.events == five.events
    assert two.phases == five.phases


def test_a_card_gives_back_what_it_was_given_until_that_is_written_to() -> None:
    with simulate(find_card("rtx3090")):
        table = torch.tensor([1.0, 2.0])
        moved = table.cuda()
        table.zero_()
        assert moved.cpu().tolist() == [1.0, 2.0]
        assert moved.to("cpu", torch.float64).dtype == torch.float64
        moved.mul_(2)
        with pytest.raises(Exception, match="a value is read"):
            moved.cpu().tolist()
