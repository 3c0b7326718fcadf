"""Live objects and a Workload made in code are planned for a card that is not there, as the same in a file."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import LanguageModel, token_loss
from state_digests import state_digest
from torch import nn

import autoaccum


def model() -> LanguageModel:
    net = LanguageModel(256)
    net.head = nn.Linear(256, 1000, bias=False)
    net.embed = nn.Embedding(1000, 256)
    net.head.weight = net.embed.weight
    return net


def batch(size: int) -> Any:
    return torch.randint(0, 1000, (size, 32)), torch.randint(0, 1000, (size, 32))


def optimizer(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1.0, momentum=0.9)


FILE = "\n".join(
    (
        "import torch\nfrom factories import LanguageModel\nfrom factories import token_loss as loss",
        "from torch import nn\nfrom typing import Any",
        *(inspect.getsource(part) for part in (model, batch, optimizer)),
    )
)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_what_code_holds_is_predicted_as_its_file_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    asked: dict[str, Any] = {"target_batch": 512, "gpu": "rtx3090", "memory": "256MiB"}
    made = autoaccum.plan(tmp_path / "net.py", **asked)
    assert 1 < made.micro_batch < 512, "the budget binds"
    net = model()
    given, sample = optimizer(net.parameters()), batch(3)
    before = state_digest(net, given)
    live = autoaccum.plan(model=net, batch=sample, loss=token_loss, optimizer=given, explain=True, **asked)
    assert (state_digest(net, given), net.head.weight is net.embed.weight) == (before, True)
    workload = autoaccum.Workload(model=model, batch=batch, loss=token_loss, optimizer=optimizer)
    assert live.explanation is not None
    for plan in (live, autoaccum.plan(workload, **asked)):
        assert (plan.kind, plan.workload.optimizer) == ("predicted", "SGD")
        for name in ("micro_batch", "peak_bytes", "min_budget_bytes"):
            assert getattr(plan, name) == getattr(made, name), name
        assert plan.workload.parameters == made.workload.parameters
