"""The contenders of `peers.py`, each as its documentation has it, under the limit that a trial of autoaccum has."""

from __future__ import annotations

import gc
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from peer_child import Done, Task
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autoaccum
from autoaccum.devices.host_memory import check_data_limit, data_limit, read_process_memory
from autoaccum.devices.meters import warm_up
from autoaccum.sources.loading import load_workload
from autoaccum.sources.workload import Workload

_ENOUGH_UPDATES = 2
"""In the second one the optimizer has its state: more of them tell no more."""


class Counter:
    """Notes the samples of every forward, and closes a window whenever the optimizer steps: what really goes through.

    Attributes:
        updates: Sizes of the micro-batches of each update so far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.updates: list[tuple[int, ...]] = []
        self._window: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        optimizer.register_step_post_hook(self._close)

    def _count(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._window.append(len(next(iter((*inputs, *named.values())))))

    def _close(self, *_: Any) -> None:
        self.updates.append(tuple(self._window))
        self._window.clear()


class Repeated(Dataset[Any]):
    """A data set said over again until it has `length` samples: long enough that no epoch ends within a run."""

    def __init__(self, samples: Any, length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


class Contender:
    """One workload in a contender's hands.

    Attributes:
        attempts: The batch size of every training run.
        counter: Of the last one.
    """

    def __init__(self, workload: Workload, task: Task) -> None:
        self.workload, self.task = workload, task
        self.attempts: list[int] = []
        self.counter: Counter | None = None
        self.samples = Repeated(workload.dataset, task.target * task.updates)

    def search(self) -> int | None:
        """The size that is found."""
        raise NotImplementedError

    def train(self, size: int) -> None:
        """Make the updates with micro-batches of `size`."""
        raise NotImplementedError

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer, whose updates are counted."""
        model = self.workload.build_model()
        optimizer = self.workload.build_optimizer(model)
        self.counter = Counter(model, optimizer)
        return model, optimizer

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The criterion of outputs and targets; models of Hugging Face compute their loss."""
        if self.workload.criterion is None:
            return torch.as_tensor(model(**batch).loss)
        return torch.as_tensor(self.workload.criterion(model(batch[0]), batch[1]))


class Autoaccum(Contender):
    """The Accumulator with the plan's micro-batch; it is `peer_child` that plans."""

    def train(self, size: int) -> None:
        """Updates by `Accumulator.step`."""
        batch = self.workload.build_batch(self.task.target)
        accumulator = autoaccum.Accumulator(*self.build(), self.workload.objective, micro_batch=size)
        for _ in range(self.task.updates):
            result = accumulator.step(batch)
            if result.retries:
                raise RuntimeError(f"it went on with {max(result.micro_batches)} samples at a time")


class Lightning(Contender):
    """`Tuner.scale_batch_size` (its BatchSizeFinder) in binsearch mode, then `accumulate_grad_batches`."""

    def search(self) -> int | None:
        """Return what `scale_batch_size` finds with its default settings; every attempt is a training run."""
        from lightning.pytorch.tuner.tuning import Tuner

        with tempfile.TemporaryDirectory() as folder:
            tuner = Tuner(self._trainer(folder, max_epochs=1))
            size: int | None = tuner.scale_batch_size(self._module(2), mode="binsearch")
            return size

    def train(self, size: int) -> None:
        """Updates of as many micro-batches as go into the target whole: Lightning accumulates by a count."""
        window = max(1, self.task.target // size)
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(folder, max_steps=self.task.updates, accumulate_grad_batches=window)
            trainer.fit(self._module(size))

    def _trainer(self, folder: str, **settings: Any) -> Any:
        """On the CPU, silent; the finder saves the untrained model in `folder`."""
        import lightning.pytorch as pl

        shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        silent: dict[str, Any] = dict.fromkeys(shown, False)
        return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **silent, **settings)

    def _module(self, size: int) -> Any:
        """The workload as its user would write it for Lightning."""
        import lightning.pytorch as pl

        contender = self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.batch_size = contender.workload.build_model(), size

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                return contender.loss(self.model, batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                optimizer = contender.workload.build_optimizer(self.model)
                contender.counter = Counter(self.model, optimizer)
                return optimizer

            def train_dataloader(self) -> DataLoader[Any]:
                return DataLoader(contender.samples, batch_size=self.batch_size)

            def on_train_start(self) -> None:
                contender.attempts.append(self.batch_size)

        return Module()


class Accelerate(Contender):
    """Its example of automatic gradient accumulation (examples/by_feature of its repository), on the CPU.

    `find_executable_batch_size` wraps the training function, starts at the target and takes 9/10 after each failure;
    the accumulation is `target // size`, set on the Accelerator.
    """

    def __init__(self, workload: Workload, task: Task) -> None:
        from accelerate import Accelerator

        super().__init__(workload, task)
        self.accelerator = Accelerator(cpu=True)

    def search(self) -> int | None:
        """The attempts are training runs: the size is known when one of them has made its second update."""
        from accelerate.utils import find_executable_batch_size

        def training_function(batch_size: int) -> int:
            self.make_updates(batch_size, _ENOUGH_UPDATES)
            return batch_size

        found: int = find_executable_batch_size(training_function, starting_batch_size=self.task.target)()
        return found

    def train(self, size: int) -> None:
        """The training function, with all its updates."""
        self.make_updates(size, self.task.updates)

    def make_updates(self, size: int, updates: int) -> None:
        """The training function, which ends after some updates."""
        from accelerate.utils import set_seed

        self.attempts.append(size)
        accelerator = self.accelerator
        accelerator.gradient_accumulation_steps = self.task.target // size
        accelerator.free_memory()
        set_seed(0)
        prepared: Any = accelerator.prepare(*self.build(), DataLoader(self.samples, batch_size=size))
        model, optimizer, loader = prepared
        assert self.counter is not None
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(self.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if len(self.counter.updates) == updates:
                break


CONTENDERS: dict[str, type[Contender]] = {"autoaccum": Autoaccum, "Lightning": Lightning, "accelerate": Accelerate}


def compete(task: Task) -> Done:
    """Search or train under the limit: RLIMIT_DATA at VmData after a warm-up, plus the budget.

    A small training before it lets a contender import what it imports late. A user waits as long.
    """
    kind = CONTENDERS[task.contender]
    workload = load_workload(task.workload)
    warm_up()
    small = Task(contender=task.contender, workload="", budget_bytes=0, target=2, updates=1)
    kind(_small_workload(), small).train(2)
    check_data_limit()
    contender, size, failure = None, task.size, None
    torch.manual_seed(0)
    gc.collect()
    began = time.monotonic()
    with data_limit(read_process_memory().data_bytes + task.budget_bytes):
        try:
            contender = kind(workload, task)
            if task.size is None:
                size = contender.search()
            else:
                contender.train(task.size)
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[0]}"
    return Done(
        attempts=tuple(contender.attempts) if contender else (),
        size=size,
        micro_batches=tuple(contender.counter.updates) if contender and contender.counter else (),
        start_seconds=began - task.started,
        seconds=time.monotonic() - began,
        failure=failure,
        version=version(task.contender.lower()),
    )


def _small_workload() -> Workload:
    return Workload(
        name="small",
        model=lambda: nn.Linear(2, 2),
        batch=lambda size: (torch.ones(size, 2), torch.zeros(size, 2)),
        criterion=nn.MSELoss(),
        dataset=TensorDataset(torch.ones(4, 2), torch.zeros(4, 2)),
    )
