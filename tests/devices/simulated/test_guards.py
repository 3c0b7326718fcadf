"""Checks that only raise are passed on a card that computes nothing, and noted; other questions are refused by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any

import pytest
from torch.distributions import Distribution

HEAD = """
import math
def model(): return nn.Linear(8, 4)
del criterion
def loss(m, b):
    x, y = m(b[0].requires_grad_()), b[1]
"""
PASSED = {
    "not finite": "if not torch.isfinite(x).all(): raise ValueError",
    "any nan": "if x.isnan().any().item() or torch.isinf(x).any():\n    raise ValueError(f'{x}')",
    "a count of nan": "bad = torch.isnan(x).sum().item()\nif bad > 0:\n    print(bad)",
    "finite, not to be raised for": "if not torch.isfinite(x).all():\n    x = x.clamp(-1, 1)",
    "finite as a number": "if not math.isfinite(x.sum().item()):\n    raise ValueError",
    "assert": "assert (x.abs() < 1e6).all(), 'large'",
    "assert of a number": "assert x.max().item() < 1e6 and 0 < x.std()",
    "assert of a chain": "assert -9 < x.min() <= 9",
    "comparison": "if x.max() >= 3 or not (x > -3).all(): raise ValueError",
    "comparison with a name": "n = 5\nif int(x.argmax()) >= n:\n    message = 'x'\n    raise ValueError(message)",
    "constant on the left": "if 0 > x.sum().item(): raise ValueError",
    "equal to a constant": "if x.argmax().item() != 3: raise ValueError",
    "else": "if (x < 9).all():\n    pass\nelse:\n    raise ValueError",
    "of torch": "torch._check_tensor_all(x < 9)\ntorch._assert((x < 9).all(), 'large')",
    "allclose": "assert torch.allclose(x, x + 1) and not torch.equal(x, x + 1)",
    "all of some": "if any(each.sum() > 9 for each in x): raise ValueError",
    "validated arguments": "x = torch.distributions.Categorical(logits=x).probs",
    "a policy": "policy = torch.distributions.Normal(x, x.exp())\nx = policy.log_prob(policy.sample())",
    "an action": "policy = torch.distributions.Categorical(logits=x)\nx = policy.log_prob(policy.sample())",
}
REFUSED = {
    "a branch": ("if x.mean() > 0:\n    x = x * 2", "model.py:18 (`if x.mean() > 0:`)"),
    "a branch beside a check": (
        "if x.mean() > 0:\n    x = x * 2\nelse:\n    assert x.sum() < 9",
        "model.py:18 (`if x.mean() > 0:`)",
    ),
    "what is raised for": ("if abs(x.sum().item() - 1) > 3:\n    raise ValueError", "model.py:18"),
    "equal to something": ("if x.sum().item() != y.numel():\n    raise ValueError", "model.py:18"),
    "a loop": ("while x.sum() > 9:\n    raise ValueError", "model.py:18"),
    "a number": ("x = x * x.sum().item()", "model.py:18"),
}


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
    reply = simulated(workload(PASSED[name]))("inspect")
    assert "failure" not in reply, reply["failure"]
    notes = reply["inspection"]["notes"]
    assert notes
    assert all("model.py:1" in note and note.endswith(" was taken as passed") for note in notes)
    assert len(set(notes)) == len(notes)


def test_a_note_names_the_line_of_the_library_and_the_users(simulated: Callable[[str], Any]) -> None:
    notes = simulated(workload(PASSED["validated arguments"]))("inspect")["inspection"]["notes"]
    assert len(notes) == 1
    assert "a check at torch/distributions/distribution.py:" in notes[0]
    assert ", for model.py:18 was taken as passed" in notes[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_more_is_refused(name: str, simulated: Callable[[str], Any]) -> None:
    lines, where = REFUSED[name]
    failure = simulated(workload(lines))("inspect")["failure"]
    for words in ("a value is read of a tensor of shape ()", where, "a simulated card computes no values"):
        assert words in failure["message"]


def test_checks_of_what_is_known_are_not_passed(simulated: Callable[[str], Any]) -> None:
    failure = simulated(workload("if y.max() >= 2 or y.min() < 9:\n    raise ValueError('labels')"))("inspect")
    assert "ValueError: labels" in failure["failure"]["message"]
