"""autoaccum beside Lightning's BatchSizeFinder and accelerate's find_executable_batch_size, on the CPU.

    pip install -e ".[bench]"
    python tests/benchmarks/peers.py --model conv_net

Each library gets the same model, target batch and budget of memory, in a process of its own that is held to the budget
as autoaccum's trials are: RLIMIT_DATA at VmData after a warm-up, plus the budget. Seconds are what a user waits from
the start of Python until the size is known: until `autoaccum.plan` or `scale_batch_size` returns, or until the first of
accelerate's attempts, which are training runs, has made its second update. Then a fresh process trains with that size
under the same limit, as the library's documentation has it; hooks count the samples of each update: those of forwards
whose backward reached the weights.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from measuring import environment, format_markdown

import autoaccum
from autoaccum.devices.child.process import child_environment
from autoaccum.units import MIB

MODELS = {
    "conv_net": (192 * MIB, 80, 20),
    "transformer": (192 * MIB, 80, 20),
    "resnet50": (1024 * MIB, 36, 5),
    "bert_base": (2252 * MIB, 24, 3),
}
"""By name: the budget in bytes, of which a little less than half of the target batch needs all; the target batch; and
the updates of a training run."""
PEERS = ("autoaccum", "lightning", "accelerate")
HEADER = ("model", "library", "trials", "seconds until known", "micro-batches of an update", "samples per update")
_LIMIT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a task: the sizes that were tried, the one to train with, and the micro-batches of each update."""

    attempts: tuple[int, ...] = ()
    size: int | None = None
    updates: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0
    failure: str | None = None


def main() -> None:
    """Let each library search and train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="one of them only; may be repeated")
    rows = [HEADER]
    for model in parser.parse_args().model or MODELS:
        for peer in PEERS:
            found = run_child(peer, model)
            trained = Done() if found.size is None else run_child(peer, model, found.size)
            parts = trained.updates[0] if trained.updates else ()
            failure = found.failure or trained.failure
            samples = sorted({sum(sizes) for sizes in trained.updates})
            said = f"failed: {failure}" if failure else " + ".join(map(str, parts))
            counts = (str(len(found.attempts)), f"{found.seconds:.1f}")
            name = peer if peer == "autoaccum" else f"{peer} {version(peer)}"
            rows.append((model, name, *counts, said, " to ".join(map(str, samples)) or "-"))
    print(format_markdown(rows))


def run_child(peer: str, model: str, size: int | None = None) -> Done:
    """Search or train with `size` in a fresh process; one that trains has the malloc settings of a trial."""
    plans = peer == "autoaccum" and size is None
    settings = {**environment(), **({} if plans else child_environment()), "PYTHONPATH": environment()["PYTHONPATH"]}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = ["child", str(answer), peer, model, str(size or ""), str(time.monotonic())]
        try:
            command = [sys.executable, __file__, *words]
            subprocess.run(command, capture_output=True, env=settings, timeout=_LIMIT_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            return Done(failure=str(error)[-70:])
        return msgspec.json.decode(answer.read_bytes(), type=Done)


def _child(answer: str, peer: str, model: str, size: str, started: str) -> None:
    done = plan(model) if peer == "autoaccum" and not size else compete(peer, model, int(size) if size else None)
    done = replace(done, seconds=time.monotonic() - float(started))
    Path(answer).write_bytes(msgspec.json.encode(done))


def plan(model: str) -> Done:
    """Search as autoaccum does; it limits its own trials, whose processes are part of the time."""
    budget_bytes, target, _ = MODELS[model]
    made = autoaccum.plan(model_file(model), target_batch=target, device="cpu", memory=f"{budget_bytes}B")
    return Done(attempts=tuple(max(trial.parts) for trial in made.trials), size=made.micro_batch)


def compete(name: str, model: str, size: int | None) -> Done:
    """Search or train under the limit, after a small training that imports what the library imports late."""
    import torch

    from autoaccum.devices.host_memory import check_data_limit, data_limit, read_process_memory
    from autoaccum.devices.meters import warm_up
    from autoaccum.sources.source import FileSource

    budget_bytes, target, updates = MODELS[model]
    kind: Any = {"autoaccum": Autoaccum, "lightning": Lightning, "accelerate": Accelerate}[name]
    warm_up()
    kind(_small_workload(), 2, 1).train(2)
    workload, failure = FileSource(model_file(model)).load(), None
    check_data_limit()
    torch.manual_seed(0)
    gc.collect()
    peer = kind(workload, target, updates)
    with data_limit(read_process_memory().data_bytes + budget_bytes):
        try:
            if size is None:
                size = peer.search()
            else:
                peer.train(size)
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[0]}"[:70]
    return Done(attempts=tuple(peer.attempts), size=size, updates=tuple(peer.sizes), failure=failure)


def model_file(name: str) -> str:
    """Return the workload file of a model."""
    return str(Path(__file__).resolve().parent / "models" / f"{name}.py")


class Peer:
    """A workload in a library's hands: `search` returns a size, `train` makes the updates with one.

    `attempts` are the sizes of its training runs, `sizes` those of each update.
    """

    def __init__(self, workload: Any, target: int, updates: int) -> None:
        from torch.utils.data import Subset

        self.workload, self.target, self.updates = workload, target, updates
        self.attempts: list[int] = []
        self.sizes: list[tuple[int, ...]] = []
        length = len(workload.dataset)  # Repeated, so that no epoch ends within a run.
        self.samples: Any = Subset(workload.dataset, [index % length for index in range(target * updates)])

    def build(self) -> tuple[Any, Any]:
        """Return a model and its optimizer, whose samples are counted from here."""
        model = self.workload.build_model()
        optimizer = self.workload.build_optimizer(model)
        self.sizes, window, size = [], list[int](), 0

        def begin(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            nonlocal size
            size = len(next(iter((*inputs, *named.values()))))

        def count(_: Any) -> None:
            window.append(size)

        def close(*_: Any) -> None:
            self.sizes.append(tuple(window))
            window.clear()

        model.register_forward_pre_hook(begin, with_kwargs=True)
        next(model.parameters()).register_post_accumulate_grad_hook(count)
        optimizer.register_step_post_hook(close)
        return model, optimizer

    def loss(self, model: Any, batch: Any) -> Any:
        """The criterion of outputs and targets; models of Hugging Face compute their loss."""
        if self.workload.criterion is None:
            return model(**batch).loss
        return self.workload.criterion(model(batch[0]), batch[1])

    def loader(self, size: int) -> Any:
        """Return the samples in batches."""
        from torch.utils.data import DataLoader

        return DataLoader(self.samples, batch_size=size)


class Autoaccum(Peer):
    """The Accumulator with the plan's micro-batch."""

    def train(self, size: int) -> None:
        """Updates by `Accumulator.step`."""
        batch = self.workload.build_batch(self.target)
        accumulator = autoaccum.Accumulator(*self.build(), self.workload.objective, micro_batch=size, recover=False)
        for _ in range(self.updates):
            accumulator.step(batch)


