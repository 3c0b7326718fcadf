"""PyTorch's compiler in a child that simulates a card; not in a copied one, which has imported it."""

from __future__ import annotations

from pathlib import Path

from asking import make_settings

from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer

COMPILING = """
import sys
import torch

def model():
    assert made or COMPILER not in sys.modules, "imported with PyTorch, or by an operator"
    return torch.nn.Linear(8, 4)

def batch(size):
    return torch.randn(size, 8)

def optimizer(parameters):
    made_one = torch.optim.SGD(parameters)
    assert made or COMPILER not in sys.modules, "imported by an optimizer"
    made.append(True)
    return made_one

def loss(model, batch):
    import torch._dynamo
    import torch._dynamo.utils
    assert torch.cuda.is_available() and batch.is_cuda
    assert torch._dynamo is sys.modules[COMPILER]
    assert torch._dynamo.config is sys.modules[COMPILER + ".config"]
    return torch.compiler.disable(model)(batch).square().mean()

made, COMPILER = [], "torch._dynamo"
"""


def test_the_compiler_is_imported_where_it_is_used_and_traces_stay_equal(tmp_path: Path) -> None:
    (tmp_path / "compiling.py").write_text(COMPILING)
    tracer = Tracer(make_settings(str(tmp_path / "compiling.py"), 64), find_card("rtx4090"))
    try:
        first, second, third = (tracer.call(TraceParts(parts=parts)) for parts in ((2, 2), (3, 3), (5, 5)))
    finally:
        tracer.close()
    assert first.events == second.events == third.events
    assert first.phases == second.phases
