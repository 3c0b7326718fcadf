"""The examples under accelerate and Lightning: exact gradients, and their own counting and checkpoints still work."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from imported_files import import_file
from quiet_frameworks import forget_accelerate, largest_difference, quiet_trainer
from state_digests import state_digest
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.argument_checks import current_facts
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.errors import UsageError
from autoaccum.sources.objective import resolve_objective
from autoaccum.spec import TrainingSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET, MICRO_BATCH, RATE = 12, 5, 0.1


@pytest.fixture(scope="module")
def accelerate_loop() -> Any:
    return example("accelerate_loop")


@pytest.fixture(scope="module")
def lightning_manual() -> Any:
    return example("lightning_manual")


def example(name: str) -> ModuleType:
    return import_file(EXAMPLES / f"{name}.py")


class Net(nn.Module):
    """Runs out of memory at more samples than `most`."""

    def __init__(self, most: int = TARGET) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        self.most = most
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        out: Tensor = self.layers(x)
        return out


def make(most: int = TARGET) -> tuple[Net, TensorDataset]:
    """A model, and data whose last batch is short."""
    torch.manual_seed(0)
    return Net(most), TensorDataset(torch.randn(32, 6, dtype=torch.float64), torch.randint(0, 3, (32,)))


def loader(dataset: TensorDataset) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=TARGET)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)


def full_batches(net: Net, dataset: TensorDataset, epochs: int = 1) -> dict[str, Tensor]:
    """The weights after updates from whole batches, in plain PyTorch."""
    net = copy.deepcopy(net)
    net.most = TARGET
    optimizer = sgd(net)
    for _ in range(epochs):
        for inputs, targets in loader(dataset):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
    return net.state_dict()


@pytest.fixture
def make_accelerator(accelerate_loop: Any) -> Iterator[Any]:
    from accelerate import Accelerator

    forget_accelerate()
    yield partial(Accelerator, cpu=True)
    forget_accelerate()


def test_updates_under_accelerate_are_those_of_the_full_batch(accelerate_loop: Any, make_accelerator: Any) -> None:
    net, dataset = make()
    expected = full_batches(net, dataset)
    results = list(accelerate_loop.train(make_accelerator(), net, sgd(net), loader(dataset), MICRO_BATCH))
    assert [result.micro_batches for result in results] == [(4, 4, 4), (4, 4, 4), (4, 4)]
    assert largest_difference(net.state_dict(), expected) <= 1e-10


def test_out_of_memory_under_accelerate_changes_no_update(accelerate_loop: Any, make_accelerator: Any) -> None:
    net, dataset = make(most=3)
    expected = full_batches(net, dataset)
    with pytest.warns(AccumulationWarning, match="out of memory"):
        results = list(accelerate_loop.train(make_accelerator(), net, sgd(net), loader(dataset), MICRO_BATCH))
    assert [result.retries for result in results] == [1, 0, 0]
    assert largest_difference(net.state_dict(), expected) <= 1e-10


def run_alone(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example.__file__), run_name="__main__")
    told = capsys.readouterr().out
    assert "loss" in told
    assert "nan" not in told


@pytest.mark.usefixtures("make_accelerator")
def test_the_example_for_accelerate_runs(accelerate_loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(accelerate_loop, capsys)


def test_the_example_for_lightning_runs(lightning_manual: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_alone(lightning_manual, capsys)


def check_undone(net: Net, optimizer: Any, dataset: TensorDataset) -> None:
    """The wrapper's inner state is covered by the copy that guards the first update."""
    inner = optimizer.optimizer
    batch = next(iter(loader(dataset)))
    accumulator = Accumulator(net, optimizer, nn.CrossEntropyLoss(), micro_batch=MICRO_BATCH)
    before = state_digest(net, inner)

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    handle = inner.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        accumulator.step(batch)
    handle.remove()
    assert state_digest(net, inner) == before
    assert accumulator.step(batch).updated


def check_plan_fits(net: Net, optimizer: Any) -> None:
    """A plan names the optimizer, not what a framework wraps it in."""
    facts = current_facts(net, optimizer, resolve_objective(nn.CrossEntropyLoss()), TrainingSpec())
    assert facts["optimizer"] == "SGD"


def test_accelerates_own_accumulation_is_refused(accelerate_loop: Any, make_accelerator: Any) -> None:
    """Its optimizer would leave out updates, and say nothing."""
    net, dataset = make()
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    with pytest.raises(UsageError, match="one update in 4 steps: omit gradient_accumulation_steps"):
        next(accelerate_loop.train(accelerator, net, sgd(net), loader(dataset), MICRO_BATCH))


def trainer(folder: Path, **settings: Any) -> Any:
    import lightning.pytorch as pl

    return quiet_trainer(pl, folder, **settings)


def classifier(lightning_manual: Any, net: Net) -> Any:
    class WithSGD(lightning_manual.Classifier):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    return WithSGD(net, MICRO_BATCH)


def test_updates_in_lightning_are_those_of_the_full_batch_also_from_its_checkpoint(
    lightning_manual: Any, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    net, dataset = make()
    expected = full_batches(net, dataset, epochs=2)
    keeping = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    run = trainer(tmp_path, max_epochs=1, callbacks=[keeping], enable_checkpointing=True)
    run.fit(classifier(lightning_manual, net), loader(dataset))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=3.ckpt"]
    again, _ = make()
    run = trainer(tmp_path, max_epochs=2)
    module = classifier(lightning_manual, again)
    run.fit(module, loader(dataset), ckpt_path=str(tmp_path / "epoch=0-step=3.ckpt"))
    assert run.global_step == 6
    assert largest_difference(again.state_dict(), expected) <= 1e-10


def test_a_first_update_that_fails_in_lightning_is_undone(lightning_manual: Any, tmp_path: Path) -> None:
    net, dataset = make()

    class Failing(lightning_manual.Classifier):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

        def training_step(self, batch: Any, index: int) -> None:
            check_plan_fits(net, self.optimizers())
            check_undone(net, self.optimizers(), dataset)

    run = trainer(tmp_path, max_steps=1, limit_train_batches=1)
    run.fit(Failing(net, MICRO_BATCH), loader(dataset))


def test_lightnings_own_scaling_is_refused(lightning_manual: Any, tmp_path: Path) -> None:
    """It would divide gradients by a scale that the loss never had, and say nothing."""
    from lightning.pytorch.plugins import MixedPrecision

    net, dataset = make()
    scaling = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    run = trainer(tmp_path, max_epochs=1, plugins=[scaling])
    with pytest.raises(UsageError, match="the framework's optimizer scales gradients for fp16"):
        run.fit(classifier(lightning_manual, net), loader(dataset))
