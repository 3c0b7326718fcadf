"""The emitted file holds no more at once than the Accumulator, with which its micro-batch was proved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.sources.workload import Workload

TARGET, CEILING = 30, 10


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storages that were created within and alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tensors_of((args, list((kwargs or {}).values())))}
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            if id(storage) not in given and storage.data_ptr() not in self.alive:
                self.alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.alive.values()))
        return out


def tensors_of(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from tensors_of(child)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("as_criterion", [True, False])
def test_peaks(precision: Any, as_criterion: bool, emit: Any) -> None:
    loss = {"criterion": nn.MSELoss()} if as_criterion else {"loss": lambda m, b: nn.functional.mse_loss(m(b[0]), b[1])}
    work = Workload(
        model=wide,
        batch=lambda n: (torch.randn(n, 64), torch.randn(n, 64)),
        precision=precision,
        **loss,
    )
    module = emit(work, target=TARGET, ceiling=CEILING)
    batch = work.build_batch(TARGET)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    named = {"scaler": scaler} if precision == "fp16" else {}

    def peak(train: Callable[[], object], model: nn.Module) -> int:
        """Measure a second update: the first makes optimizer state, and the Accumulator keeps a copy for it."""
        train()
        model.zero_grad()
        seen = PeakBytes()
        with seen:
            train()
        return seen.most

    model = work.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    given = work.criterion if as_criterion else work.loss
    emitted = peak(lambda: module.train_step(model, optimizer, given, batch, clip_norm=1.0, **named), model)
    other = work.build_model()
    accumulator = Accumulator(
        other,
        torch.optim.AdamW(other.parameters()),
        work.objective,
        micro_batch=CEILING,
        precision=precision,
        clip_norm=1.0,
        scaler=scaler if precision == "fp16" else None,
    )
    proved = peak(lambda: accumulator.step(batch), other)
    assert 0.9 * proved <= emitted <= 1.01 * proved
