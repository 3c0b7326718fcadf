"""The emitted file, imported and run: its gradient is the full batch's."""

from __future__ import annotations

import copy
import math
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from emitted_variants import plan_by_hand
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.sources.workload import Workload


class Net(nn.Module):
    """Takes its input as one tensor, as two, or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.head(torch.tanh(self.first(x if mask is None else x * mask)))


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net().double()


def x_of(size: int) -> Tensor:
    return torch.randn(size, 5, dtype=torch.float64)


def labels(size: int, ignore: int = -100) -> Tensor:
    """Two in five ignored, unevenly."""
    chosen = torch.randint(0, 3, (size,))
    return chosen.where(torch.arange(size) % 5 > 1, torch.tensor(ignore))


def real(size: int) -> tuple[Tensor, Tensor]:
    return x_of(size), torch.randn(size, 3, dtype=torch.float64)


def as_dict(size: int) -> dict[str, Any]:
    return {"x": x_of(size), "y": labels(size)}


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


CASES: dict[str, dict[str, Any]] = {
    "elements": {"batch": real, "criterion": nn.MSELoss()},
    "targets": {"batch": lambda n: (x_of(n), labels(n)), "criterion": nn.CrossEntropyLoss()},
    "targets, another ignored": {
        "batch": lambda n: (x_of(n), labels(n, 2)),
        "criterion": nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
    },
    "targets summed": {"batch": lambda n: (x_of(n), labels(n)), "criterion": nn.CrossEntropyLoss(reduction="sum")},
    "probabilities": {
        "batch": lambda n: (x_of(n), torch.softmax(real(n)[1], 1)),
        "criterion": nn.CrossEntropyLoss(),
    },
    "several inputs": {"batch": lambda n: ((x_of(n), x_of(n)), labels(n)), "criterion": nn.CrossEntropyLoss()},
    "named inputs": {"batch": lambda n: [{"x": x_of(n), "mask": x_of(n)}, labels(n)], "criterion": F.cross_entropy},
    "samples": {"batch": as_dict, "loss": lambda model, batch: model(batch["x"]).square().mean()},
    "a sum": {"batch": as_dict, "loss": lambda m, b: m(b["x"]).square().sum(), "reduction": "sum"},
    "a weight": {"batch": as_dict, "loss": token_loss, "weight": lambda batch: (batch["y"] != -100).sum()},
    "a tensor": {"batch": x_of, "loss": lambda model, batch: model(batch).square().mean()},
    "a mapping of inputs": {
        "batch": lambda n: (UserDict(x=x_of(n), mask=x_of(n)), labels(n)),
        "criterion": nn.CrossEntropyLoss(),
    },
}


def workload(case: str, **changes: Any) -> Workload:
    return Workload(**{"model": net, "name": case, **CASES[case], **changes})


def arguments(work: Workload) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the emitted function besides model, optimizer and batch."""
    function = work.loss if work.criterion is None else work.criterion
    return [function], {} if work.weight is None else {"weight": work.weight}


def full_batch(work: Workload, model: nn.Module, batch: Any) -> float:
    model.zero_grad()
    loss = torch.stack(list(work.objective.terms(model, batch).values())).sum()
    torch.autograd.backward(loss)
    return float(loss.detach())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def run(module: ModuleType, work: Workload, model: nn.Module, batch: Any, lr: float = 0.0, **options: Any) -> float:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    given, named = arguments(work)
    return float(module.train_step(model, optimizer, *given, batch, **named, **options))


