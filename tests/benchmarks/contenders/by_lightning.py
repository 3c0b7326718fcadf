"""Lightning: `Tuner.scale_batch_size` (its BatchSizeFinder) in binsearch mode, then `accumulate_grad_batches`."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
import torch
from contenders.counting import Counter
from contenders.limits import Repeated, Stage, describe
from contenders.records import Search, Task, Training
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader

from autoaccum.workload.spec import Workload


class Module(pl.LightningModule):
    """The workload as its user would write it for Lightning.

    Attributes:
        attempts: The batch size of every training run.
        counter: Of the last training run.
    """

    def __init__(self, workload: Workload, batch_size: int, length: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.attempts: list[int] = []
        self.counter: Counter | None = None
        self._length = length
        self._workload = workload
        self.model = workload.build_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of a micro-batch."""
        inputs, targets = batch
        assert self._workload.criterion is not None
        return torch.as_tensor(self._workload.criterion(self.model(inputs), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The workload's."""
        optimizer = self._workload.build_optimizer(self.model)
        self.counter = Counter(self.model, optimizer)
        return optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        """Micro-batches of `batch_size`, which the finder changes."""
        return DataLoader(Repeated(self._workload.dataset, self._length), batch_size=self.batch_size)

    def on_train_start(self) -> None:
        """Every attempt of the finder is a training run."""
        self.attempts.append(self.batch_size)


def search(task: Task) -> Search:
    """What `scale_batch_size` returns with its own settings."""
    stage, failure, size, attempts = Stage(task, _rehearse), None, None, list[int]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with stage.limited():
                trainer = _trainer(folder, max_epochs=1)
                module = Module(stage.workload, 2, task.target * task.updates)
                attempts = module.attempts
                size = Tuner(trainer).scale_batch_size(module, mode="binsearch")
        except Exception as error:
            failure = describe(error)
        seconds = stage.seconds
    return Search(
        attempts=tuple(attempts),
        size=size,
        largest=size,
        start_seconds=stage.start_seconds,
        seconds=seconds,
        failure=failure,
        version=version("lightning"),
        threads=torch.get_num_threads(),
    )


def train(task: Task) -> Training:
    """Updates of as many micro-batches as go into the target whole: Lightning accumulates by a count."""
    assert task.size is not None
    stage, failure, module = Stage(task, _rehearse), None, None
    with tempfile.TemporaryDirectory() as folder:
        try:
            with stage.limited():
                window = max(1, task.target // task.size)
                trainer = _trainer(folder, max_steps=task.updates, accumulate_grad_batches=window)
                module = Module(stage.workload, task.size, task.target * task.updates)
                trainer.fit(module)
        except Exception as error:
            failure = describe(error)
        seconds = stage.seconds
    made = tuple(module.counter.updates) if module and module.counter else ()
    return Training(micro_batches=made, seconds=seconds, failure=failure)


def _trainer(folder: str, **settings: Any) -> Any:
    """On the CPU, silent; the finder saves the untrained model in `folder`."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )


def _rehearse(small: Workload) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _trainer(folder, max_steps=1).fit(Module(small, 2, 4))
