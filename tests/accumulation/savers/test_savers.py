"""Each saver, and each pair, gives the gradient and the update that an Accumulator without any has."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from small_blocks import ResidualBlock
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.accumulation.host_storage import OffloadedActivations
from autoaccum.errors import UsageError
from autoaccum.spec import OFFLOADS

WORDS = ("recompute", *OFFLOADS)
EACH = [*((word,) for word in WORDS), WORDS]
PAIRS = [*EACH, *itertools.combinations(WORDS, 2)]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(16, dropout=0.2) for _ in range(4)))
        self.head = nn.Linear(16, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x))


@pytest.fixture(autouse=True)
def _offload_from_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy what waits in host memory although it is there."""
    monkeypatch.setattr(OffloadedActivations, "host", "elsewhere")
    monkeypatch.setattr("autoaccum.accumulation.host_storage._LEAST_BYTES", 1)


def train(model: nn.Module, *words: str, updates: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    """Train a copy of the model; return the last result, the weights and the optimizer's state."""
    model = copy.deepcopy(model)
    dtype = next(model.parameters()).dtype
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    options = {"micro_batch": 4, "criterion": nn.CrossEntropyLoss(), **options}
    accumulator = Accumulator(model, optimizer, savers=words, **options)
    torch.manual_seed(5)
    for _ in range(updates):
        result = accumulator.step((torch.randn(10, 16).to(dtype), torch.randint(0, 3, (10,))))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
    return result, model.state_dict(), optimizer.state_dict()


def compare(outputs: Tensor, targets: Tensor) -> Tensor:
    similar = nn.functional.normalize(outputs) @ nn.functional.normalize(outputs).T
    return nn.functional.cross_entropy(5 * similar, targets)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.5}, {"criterion": compare, "coupled": True}], ids=["loss", "coupled"]
)
@pytest.mark.parametrize("words", PAIRS, ids="+".join)
def test_the_update_is_the_same_with_dropout(words: tuple[str, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    result, weights, state = train(model, *words, **options)
    expected, own_weights, own_state = train(model, **options)
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)
    assert (result.grad_norm or 0.0) == pytest.approx(expected.grad_norm or 0.0, abs=1e-12)
    torch.testing.assert_close(weights, own_weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state["state"], own_state["state"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("words", [("offload-gradients",), WORDS], ids="+".join)
def test_half_precision_is_summed_and_updated_in_float32(words: tuple[str, ...]) -> None:
    """Updates too small for bf16 add up, where the optimizer has copies in float32; both sum gradients in float32."""
    torch.manual_seed(0)
    model = Net(torch.bfloat16)
    single = copy.deepcopy(model).float()
    _, weights, state = train(model, *words, optimizer=torch.optim.SGD, updates=12, micro_batch=2)
    _, exact, _ = train(single, updates=12, optimizer=torch.optim.SGD, micro_batch=2)
    assert all(value.dtype == torch.bfloat16 for value in weights.values())
    distance = max((weights[name].float() - exact[name]).abs().max().item() for name in weights)
    assert distance < (0.02 if "offload-optimizer" in words else 0.1)


def test_half_weights_that_were_loaded_meanwhile_are_taken_over() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    accumulator = Accumulator(
        model, optimizer, lambda model, x: model(x).float().sum(), micro_batch=2, savers=["offload-optimizer"]
    )
    batch = torch.ones(2, 4, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    for _ in range(10):  # One moves a weight by less than bf16 can tell.
        accumulator.step(batch)
    ten = model.weight.detach().float().clone()
    assert (ten < 1.0).all()
    model.weight.data[0].fill_(3.0)
    accumulator.step(batch)
    assert (model.weight[0] == 3.0).all()
    torch.testing.assert_close(model.weight[1:].float(), torch.full((3, 4), 1 - 11 * 2e-4), rtol=0, atol=4e-3)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))) + x


@pytest.mark.filterwarnings("ignore::autoaccum.accumulation.step_result.AccumulationWarning")
@pytest.mark.parametrize("mode", ["micro", "running", "frozen"])
def test_recomputed_batchnorms_count_once(mode: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Normed() for _ in range(3)), nn.Linear(16, 3)).double()
    _, weights, _ = train(model, "recompute", batchnorm=mode)
    _, expected, _ = train(model, batchnorm=mode)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)