class Lightning(Peer):
    """`Tuner.scale_batch_size` (its BatchSizeFinder) in binsearch mode, then `accumulate_grad_batches`."""

    def search(self) -> int:
        """Every attempt is a training run with the default settings."""
        from lightning.pytorch.tuner.tuning import Tuner

        with tempfile.TemporaryDirectory() as folder:
            found = Tuner(self._trainer(folder, max_epochs=1)).scale_batch_size(self._module(2), mode="binsearch")
        return int(found)

    def train(self, size: int) -> None:
        """Updates of as many micro-batches as go into the target whole: Lightning accumulates by a count."""
        with tempfile.TemporaryDirectory() as folder:
            window = max(1, self.target // size)
            trainer = self._trainer(folder, max_steps=self.updates, accumulate_grad_batches=window)
            trainer.fit(self._module(size))

    def _trainer(self, folder: str, **settings: Any) -> Any:
        import lightning.pytorch as pl

        silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        settings |= dict.fromkeys(silent, False)
        return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **settings)

    def _module(self, size: int) -> Any:
        import lightning.pytorch as pl

        peer = self

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model, self.optimizer = peer.build()
                self.batch_size = size

            def training_step(self, batch: Any, index: int) -> Any:
                return peer.loss(self.model, batch)

            def configure_optimizers(self) -> Any:
                return self.optimizer

            def train_dataloader(self) -> Any:
                return peer.loader(self.batch_size)

            def on_train_start(self) -> None:
                peer.attempts.append(self.batch_size)

        return Module()


class Accelerate(Peer):
    """Its example of automatic gradient accumulation: starts at the target, and takes 9/10 after each failure."""

    def search(self) -> int:
        """The size is known when a training run has made its second update, in which the optimizer has its state."""
        from accelerate.utils import find_executable_batch_size

        def training_function(batch_size: int) -> int:
            self._make_updates(batch_size, 2)
            return batch_size

        found: int = find_executable_batch_size(training_function, starting_batch_size=self.target)()
        return found

    def train(self, size: int) -> None:
        """The training function, with all its updates."""
        self._make_updates(size, self.updates)

    def _make_updates(self, size: int, updates: int) -> None:
        from accelerate import Accelerator

        self.attempts.append(size)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.target // size)
        accelerator.free_memory()
        prepared: Any = accelerator.prepare(*self.build(), self.loader(size))
        model, optimizer, loader = prepared
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(self.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if len(self.sizes) == updates:
                break


def _small_workload() -> Any:
    import torch
    from torch import nn

    pairs = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4, 2))
    return autoaccum.Workload(
        model=lambda: nn.Linear(2, 2),
        batch=lambda size: (torch.ones(size, 2), torch.zeros(size, 2)),
        criterion=nn.MSELoss(),
        dataset=pairs,
    )


if __name__ == "__main__":
    _child(*sys.argv[2:]) if sys.argv[1:2] == ["child"] else main()
