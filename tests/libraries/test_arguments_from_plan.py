"""Each framework trains by the arguments of a plan: samples per update are the plan's, also in a short last window.

`Updates` recomputes each update's gradient from all of its samples at once, so that what guides/frameworks.md says of
the short window is what happens.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import environment
from factories import make_plan, make_token_budget
from quiet_frameworks import forget_accelerate, quiet_trainer
from tiny_transformers import WORDS, llama
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autoaccum import Plan
from autoaccum.integrations.arguments_from_plan import arguments_for
from autoaccum.reporting.plan_report import code_lines
from autoaccum.spec import DeviceFacts

TARGET, MICRO_BATCH = 12, 4
RUNS = Path(__file__).parents[1] / "shared" / "framework_runs.py"


class Net(nn.Module):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(1).float(), labels)}


class Rows(Dataset[dict[str, Tensor]]):
    """Samples as dicts."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def numbers(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 3), "labels": torch.randn(size)}


def texts(size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (size, 8))
    kept = torch.arange(8) < torch.arange(size)[:, None] % 7 + 2
    return {"input_ids": ids, "labels": ids.where(kept, -100)}


class Updates:
    """The samples of each update, and its gradient in units of the gradient of the mean over them."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self.samples: list[int] = []
        self.ratios: list[float | None] = []
        self.dtypes: set[torch.dtype] = set()
        self._model, self._seen, self._recording = model, list[dict[str, Tensor]](), True
        model.register_forward_pre_hook(self._see, with_kwargs=True)
        layer.register_forward_hook(self._keep)

    def _see(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if self._recording and torch.is_grad_enabled():
            columns = dict(zip(("x", "labels"), args, strict=False)) | given
            self._seen.append({name: value for name, value in columns.items() if isinstance(value, Tensor)})

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._recording:
            self.dtypes.add(output.dtype)

    @property
    def left_over(self) -> int:
        return sum(len(part["labels"]) for part in self._seen)

    def end(self, *_: Any) -> None:
        """Called by an optimizer before its step, on every rank."""
        ranks = [self._seen]
        if dist.is_initialized():
            ranks = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, self._seen)
        parts = [part for rank in ranks for part in rank]
        whole = {name: joined([part[name] for part in parts], name) for name in parts[0] if name in COLUMNS}
        self.samples.append(len(whole["labels"]))
        self._seen, self._recording = [], False
        weights = [weight for weight in self._model.parameters() if weight.grad is not None]
        loss = self._model(**whole)["loss"]
        full = torch.cat([each.flatten() for each in torch.autograd.grad(loss, weights)])
        taken = torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        self._recording = True
        ratio = float(taken @ full / (full @ full))
        off = float((taken - ratio * full).abs().max() / full.abs().max())
        self.ratios.append(round(ratio, 4) if off < 1e-3 else None)


def joined(parts: list[Tensor], name: str) -> Tensor:
    """Join parts, texts as wide as the longest one."""
    if name != "x" and parts[0].ndim > 1:
        most, padding = max(part.shape[1] for part in parts), -100 if name == "labels" else 0
        parts = [nn.functional.pad(part, (0, most - part.shape[1]), value=padding) for part in parts]
    return torch.cat(parts)


COLUMNS = ("x", "input_ids", "labels")


def watched(model: nn.Module) -> tuple[Updates, torch.optim.Optimizer]:
    """Return what is seen of the model's updates, which change nothing: all gradients are of the same weights."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    updates, optimizer = Updates(model, next(layers)), torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(updates.end)
    return updates, optimizer


@pytest.fixture(params=["fp32", "bf16"])
def plan(request: pytest.FixtureRequest) -> Plan:
    workload, on_cpu = {"precision": request.param}, DeviceFacts(kind="cpu")
    return make_plan(TARGET, MICRO_BATCH, equal=True, workload=workload, device=on_cpu)


def train_with_transformers(plan: Plan, model: nn.Module, data: Dataset[Any], folder: Path, **given: Any) -> Updates:
    from transformers import Trainer, TrainingArguments

    updates, optimizer = watched(model)
    quiet: Any = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(folder), num_train_epochs=1, max_grad_norm=0, **quiet, **arguments_for(plan, "transformers")
    )
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None), **given).train()
    return updates


def train_with_lightning(plan: Plan, data: Dataset[Any], **changes: Any) -> Updates:
    lightning: Any = import_module("lightning")  # Typed where it is installed, and mypy is to say the same elsewhere.

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.updates = Updates(self.net, self.net.layer)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.updates.end()  # The optimizer's own hook runs before the last micro-batch, which its step computes.

    module, given = Module(), arguments_for(plan, "lightning")
    trainer = quiet_trainer(lightning, Path(), max_epochs=1, **given["trainer"], **changes)
    trainer.fit(module, DataLoader(data, **given["dataloader"]))
    return module.updates


