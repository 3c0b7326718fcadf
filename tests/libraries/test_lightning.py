"""A Lightning module with its Trainer: planned as it trains and left as it is, in code and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from command_line import Command
from factories import codes
from quiet_frameworks import quiet_trainer
from state_digests import state_digest
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import WorkloadError
from autoaccum.sources.loading import workload_of

IMPORTED = ("lightning.pytorch", "pytorch_lightning")
WORDS = 20


def words(count: int = 64) -> Any:
    """Sentences of 2 to 14 words."""
    return [{"ids": torch.arange(2 + index % 13), "label": torch.tensor(index % 3)} for index in range(count)]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    return {"ids": ids, "label": torch.stack([sample["label"] for sample in samples])}


class Sentences(pl.LightningDataModule):  # type: ignore[misc]
    """Makes its data when the Trainer asks for it, and adds to a batch where it is trained."""

    def setup(self, stage: str) -> None:
        self.samples = words()

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=4, collate_fn=collate, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.samples, batch_size=size, collate_fn=collate) for size in (6, 12)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"ones": torch.ones_like(batch["label"], dtype=torch.float32)}


class Net(pl.LightningModule):  # type: ignore[misc]
    """Uses what a module has within a Trainer's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)
        self.lengths: list[int] = []

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.words(ids).mean(1))

    def on_train_start(self) -> None:
        self.scale = torch.zeros((), device=self.device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = self.scale + torch.ones_like(batch["label"][0], dtype=torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch["ids"]) * self.scale
        each = nn.functional.cross_entropy(outputs, batch["label"], reduction="none")
        loss = (each * batch["ones"]).mean()
        self.log("loss", loss, prog_bar=True)
        (rate,), groups = self.lr_schedulers().get_last_lr(), self.optimizers().optimizer.param_groups
        assert rate == groups[0]["lr"] == self.trainer.optimizers[0].param_groups[0]["lr"]
        self.logger.experiment.add_scalar("loss", loss.detach(), self.global_step)
        return {"loss": loss, "outputs": outputs}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        assert self.trainer.validating
        self.log("accuracy", (self(batch["ids"]).argmax(1) == batch["label"]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(folder: Path, **settings: Any) -> Any:
    return quiet_trainer(pl, folder, **{"max_epochs": 2, **settings})


@pytest.mark.usefixtures("warm_children")
def test_a_module_is_planned_as_it_trains_and_left_as_it_is(tmp_path: Path) -> None:
    module, data = Net(), Sentences()
    averaging = pl.callbacks.EMAWeightAveraging()
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[averaging], logger=True)
    attributes, digest = dict(vars(module)), state_digest(module, torch.optim.SGD(module.parameters()))
    plan = autoaccum.plan(
        trainer=trainer, model=module, data=data, target_batch=8, max_micro_batch=4, memory="2GiB", device="cpu"
    )
    recorded = {name: getattr(plan.spec, name) for name in ("precision", "ema", "evaluation_batch")}
    assert recorded == {"precision": "bf16", "ema": True, "evaluation_batch": 12}
    assert plan.workload.optimizer == "AdamW"
    assert plan.micro_batches == (4, 4)
    assert "forward_not_repeated" not in codes(plan.warnings)
    assert dict(vars(module)) == attributes
    assert state_digest(module, torch.optim.SGD(module.parameters())) == digest
    assert not hasattr(data, "samples")
    assert list(tmp_path.iterdir()) == []  # The logger has written nothing.
    assert autoaccum.verify(
        trainer=make_trainer(tmp_path, logger=True), model=module, data=data, target_batch=4
    ).equivalent


FILE = """
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train_loader, val_loader = DataLoader(data, batch_size=4), DataLoader(data, batch_size=16)
model = Net()
trainer = pl.Trainer(accelerator="gpu", precision="16-mixed", max_epochs=1, logger=False)

if __name__ == "__main__":
    trainer.fit(model, train_loader, val_loader)
"""


def test_a_file_is_planned_for_a_card_that_is_not_there(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(FILE)
    words = "plan train.py:trainer --target-batch 8 --max-micro-batch 4 --gpu rtx4090 --for lightning --json"
    done = command(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    expected = {
        "name": "train:trainer",
        "model": "Net",
        "precision": "fp16",
        "optimizer": "SGD",
        "evaluation_batch": 16,
    }
    recorded = plan["spec"] | plan["workload"]
    assert {name: recorded[name] for name in expected} == expected
    assert (plan["kind"], plan["micro_batches"]) == ("predicted", [4, 4])
    assert plan["arguments"]["lightning"]["trainer"]["precision"] == "16-mixed"


class Plain(pl.LightningModule):  # type: ignore[misc]
    """What each test below changes one thing of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)]


def rows(count: int = 12, **settings: Any) -> Any:
    return DataLoader(TensorDataset(torch.randn(count, 4), torch.randn(count, 1)), **({"batch_size": 4} | settings))


class Two(Plain):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lossless(Plain):
    def training_step(self, batch: Any) -> Any:
        return {"outputs": self.layer(batch[0])}


@pytest.mark.parametrize(
    ("parts", "settings", "said"),
    [
        ({"model": Two()}, {}, "configure_optimizers of Two returned 2 optimizers, .* examples/lightning_manual.py"),
        ({"model": Manual()}, {}, "Manual optimises by hand .* examples/lightning_manual.py"),
        ({"model": Lossless()}, {}, "training_step of Lossless returned a dict without a loss"),
        ({"model": None}, {}, "the Trainer's model is None: give the LightningModule too"),
        ({"data": None}, {}, "train_dataloader is None"),
        ({"data": {"a": rows()}}, {}, "train_dataloader is a dict"),
        ({"data": rows(batch_size=None)}, {}, "train_dataloader is a DataLoader"),
        ({}, {"strategy": "fsdp"}, "the Trainer's strategy is FSDPStrategy"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: Any, settings: Any, said: str
) -> None:
    trainer = make_trainer(tmp_path)
    if settings:  # A Trainer on the CPU refuses to shard.
        from lightning.pytorch.strategies import FSDPStrategy

        monkeypatch.setattr(trainer._accelerator_connector, "strategy", FSDPStrategy())
    with pytest.raises(WorkloadError, match=said):
        take_step(workload_of(trainer, **({"model": Plain(), "data": rows()} | parts)))


def take_step(workload: Any) -> Any:
    model = workload.build_model()
    workload.build_optimizer(model)
    return workload.objective.terms(model, workload.build_batch(2))


def test_a_true_half_precision_converts_a_copy(tmp_path: Path) -> None:
    module = Plain()
    workload = workload_of(make_trainer(tmp_path, precision="bf16-true"), model=module, data=rows())
    assert workload is not None
    (loss,) = take_step(workload).values()
    assert (loss.dtype, module.layer.weight.dtype) == (torch.bfloat16, torch.float32)
    assert (workload.precision, workload.accumulate_in) == ("fp32", "parameters")


def test_gradients_of_the_last_update_are_there_in_the_next_forward_as_in_a_trial(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looking(Plain):
        def training_step(self, batch: Any) -> Any:
            seen.append(self.layer.weight.grad is not None)
            return super().training_step(batch)

    module, loader = Looking(), rows()
    make_trainer(tmp_path, max_epochs=1).fit(module, loader)
    assert seen == [False, True, True]
