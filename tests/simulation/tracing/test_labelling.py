"""Labels of blocks: which module runs, and who holds what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WIDTH, DEPTH = 256, 6
WEIGHT = 4 * WIDTH * WIDTH
ENDS = 4 * (8 * WIDTH + WIDTH + 4 * WIDTH + 4)
PARAMETERS = DEPTH * WEIGHT + ENDS
NET = f"""
class Block(nn.Sequential):
    pass
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, {WIDTH}), nn.Linear({WIDTH}, 4)
        self.deep = nn.Sequential(*(self.block() for _ in range({DEPTH})))
    def block(self):
        return Block(nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.Tanh())
    def forward(self, x):
        return self.last(self.run(self.first(x)))
    def run(self, x):
        return self.deep(x)
def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
model = Net
"""
"""Lines of a workload file: a deep net whose bytes can be counted by hand, to be changed by further lines."""

HEAD = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sinh(x)
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.cosh(ctx.saved_tensors[0])
class Own(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)
class Inner(nn.Module):
    def forward(self, x):
        return torch.exp(x)
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.own = Inner(), Own()
    def forward(self, x):
        return torch.tanh(self.own(self.inner(torch.sigmoid(x))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.linear = Outer(), nn.Linear(8, 4)
        self.other_name = self.outer
    def forward(self, x):
        return self.linear(self.run(self.linear.weight.sum() * x))
    def run(self, x):
        return self.outer(x)
model = Net
"""
FORWARD = {
    "aten.sigmoid": "outer",
    "aten.exp": "outer.inner",
    "aten.sinh": "outer.own",
    "aten.tanh": "outer",
    "aten.addmm": "linear",
    "aten.sum": "",
}
BACKWARD = {
    "aten.sigmoid_backward": "outer",
    "aten.cosh": "outer.own",
    "aten.tanh_backward": "outer",
    "aten.nll_loss_backward": "",
    "aten._log_softmax_backward_data": "",
    "aten.mm": "linear",
}


@pytest.mark.parametrize(
    ("run", "roles"),
    [
        ("", [("aten.exp", "plain")]),
        *(
            (
                f"Net.run = lambda net, x: checkpoint(net.outer, x, use_reentrant={reentrant})\n",
                [("aten.exp", "plain"), ("aten.exp", "recomputed")],
            )
            for reentrant in (False, True)
        ),
    ],
    ids=["plain", "checkpointed", "checkpointed-reentrant"],
)
def test_an_operator_runs_for_the_innermost_module(
    explained: Callable[..., Any], run: str, roles: list[tuple[str, str]]
) -> None:
    found = explained(HEAD + run)
    ran = {(origin.op, origin.role) for origin in found.labelled.origins}
    assert sorted(one for one in ran if one[0] == "aten.exp") == roles
    assert {role for op, role in ran if op in ("aten.cosh", "aten.tanh_backward")} == {"plain"}
    operators: dict[str, set[str]] = {}
    for origin in found.labelled.origins:
        operators.setdefault(origin.op, set()).add(found.path(origin.module))
    for op, path in {**FORWARD, **BACKWARD}.items():
        if op != "aten.sum":  # A gradient of a bias is one, too.
            assert operators[op] == {path}, op
    assert "" in operators["aten.sum"]
    assert "Net" in {found.labelled.modules[origin.module].kind for origin in found.labelled.origins}


SAMPLES = 64
ACTIVATION = 4 * SAMPLES * WIDTH
INPUTS = SAMPLES * (4 * 8 + 8)
LOGITS, SCALAR = 4 * SAMPLES * 4, 4
LOSS = LOGITS + 4 * SCALAR
"""What the loss leaves for its backward: log-probabilities, the sum of the weights, the loss, its share, a copy."""
FIRST = SCALAR
"""The copy of the first micro-batch's loss, which is yet to be read."""


@pytest.fixture
def held(explained: Callable[..., Any]) -> Callable[..., dict[str, int]]:
    """From lines after `NET` to what is held, by category, when the last backward begins, without the workspace."""

    def at_the_end_of_forward(lines: str = "", precision: str | None = None) -> dict[str, int]:
        found: dict[str, int] = explained(NET + lines, precision).before("backward")
        del found["workspace"]
        return {category: held for category, held in found.items() if held}

    return at_the_end_of_forward


PLAIN = {
    "parameters": PARAMETERS,
    "gradients": PARAMETERS,
    "activations": INPUTS + (DEPTH + 1) * ACTIVATION + LOSS + FIRST,
}
"""Of two micro-batches of linear layers under SGD."""


def with_optimizer(call: str) -> str:
    return f"def optimizer(params):\n    return torch.optim.{call}\n"


@pytest.mark.parametrize(
    ("call", "states"),
    [("SGD(params, lr=0.1, momentum=0.9)", 1), ("AdamW(params)", 2), ("AdamW(params, fused=True)", 2)],
)
def test_an_optimizer_adds_its_state_and_nothing_else(held: Callable[..., Any], call: str, states: int) -> None:
    found = held(with_optimizer(call))
    state = found.pop("optimizer_state")
    steps = state - states * PARAMETERS  # Fused ones count their steps on the card: 4 bytes for each parameter.
    assert steps == (4 * (DEPTH + 4) if "fused" in call else 0)
    assert found == PLAIN


def test_what_the_loop_keeps_is_told_apart(explained: Callable[..., Any]) -> None:
    kept = explained(NET + "ema = hold_outputs = True\n")
    held = kept.before("backward")
    plain = explained(NET).before("backward")
    assert held["averages"] == PARAMETERS
    assert plain["averages"] == 0
    # When the second forward begins, what the first gave is still named: its logits and its loss.
    at = [index for index, phase in kept.labelled.trace.phases if phase == "forward"][-1]
    assert kept.breakdown.totals["outputs"][at] == LOGITS + SCALAR
    # When it is done, its own have taken their names; backward needs neither the logits nor the loss.
    assert held["outputs"] == LOGITS + SCALAR
    assert held["activations"] == plain["activations"] - SCALAR
    assert max(explained(NET).breakdown.totals["outputs"]) == 0
    owners = {
        (found := kept.breakdown.uses[block]).category: kept.path(found.module)
        for block, origin in enumerate(kept.labelled.origins)
        if origin.op == "aten.addmm" and kept.path(origin.module) == "last"
    }
    owners.pop("workspace", None)  # Of products from 2.15 on, each for itself.
    assert owners == {"outputs": "last"}
