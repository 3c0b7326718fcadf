"""A fake CUDA step allocates the same storages, in the same order, as a real step on the CPU.

This holds where the kernels are the same: attention, dropout, batch norm and RNNs have tests of their own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from made_up_card import make_card
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the outputs of real operators to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recorder.record_outputs(out)
        return out


class Block(nn.Module):
    def __init__(self, width: int, *, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.run(x)
        return torch.as_tensor(checkpoint(self.run, x, use_reentrant=self.checkpointed))

    def run(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + scores @ v
        return torch.as_tensor(x + self.down(F.gelu(self.up(self.norm(x)))))


def transformer(**options: Any) -> nn.Module:
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Block(16, **options), Block(16, **options), head)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 10))


def half() -> nn.Module:
    return mlp().bfloat16()


def hooked() -> nn.Module:
    def add_squares(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.add_(weight.grad.square())

    model = mlp()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        weight.register_post_accumulate_grad_hook(add_squares)  # type: ignore[no-untyped-call]
    return model


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(y.view(-1, 4)).flatten(0, 1), y)


def several(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    return torch.as_tensor(F.cross_entropy(outputs, y) + 0.1 * outputs.square().mean() + outputs.abs().sum() / 7)


def reading(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The shapes and the branches of this step follow from its values, which change with the weights."""
    outputs = model(x)
    wrong = (outputs.argmax(-1) != y).nonzero()[:, 0]
    hard, labels = outputs.index_select(0, wrong), y[wrong]
    limit = outputs.detach().abs().mean().item()
    large = outputs.flatten().index_select(0, (outputs.flatten() > limit).nonzero()[:, 0])
    groups = (outputs.detach() * 4).round().unique()
    repeated = hard.repeat_interleave(labels % 3, 0)
    if float(hard.detach().std()) > limit:
        repeated = repeated * torch.ones_like(groups)[:, None, None]
    return torch.as_tensor(F.cross_entropy(hard, labels) + large.square().mean() + repeated.sum() / 100)


CASES: dict[str, tuple[Callable[[], nn.Module], Step, tuple[int, ...]]] = {
    "mlp": (mlp, classes, (12,)),
    "hooks of weights": (hooked, classes, (12,)),
    "half": (half, classes, (12,)),
    "several losses": (mlp, several, (12,)),
    "values": (mlp, reading, (12,)),
    "conv": (conv_net, classes, (3, 8, 8)),
    "transformer": (transformer, tokens, (1,)),
    "checkpointed": (lambda: transformer(checkpointed=False), tokens, (1,)),
    "checkpointed, reentrant": (lambda: transformer(checkpointed=True), tokens, (1,)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, foreach=False),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Step, x: Tensor, y: Tensor) -> None:
    for _ in range(2):
        for _ in range(2):
            torch.autograd.backward(loss(model, x, y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def record(name: str, optimizer: str, recorder: Recorder, device: str) -> list[tuple[int, int]]:
    """The storages that came (number, bytes) and went (number, 0) in two updates, apart from what was there before.

    On the CPU, AdamW's count of steps (a float32 scalar here) is one more storage, which a card has not; on a card,
    kernels take memory beside their tensors, which has its own tests.
    """
    build, loss, shape = CASES[name]
    torch.manual_seed(0)
    model = build().to(device)
    if name != "half":
        model.double()
    x, y = torch.randn(8, *shape).to(next(model.parameters())), torch.randint(0, 10, (8,)).to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    gc.collect()
    recorder.begin(lambda: "forward")
    before, counts = len(recorder.sizes), 4 if name != "half" else 0
    train(model, made, loss, x, y)
    names: dict[int, int] = {}
    found = []
    for event in recorder.events:
        block = max(event, ~event)
        size = recorder.sizes[block]
        if block < before or size == counts or not isinstance(size, int):
            continue
        found.append((names.setdefault(block, len(names)), size if event >= 0 else 0))
    return found


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "SGD" if name == "half" else "AdamW") for name in CASES] + [("mlp", "SGD"), ("mlp", "Adagrad")],
)
def test_a_fake_step_has_the_events_of_a_real_one(name: str, optimizer: str) -> None:
    """Scalars of the model in bf16 are as large as AdamW's counts."""
    real, fake = Recorder("cpu"), Recorder()
    with Watching(real):
        expected = record(name, optimizer, real, "cpu")
    with simulate(make_card(), fake) as mode:
        if name == "values":
            mode.values.computed = True
        found = record(name, optimizer, fake, "cuda")
    assert found == expected
    assert len(found) > 100
