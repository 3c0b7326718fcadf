"""Trainings that need a process of their own: a DeepSpeed engine, and torchtitan's Trainer, on a CPU with one rank.

    python framework_runs.py PORT deepspeed JSON      the configuration
    python framework_runs.py PORT torchtitan FLAGS    as its command line takes them

Each prints, as JSON, the samples of every update, the samples that no update had, and the dtype of a layer's outputs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

EPOCHS, SAMPLES, LENGTH, WORDS = 2, 30, 8, 64


class Counter:
    """Counts the samples that a model has seen at each step of an optimizer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self.updates: list[int] = []
        self.seen, self.dtype = 0, ""
        model.register_forward_pre_hook(self._see)
        layer.register_forward_hook(self._keep)
        register_optimizer_step_pre_hook(self._end)

    def _see(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen += len(args[0])

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.dtype = str(output.dtype)

    def _end(self, *_: Any) -> None:
        if self.seen:  # torchtitan steps one optimizer after the other.
            self.updates.append(self.seen)
        self.seen = 0

    def show(self) -> None:
        print(json.dumps({"updates": self.updates, "left_over": self.seen, "dtype": self.dtype}))


def train_with_deepspeed(config: dict[str, Any]) -> None:
    """Train over a dataset whose last window is short, in each of its epochs."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its exchange through shared memory would be compiled now, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, training_data=data, config=config)
    counter = Counter(model, model)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(engine(inputs).float(), targets)
            engine.backward(loss)
            engine.step()
    counter.show()


def train_with_torchtitan(flags: list[str]) -> None:
    """Train its small Llama until the data ends, in the middle of a window.

    Its Trainer wants a card. Three things stand in for one: the device's type, the report on the card's memory, and the
    barrier of a card before the timeout of its process group changes. Model, attention, data and loss are set in its
    configuration; the loop is its own.
    """
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.attention import ScaledDotProductAttention

    memory = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None
    )
    distributed.set_pg_timeouts = lambda **_: None

    class Loader(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, local_batch_size: int, **_: Any) -> None:
            self.size = local_batch_size

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for _ in range(EPOCHS * SAMPLES // self.size + 2):
                words = torch.randint(0, WORDS, (self.size, LENGTH + 1))
                yield {"input": words[:, :-1]}, words[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class Tokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return WORDS

    fixed = ["--training.disable_cuda_graphs", "--training.seq_len", str(LENGTH), "--training.steps", "100"]
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *flags, *fixed])
    config.dataloader, config.tokenizer, config.loss = Loader.Config(), Tokenizer.Config(), CrossEntropyLoss.Config()
    config.validator.enable = False
    layers = config.model_spec.model.layers
    del layers[1:]
    layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = config.build()
    model = trainer.model_parts[0]
    counter = Counter(model, model.layers["0"].feed_forward.w1)
    trainer.train()
    trainer.close()
    counter.show()


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = sys.argv[1]
    warnings.simplefilter("ignore")
    if sys.argv[2] == "deepspeed":
        train_with_deepspeed(json.loads(sys.argv[3]))
    else:
        train_with_torchtitan(sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # Their threads would be waited for.
