"""The training runs of `tests/gpu/training_runs.py`: the code that was measured, on a simulated card."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from truths.loops import Loop

from tests.gpu.training_runs import CONFIGURATIONS, Run, make_optimizer, prepare

_NUMBERS: Final = ("batch", "length", "channels_last", "benchmark")


def loop_of_run(row: Mapping[str, str]) -> Loop:
    """The loop of a row of `tests/gpu/data/*_runs.csv`."""
    run: Run = {name: int(value) if name in _NUMBERS else value for name, value in row.items() if value}
    steps: list[Any] = []

    def load() -> nn.Module:
        with TemporaryDirectory() as folder:
            if run["kind"] == "lora":
                _write_checkpoint(run["model"], Path(folder))
            model, step = prepare(run, Path(folder))
        steps.append(step)
        return model

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        loss, outputs = steps[-1]()
        return loss, outputs

    def optimizer(model: nn.Module) -> Optimizer:
        return make_optimizer(run, model)

    return Loop(
        model=load,
        batch=tuple,  # It is on the card with the model.
        forward=forward,
        optimizer=optimizer,
        loads=True,
        keeps=False,
        resident_batch=True,
        benchmark=row["benchmark"] == "1",
    )


def _write_checkpoint(model: str, checkpoints: Path) -> None:
    """Write a checkpoint in fp16 whose weights are a hole in the file, which reads as zeros and takes no room."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(CONFIGURATIONS / model)
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in made.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "F16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    config.save_pretrained(checkpoints / model)
    with (checkpoints / model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
