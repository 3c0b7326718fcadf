"""Workloads as people write them, on a card that is not there: what runs, and what is refused by which words."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent, indent
from typing import Any

import pytest
from factories import codes

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_requests import Inspect


def module(forward: str, init: str = "pass") -> str:
    """A model with one layer, more of a constructor, and a forward pass."""
    lines = [
        "class M(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.layer = nn.Linear(8, 4)",
        indent(dedent(init), "        "),
        "    def forward(self, x):",
        indent(dedent(forward), "        "),
        "model = M",
    ]
    return "\n".join(lines) + "\n"


MLP = "nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))"
CHECKPOINT = f"""
import tempfile
file = tempfile.mktemp()
torch.save({MLP}.state_dict(), file)
def model(): m = {MLP}; m.load_state_dict("""
RUNS = {
    "a factory that moves itself": f"def model(): return {MLP}.cuda()",
    "an instance on the card": f"model = {MLP}.to('cuda' if torch.cuda.is_available() else 'cpu')",
    "asks the card": module(
        """
        assert x.is_cuda and x.device.type == "cuda" and x.get_device() == 0 and not x.is_cpu and not x.is_meta
        properties = torch.cuda.get_device_properties(x.device)
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (8, 6)
        assert properties.multi_processor_count == 82 and "3090" in torch.cuda.get_device_name(0)
        free, total = torch.cuda.mem_get_info()
        assert total == properties.total_memory and free == total - torch.cuda.memory_allocated() < total
        assert torch.cuda.device_count() == 1 and torch.cuda.is_bf16_supported()
        with torch.cuda.device(x.device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        with torch.autocast("cuda", dtype=torch.float16):
            y = self.layer(x)
            assert y.dtype == torch.float16
        return y.float() + torch.zeros(4, device=torch.device("cuda", torch.cuda.current_device()))
        """
    ),
    "a custom operator with a fake": dedent(
        """
        @torch.library.custom_op("tests_of_autoaccum::thrice", mutates_args=())
        def thrice(x: torch.Tensor) -> torch.Tensor:
            return x * 3
        @thrice.register_fake
        def _(x):
            return torch.empty_like(x)
        thrice.register_autograd(lambda ctx, gradient: gradient * 3)
        """
    )
    + module("return self.layer(thrice(x))"),
    "checkpointing, reentrant": module(
        "return checkpoint(self.deep, x.requires_grad_(), use_reentrant=True)", f"self.deep = {MLP}"
    ),
    "parametrized": "from torch.nn.utils import parametrizations as p\n"
    "def model(): return nn.Sequential(p.weight_norm(nn.Linear(8, 6)), p.spectral_norm(nn.Linear(6, 4)))",
    "a constructor that reads": module(
        "return self.layer(x)",
        """
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.large = nn.Linear(300, 300)
        assert self.large.weight.abs().max().item() > 0
        """,
    ),
    "a forward that reads a constant": module(
        "return self.layer(x) + int(self.table.sum())", "self.table = torch.zeros(200, 200)"
    ),
    "a checkpoint read onto the card": CHECKPOINT + "torch.load(file, map_location='cuda')); return m",
    "a checkpoint of a lazy model": "import io\ndef model():\n    m, file = nn.Linear(8, 9000), io.BytesIO()\n"
    "    torch.save(m.state_dict(), file)\n    file.seek(0)\n    m.load_state_dict(torch.load(file))\n    return m",
    "generators": module(
        """
        own = torch.Generator(device=x.device).manual_seed(0)
        assert own.device == x.device and isinstance(torch.default_generator, torch.Generator)
        hosts = torch.Generator().manual_seed(0)
        return self.layer(x + torch.randn(8, generator=own, device=x.device) + torch.randn(8, generator=hosts).cuda())
        """
    ),
    "masks on the host": module(
        """
        mask = torch.arange(8) > 3
        y = x.clone()
        y[:, mask] = 0
        assert y[:, mask].shape == (len(x), 4)
        return self.layer(y) + y[:, mask]
        """
    ),
    "a list of numbers that are known": module(
        """
        counts = torch.arange(3, device=x.device)
        assert torch.tensor([[count, 7] for count in counts]).tolist() == [[0, 7], [1, 7], [2, 7]]
        return self.layer(x) * torch.tensor([counts.max()], device=x.device)
        """
    ),
}

COMPUTES = "a simulated card computes no values"
REFUSED = {
    "item": (
        module("y = self.layer(x)\nif y.sum().item() > 0:\n    return y\nreturn -y"),
        ["a value is read from a tensor of shape ()", "model.py:19 (`if y.sum().item() > 0:`)", COMPUTES, "--device"],
    ),
    "mask": (module("y = self.layer(x)\nreturn y + y[y > 0].sum()"), ["nonzero", "model.py:19", COMPUTES]),
    "tolist": (module("y = self.layer(x)\ny.tolist()\nreturn y"), ["shape (2, 4)", "model.py:19", COMPUTES]),
    "another card": (module("return self.layer(x.to('cuda:1'))"), ["put on cuda:1", "one card", "model.py:18"]),
    "quantised": (
        module("return self.layer(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize())"),
        ["cannot be simulated", "model.py:18", "--device"],
    ),
    "a higher-order operator": (
        "import warnings\nfrom torch.nn.attention.flex_attention import flex_attention\n"
        "warnings.simplefilter('ignore')\n"  # That it is slow without torch.compile.
        + module("q = x.reshape(len(x), 1, 2, 4)\nreturn self.layer(flex_attention(q, q, q).reshape(len(x), 8))"),
        ["flex_attention cannot be simulated", "model.py:22", "--device"],
    ),
    "a custom operator": (
        '@torch.library.custom_op("tests_of_autoaccum::twice", mutates_args=())\n'
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n" + module("return self.layer(twice(x))"),
        ["twice", "register_fake", "model.py:21"],
    ),
    "an address": (module("x.data_ptr()\nreturn self.layer(x)"), ["the address of a tensor", "model.py:18"]),
    "momentum of sparse gradients": (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = nn.Embedding(4, 4, sparse=True)\n"
        "    def forward(self, x):\n        return self.table((x[:, 0] > 0).long())\nmodel = M\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
        ["of a sparse gradient is not simulated", "take SparseAdam, or SGD or Adagrad without momentum"],
    ),
    "a batch on the card": (
        f"def model(): return {MLP}\ndef batch(n): return torch.randn(n, 8).cuda(), torch.randint(0, 4, (n,)).cuda()",
        ["batch(2) is on the card", "make the batch on the CPU"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_on_a_card_is_traced(name: str, simulated: Callable[[str], Any]) -> None:
    ask = simulated(RUNS[name])
    traced = ask(TraceParts(parts=(5, 5)))
    assert not isinstance(traced, Failure), traced
    assert len(traced.events) > 50
    if "checkpoint" in name or "recurrent" in name:
        again = ask(TraceParts(parts=(3, 3)))
        assert again.events == traced.events
        assert again.phases[0] == traced.phases[0] == (0, "model")


def test_values_of_a_checkpoint_are_those_of_its_file(simulated: Callable[[str], Any]) -> None:
    lines = CHECKPOINT + "torch.load(file)); assert torch.equal(m[0].weight, torch.load(file)['0.weight']); return m"
    assert not isinstance(simulated(lines)(Inspect()), Failure)


def test_a_model_that_a_global_keeps_is_not_there_in_the_next_trial(simulated: Callable[[str], Any]) -> None:
    ask = simulated(module("global kept\nkept = self.layer(x)\nreturn kept"))
    first, second = (ask(TraceParts(parts=(size, size))) for size in (3, 5))
    assert not isinstance(first, Failure), first
    assert first.events == second.events


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_line(name: str, simulated: Callable[[str], Any]) -> None:
    lines, words = REFUSED[name]
    failure = simulated(lines)(Inspect())
    assert (failure.outcome, failure.fault) == ("error", "user")
    for word in words:
        assert word in failure.message
    assert failure.traceback is None, "it is told by its line"


@pytest.mark.parametrize(
    "lines",
    [
        f"def model(): return torch.compile({MLP})",
        module("return self.run(x)") + "M.run = torch.compile(fullgraph=True)(lambda self, x: self.layer(x))",
    ],
    ids=["function", "decorator"],
)
def test_a_compiled_model_is_predicted_by_its_eager_step(lines: str, simulated: Callable[[str], Any]) -> None:
    inspection = simulated(lines)(Inspect())
    assert "compiled" in codes(inspection.cautions)
