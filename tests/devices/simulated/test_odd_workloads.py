"""Workloads as people write them, on a card that is not there: what runs, and what is refused by which words."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent, indent
from typing import Any

import pytest

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_record import Inspect


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
    "an instance on the host": "model = nn.Sequential(nn.Linear(8, 3000), nn.ReLU(), nn.Linear(3000, 4))",
    "batch norm": "def model(): return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))",
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
    "complex": module(
        "return (torch.fft.fft(x.to(torch.complex64)) @ self.w).abs()",
        "self.w = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))",
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
    "checkpointing": module("return checkpoint(self.deep, x, use_reentrant=False)", f"self.deep = {MLP}"),
    "checkpointing, reentrant": module(
        "return checkpoint(self.deep, x.requires_grad_(), use_reentrant=True)", f"self.deep = {MLP}"
    ),
    "saved on the host": module(
        """
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return self.deep(x)
        """,
        f"self.deep = {MLP}",
    ),
    "fp16": f"precision = 'fp16'\ndef model(): return {MLP}",
    "bf16 parameters": f"def model(): return {MLP}.to(torch.bfloat16)\n"
    "def batch(n): return torch.randn(n, 8).bfloat16(), torch.randint(0, 4, (n,))",
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
    "an average of the weights": module(
        """
        with torch.no_grad():
            for mean, value in zip(self.mean.parameters(), self.layer.parameters()):
                mean.lerp_(value, 0.1)
        return self.layer(x)
        """,
        "self.mean = copy.deepcopy(self.layer).requires_grad_(False)",
    ),
    "several losses": f"def model(): return {MLP}\ndel criterion\n"
    "def loss(m, b): y = m(b[0]); return {'a': F.cross_entropy(y, b[1]), 'b': y.square().mean()}",
    "dict batches": module("return self.layer(x)") + "del criterion\n"
    "def batch(n): return {'x': torch.randn(n, 8), 'y': torch.randint(0, 4, (n,))}\n"
    "def loss(m, b): return F.cross_entropy(m(b['x']), b['y'])",
    "a recurrent net": "class M(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.lstm, self.head = nn.LSTM(1, 6, 2, batch_first=True, dropout=0.1), nn.Linear(6, 4)\n"
    "    def forward(self, x): return self.head(self.lstm(x[..., None])[0][:, -1])\n"
    "model = M",
    "tied": module("return self.layer(self.back(self.layer(x)))", "self.back = nn.Linear(4, 8); self.back.bias = None"),
    "a checkpoint read onto the card": CHECKPOINT + "torch.load(file, map_location='cuda')); return m",
    "a checkpoint read to the host": CHECKPOINT + "torch.load(file)); return m",
    "a checkpoint of a lazy model": "import io\ndef model():\n    m, file = nn.Linear(8, 9000), io.BytesIO()\n"
    "    torch.save(m.state_dict(), file)\n    file.seek(0)\n    m.load_state_dict(torch.load(file))\n    return m",
    "types of old": module(
        """
        assert x.type(torch.float64).dtype == torch.float64
        return self.layer(x + torch.ones(8).type_as(x))
        """
    ),
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
    "products of groups": module(
        """
        rows = torch.full((2,), len(x), dtype=torch.int32, device=x.device)
        made = F.grouped_mm(x, self.experts, offs=rows)
        return (made + F.grouped_mm(x.half(), self.experts.half(), offs=rows))[:, :4]
        """,
        "self.experts = nn.Parameter(torch.randn(2, 8, 8))",
    ),
    "frozen": f"def model(): m = {MLP}; m[0].requires_grad_(False); return m",
}

COMPUTES = "a simulated card computes no values"
REFUSED = {
    "item": (
        module("y = self.layer(x)\nif y.sum().item() > 0:\n    return y\nreturn -y"),
        ["a value is read from a tensor of shape ()", "model.py:19 (`if y.sum().item() > 0:`)", COMPUTES, "--device"],
    ),
    "truth": (module("return x if (x > 0).any() else -x"), ["model.py:18", COMPUTES]),
    "mask": (module("y = self.layer(x)\nreturn y + y[y > 0].sum()"), ["nonzero", "model.py:19", COMPUTES]),
    "numpy": (module("y = self.layer(x)\ny.detach().cpu().numpy()\nreturn y"), ["shape (2, 4)", "model.py:19"]),
    "tolist": (module("y = self.layer(x)\ny.tolist()\nreturn y"), ["shape (2, 4)", "model.py:19", COMPUTES]),
    "another card": (module("return self.layer(x.to('cuda:1'))"), ["put on cuda:1", "one card", "model.py:18"]),
    "another card by index": (module("torch.cuda.set_device(1)\nreturn self.layer(x)"), ["cuda:1 is used", "cuda:0"]),
    "quantised": (
        module("return self.layer(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize())"),
        ["cannot be simulated", "model.py:18", "--device"],
    ),
    "a custom operator": (
        '@torch.library.custom_op("tests_of_autoaccum::twice", mutates_args=())\n'
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n" + module("return self.layer(twice(x))"),
        ["twice", "register_fake", "model.py:21"],
    ),
    "an address": (module("x.data_ptr()\nreturn self.layer(x)"), ["the address of a tensor", "model.py:18"]),
    "momentum of sparse gradients": (
        "class M(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.e = nn.Embedding(9, 4, sparse=True)\n"
        "    def forward(self, x): return self.e(x[:, 0].long() * 0)\n"
        "model = M\ndef optimizer(p): return torch.optim.SGD(p, momentum=0.9)",
        ["of a sparse gradient is not simulated", "SparseAdam, or SGD or Adagrad without momentum"],
    ),
    "a batch on the card": (
        f"def model(): return {MLP}\ndef batch(n): return torch.randn(n, 8).cuda(), torch.randint(0, 4, (n,)).cuda()",
        ["batch(2) is on the card", "make the batch on the CPU"],
    ),
    "a lazy module": (
        "def model(): return nn.Sequential(nn.LazyLinear(4))",
        ["before it has a shape", "run one sample through"],
    ),
    "no parameters": ("def model(): return nn.Flatten()", ["none of the 0 parameters of Flatten is trainable"]),
    "a bug of theirs": (module("return self.layer(x[:, :7])"), ["RuntimeError", "7"]),
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_line(name: str, simulated: Callable[[str], Any]) -> None:
    lines, words = REFUSED[name]
    failure = simulated(lines)(Inspect())
    assert (failure.outcome, failure.blames) == ("error", "user")
    for word in words:
        assert word in failure.message
    assert (failure.traceback is not None) == (name == "a bug of theirs"), "the others are told by their line"
    assert "autoaccum/" not in (failure.traceback or "")


@pytest.mark.parametrize(
    "lines",
    [
        f"def model(): return torch.compile({MLP})",
        module("return self.run(x)") + "M.run = torch.compile(fullgraph=True)(lambda self, x: self.layer(x))",
        f"def model(): m = {MLP}; m[0] = torch.compile(m[0]); return m",
        f"def model(): return {MLP}\ndel criterion\n"
        "compiled = torch.compile(F.cross_entropy)\ndef loss(m, b): return compiled(m(b[0]), b[1])",
    ],
    ids=["function", "decorator", "submodule", "loss"],
)
def test_a_compiled_model_is_predicted_by_its_eager_step(lines: str, simulated: Callable[[str], Any]) -> None:
    inspection = simulated(lines)(Inspect())
    assert any("eager step" in warning for warning in inspection.cautions)


@pytest.mark.parametrize(
    "lines",
    [
        f"@torch.compile\ndef unused(x): return x\ndef model(): return {MLP}",
        f"@torch.compile\ndef crop(x): return x[:, :8]\ndef model(): return {MLP}\n"
        "def batch(n): return crop(torch.randn(n, 9)), torch.randint(0, 4, (n,))",
    ],
    ids=["a function nobody calls", "a function of the batch"],
)
def test_what_is_compiled_beside_the_step_is_no_compiled_model(lines: str, simulated: Callable[[str], Any]) -> None:
    assert simulated(lines)(Inspect()).cautions == ()