def test_blocks_are_recomputed_evenly_and_only_within_a_step() -> None:
    model, calls = Net(), list[int]()
    for number, block in enumerate(model.blocks):
        assert isinstance(block, ResidualBlock)
        block.up.register_forward_hook(lambda *_, number=number: calls.append(number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, savers="recompute=2")
    accumulator.step((torch.randn(4, 16).double(), torch.zeros(4, dtype=torch.int64)))
    assert calls == [0, 1, 2, 3, 2, 0]
    calls.clear()
    model(torch.randn(4, 16).double()).sum().backward()
    assert calls == [0, 1, 2, 3]
    assert all("forward" not in vars(block) for block in model.blocks)


@pytest.mark.parametrize("words", EACH, ids="+".join)
def test_an_error_within_the_update_leaves_everything_as_it_was(words: tuple[str, ...]) -> None:
    """In the first update; weights are written to the device when the optimizer has done."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fails = [True]

    def fail(*_: Any) -> None:
        if fails.pop():
            raise MemoryError("out of host memory")

    optimizer.register_step_post_hook(fail)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, savers=words, recover=False)
    before, batch = copy.deepcopy(model.state_dict()), (torch.randn(10, 16).double(), torch.randint(0, 3, (10,)))
    random = torch.get_rng_state()
    with pytest.raises(MemoryError):
        accumulator.step(batch)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
    fails.append(False)
    accumulator.step(batch)
    torch.set_rng_state(random)
    other = Net()
    other.load_state_dict(before)
    torch.set_rng_state(random)
    Accumulator(other, torch.optim.AdamW(other.parameters(), lr=0.01), nn.CrossEntropyLoss(), micro_batch=4).step(batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("checkpoint", "'checkpoint' is no saver"),
        (["recompute=0"], "'recompute=0' is no saver"),
        (["recompute=5"], "5 blocks are to be recomputed, and Net has 4"),
        ([3], "3 is no saver"),
        (3, "savers is 3"),
    ],
)
def test_wrong_savers_are_refused(words: Any, message: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=message):
        Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, savers=words)


def test_compiled_blocks_are_refused() -> None:
    whole, inner = torch.compile(Net(), backend="eager"), Net()
    inner.blocks.compile(backend="eager")
    models: list[tuple[Any, str]] = [(whole, "_orig_mod.blocks.0"), (inner, "blocks.0")]
    for model, name in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=f"torch.compile has made {name} one with what is around it"):
            Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, savers=["recompute"])


def test_exact_batchnorm_cannot_be_recomputed() -> None:
    model = nn.Sequential(Normed(), Normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match='batchnorm is "exact", and the recomputed 0 has BatchNorms'):
        Accumulator(model, optimizer, nn.MSELoss(), micro_batch=4, savers=["recompute"], batchnorm="exact")


@pytest.mark.parametrize("words", EACH, ids="+".join)
def test_mixed_precision_with_a_scaler(words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Net(torch.float32)
    result, weights, _ = train(model, *words, precision="fp16", clip_norm=1.0)
    expected, own, _ = train(model, precision="fp16", clip_norm=1.0)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    torch.testing.assert_close(weights, own, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:out of memory")
def test_nothing_that_waits_outlives_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a tensor fetched ahead, whose memory a repeated batch would lack."""
    made: list[weakref.ref[OffloadedActivations]] = []
    init = OffloadedActivations.__init__

    def note(self: OffloadedActivations, kept: Any) -> None:
        made.append(weakref.ref(self))
        init(self, kept)

    monkeypatch.setattr(OffloadedActivations, "__init__", note)
    model, backwards = Net(), itertools.count()

    def fail(gradient: Tensor) -> None:
        if next(backwards) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.head.bias.register_hook(fail)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    savers = ["offload-activations"]
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, savers=savers)
    batch = (torch.randn(4, 16).double(), torch.zeros(4, dtype=torch.int64))
    assert [accumulator.step(batch).retries for _ in range(2)] == [0, 1]
    gc.collect()
    assert [one() for one in made] == [None, None, None]