def off_by(mine: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of any gradient."""
    assert len(mine) == len(wanted)
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(mine, wanted, strict=True))
    return difference / largest if difference else 0.0


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_full_batch_s(case: str, emit: Any) -> None:
    work = workload(case)
    module = emit(work, target=18, ceiling=6)

    @settings(max_examples=count_examples(12), deadline=None)
    @given(size=st.integers(1, 25), seed=st.integers(0, 99))
    def holds(size: int, seed: int) -> None:
        torch.manual_seed(seed)
        batch, model = work.build_batch(size), work.build_model()
        loss = full_batch(work, model, batch)
        if math.isnan(loss):  # all targets ignored
            before = copy.deepcopy(model)
            assert math.isnan(run(module, work, model, batch, lr=1.0))
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
            return
        wanted = gradients(model)
        assert run(module, work, model, batch) == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert off_by(gradients(model), wanted) <= 1e-10

    holds()


@given(size=st.integers(1, 500), ceiling=st.integers(1, 40))
@settings(max_examples=count_examples(60), deadline=None)
def test_parts_are_the_schedule_s(even: ModuleType, size: int, ceiling: int) -> None:
    vars(even)["MICRO_BATCH"] = ceiling
    batch = torch.arange(size), torch.arange(size)
    parts = even.cut(batch)
    assert sorted((len(x) for x, _ in parts), reverse=True) == sorted(split_evenly(size, ceiling), reverse=True)
    for column in (0, 1):
        assert torch.equal(torch.cat([part[column] for part in parts]), batch[column])


@pytest.fixture(scope="module")
def even() -> ModuleType:
    module = ModuleType("even")
    exec(emit_wrapper(plan_by_hand(workload("targets"), 18, 6)), module.__dict__)
    return module


@pytest.mark.parametrize("case", ["targets", "a weight"])
def test_a_part_without_weight_is_left_out_and_nothing_is_no_update(case: str, emit: Any) -> None:
    work = workload(case)
    module = emit(work, target=6, ceiling=2)
    model, batch = work.build_model(), work.build_batch(6)
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    y[:] = torch.tensor([0, 1, -100, -100, 2, -100])
    loss = full_batch(work, model, batch)
    wanted = gradients(model)
    assert run(module, work, model, batch) == pytest.approx(loss, rel=1e-10)
    assert off_by(gradients(model), wanted) <= 1e-10
    y[:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = copy.deepcopy(model)
    assert math.isnan(run(module, work, model, batch, optimizer=optimizer))
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("clip_norm", [1e-3, 1e9, math.inf])
def test_clips_once_what_the_optimizer_holds(emit: Any, clip_norm: float) -> None:
    work = workload("targets")
    module = emit(work)
    model, batch = work.build_model(), work.build_batch(16)
    held = list(model.parameters())[:2]
    full_batch(work, model, batch)
    torch.nn.utils.clip_grad_norm_(held, clip_norm)
    wanted = [p.grad.clone() for p in held if p.grad is not None]
    run(module, work, model, batch, optimizer=torch.optim.SGD(held, lr=0.0), clip_norm=clip_norm)
    assert off_by([p.grad for p in held if p.grad is not None], wanted) <= 1e-10


def single(work: Workload) -> nn.Module:
    return work.build_model().float()


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: cast(value, dtype) for name, value in batch.items()}
    return tuple(cast(value, dtype) for value in batch) if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("case", ["targets", "a weight"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(case: str, precision: Any, emit: Any) -> None:
    work = workload(case, precision=precision)
    module = emit(work)
    model, batch = single(work), cast(work.build_batch(16), torch.float32)
    dtypes: list[torch.dtype] = []
    model.get_submodule("head").register_forward_hook(lambda *given: dtypes.append(given[-1].dtype))
    full_batch(work, model, batch)
    wanted = gradients(model)
    assert set(dtypes) == {torch.float32}
    dtypes.clear()
    options: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)} if precision == "fp16" else {}
    norm = float(torch.nn.utils.get_total_norm(wanted))
    run(module, work, model, batch, clip_norm=norm / 2, **options)
    assert set(dtypes) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert off_by(gradients(model), [gradient / 2 for gradient in wanted]) < 3e-2, "unscaled before it is clipped"


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_fp16_skips_an_update_that_is_not_finite(emit: Any, clip_norm: float | None) -> None:
    work = workload("targets", precision="fp16")
    module = emit(work)
    model, batch = single(work), cast(work.build_batch(16), torch.float32)
    before = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    skipped = 0
    while not optimizer.state:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert scaler.get_scale() == 2.0 ** (40 - skipped)
        run(module, work, model, batch, optimizer=optimizer, scaler=scaler, clip_norm=clip_norm)
        skipped += 1
    assert skipped > 5
    assert not torch.equal(model.get_parameter("first.weight"), before.get_parameter("first.weight"))
    assert all(torch.isfinite(p).all() for p in model.parameters())


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
def test_it_holds_no_more_at_once_than_the_accumulator(precision: Any, as_criterion: bool, emit: Any) -> None:
    """With which its micro-batch was proved."""
    loss = {"criterion": nn.MSELoss()} if as_criterion else {"loss": lambda m, b: F.mse_loss(m(b[0]), b[1])}
    work = Workload(model=wide, batch=lambda n: (torch.randn(n, 64), torch.randn(n, 64)), precision=precision, **loss)
    module, batch = emit(work, target=30, ceiling=10), work.build_batch(30)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if precision == "fp16" else None

    def peak(train: Callable[[], object], model: nn.Module) -> int:
        """Measure a second update: the first makes optimizer state, and the Accumulator keeps a copy for it."""
        train()
        model.zero_grad()
        with PeakBytes() as seen:
            train()
        return int(seen.most)

    model, other = work.build_model(), work.build_model()
    optimizer, options = torch.optim.AdamW(model.parameters()), {"clip_norm": 1.0}
    named: dict[str, Any] = options | ({} if scaler is None else {"scaler": scaler})
    emitted = peak(lambda: run(module, work, model, batch, optimizer=optimizer, **named), model)
    accumulator = Accumulator(
        other, torch.optim.AdamW(other.parameters()), work.objective, micro_batch=10, precision=precision, **named
    )
    proved = peak(lambda: accumulator.step(batch), other)
    assert 0.9 * proved <= emitted <= 1.01 * proved
