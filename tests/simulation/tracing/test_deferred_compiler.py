"""PyTorch's compiler in a process that simulates a card: left out until something asks for a part of it."""

import subprocess
import sys

_SIMULATED = """
import gc, sys, weakref
import torch
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.tracing.simulation import simulate

def load_part(weight):
    held = weight * 2
    import torch._dynamo.utils as utils
    assert utils.counters is torch._dynamo.output_graph.counters and utils.__spec__.origin == utils.__file__
    return weakref.ref(held)

SimulatedChild.prepare()
with simulate(find_card("rtx4090")):
    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    torch.compiler.disable(lambda: (weight @ weight).sum().backward())()
    torch.optim.AdamW([weight]).step()
    print("torch._dynamo.eval_frame" in sys.modules, torch._dynamo.config.suppress_errors)
    gc.disable()
    print(load_part(weight)() is None)
    print("torch._dynamo.eval_frame" in sys.modules, torch.ones(2, device="cuda").device)
print(hasattr(torch._dynamo, "nothing"), torch.compile(torch.neg, backend="eager")(torch.ones(1)).item())
"""


_STAR = """
from autoaccum.simulation.tracing.deferred_compiler import defer_compiler

defer_compiler()
from torch._dynamo import *
print(optimize.__module__)
"""


def test_all_names_of_the_deferred_compiler_can_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _STAR], capture_output=True, text=True, check=False)
    assert done.stdout == "torch._dynamo.eval_frame\n", done.stderr


def test_a_simulated_step_leaves_the_compiler_out_until_something_asks_for_a_part_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _SIMULATED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["False False", "True", "True cuda:0", "False -1.0"], done.stderr