def train_with_accelerate(plan: Plan, data: Dataset[Any], **changes: Any) -> Updates:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    given, model = arguments_for(plan, "accelerate"), Net()
    updates, optimizer = watched(model)
    forget_accelerate()
    plugin = GradientAccumulationPlugin(**given["plugin"] | changes)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, **given["accelerator"])
    ready, stepper, loader = accelerator.prepare(model, optimizer, DataLoader(data, **given["dataloader"]))
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(ready):
                accelerator.backward(ready(**batch)["loss"])
                stepper.step()
                stepper.zero_grad()
    return updates


def dtype_of(plan: Plan) -> torch.dtype:
    return torch.bfloat16 if plan.spec.precision == "bf16" else torch.float32


def test_transformers(plan: Plan, tmp_path: Path) -> None:
    """The short window is divided by its own micro-batches; a smaller last one counts as much as the others."""
    even = train_with_transformers(plan, Net(), Rows(numbers(32)), tmp_path)
    assert (even.samples, even.dtypes) == ([12, 12, 8], {dtype_of(plan)})
    uneven = train_with_transformers(plan, Net(), Rows(numbers(30)), tmp_path)
    assert uneven.samples == [12, 12, 6]
    if plan.spec.precision == "fp32":
        assert even.ratios == [1, 1, 1]
        assert uneven.ratios == [1, 1, None]


def test_transformers_counts_tokens(tmp_path: Path, plan: Plan) -> None:
    """A model that takes the number of tokens is right in the short window, too."""
    updates = train_with_transformers(plan, llama(), Rows(texts(30)), tmp_path)
    assert updates.samples == [12, 12, 6]
    if plan.spec.precision == "fp32":
        assert updates.ratios == [1, 1, 1]


@pytest.mark.parametrize("plan", ["fp32"], indirect=True)
def test_transformers_balances_tokens(tmp_path: Path, plan: Plan) -> None:
    """Micro-batches of unequal size, sorted by length: each update has the plan's samples and their gradient."""
    rows = [torch.randint(1, WORDS, (2 + 37 * index % 29,)) for index in range(30)]
    model, shapes = llama(), list[torch.Size]()

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
        shapes.append(ids.shape)
        return {"input_ids": ids, "labels": ids.where(ids > 0, -100)}

    data: Any = [{"input_ids": row} for row in rows]
    by_tokens = dataclasses.replace(plan, tokens=make_token_budget())
    updates = train_with_transformers(by_tokens, model, data, tmp_path, data_collator=collate)
    assert (updates.samples, updates.ratios) == ([12, 12, 6], [1, 1, 1])
    assert max(size for size, _ in shapes) > MICRO_BATCH


def test_lightning(plan: Plan) -> None:
    """The short window is divided by the plan's number of micro-batches: its gradient is too small."""
    updates = train_with_lightning(plan, Rows(numbers(32)))
    assert (updates.samples, updates.dtypes) == ([12, 12, 8], {dtype_of(plan)})
    assert train_with_lightning(plan, Rows(numbers(30))).samples == [12, 12, 4]  # The loader left out two.
    if plan.spec.precision == "fp32":
        assert updates.ratios == [1, 1, 0.6667]
        whole = train_with_lightning(plan, Rows(numbers(32)), limit_train_batches=6)
        assert (whole.samples, whole.ratios) == ([12, 12], [1, 1])


def test_accelerate(plan: Plan) -> None:
    """A window goes on in the next epoch: each update has all of its samples, and the last ones have none."""
    updates = train_with_accelerate(plan, Rows(numbers(30)))
    assert (updates.samples, updates.left_over, updates.dtypes) == ([12, 12, 12, 12], 8, {dtype_of(plan)})
    if plan.spec.precision == "fp32":
        assert updates.ratios == [1, 1, 1, 1]
        short = train_with_accelerate(plan, Rows(numbers(32)), sync_with_dataloader=True)
        assert (short.samples, short.ratios) == ([12, 12, 8] * 2, [1, 1, 0.6667] * 2), "as Lightning"


@pytest.mark.parametrize("plan", ["bf16"], indirect=True)
def test_deepspeed(plan: Plan) -> None:
    """A window goes on in the next epoch, as with accelerate."""
    found = run_alone("deepspeed", json.dumps(arguments_for(plan, "deepspeed")))
    assert found == {"updates": [12, 12, 12, 12], "left_over": 8, "dtype": str(dtype_of(plan))}


@pytest.mark.needs_torch(2, 12)  # torchtitan 0.3 does.
@pytest.mark.parametrize("plan", ["fp32"], indirect=True)
def test_torchtitan(plan: Plan) -> None:
    """The short window at the end of the data is left out: its batches are read and not trained on."""
    (flags,) = code_lines("torchtitan", arguments_for(plan, "torchtitan"))
    found = run_alone("torchtitan", *shlex.split(flags))
    assert found == {"updates": [12, 12, 12, 12, 12], "left_over": 0, "dtype": str(dtype_of(plan))}


def run_alone(*words: str) -> Any:
    """Run it in a process of its own: what it prints last."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, str(RUNS), port, *words], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
