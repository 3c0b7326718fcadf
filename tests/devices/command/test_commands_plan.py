"""Training scripts as their users write them, planned as they are, and as the workload files that train the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from command_line import Command

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Script:
    """A script, and the same training as a workload file.

    Attributes:
        command: The command.
        workload: The file.
        target: The samples of an update; None: the command has no `{iter_size}`. Updates of one micro-batch are not
            compared: trials of a workload have gradients from before in them, too.
        largest: The largest micro-batch tried.
        memory: The budget on the CPU.
        folder: Where it runs.
        ranks: The number of its ranks.
    """

    command: str
    workload: str
    target: int | None
    largest: int
    memory: str = ""
    folder: str = "."
    ranks: int = 1


RUN = {
    "nanogpt": Script(
        "python train.py config/tiny.py --dtype=float32 --batch_size={micro_batch}"
        " --gradient_accumulation_steps={iter_size}",
        """
        import torch
        from model import GPT, GPTConfig

        hold_outputs = True  # `logits` stays until the next ones are there.


        def model():
            sizes = {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 512}
            return GPT(GPTConfig(**sizes, bias=False, dropout=0.1))


        def batch(size):
            return torch.randint(512, (size, 64)), torch.randint(512, (size, 64))


        def loss(model, batch):
            return model(*batch)[1]
        """,
        target=16,
        largest=16,
        memory="36MiB",
        folder="nanogpt",
    ),
    "imagenet": Script(
        "python imagenet.py --images 2048 -b {micro_batch} --accum {iter_size}",
        """
        import torch
        from imagenet import ResNet as model

        criterion = torch.nn.CrossEntropyLoss()


        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


        def batch(size):
            return torch.randn(size, 3, 64, 64), torch.randint(10, (size,))
        """,
        target=512,
        largest=256,
    ),
    "gan": Script(
        "python gan.py --images 2048 --batchSize {micro_batch} --cuda",
        """
        import torch
        from torch import nn


        class GAN(nn.Module):
            def __init__(self):
                super().__init__()
                rows = ((32, 64, 1, 0), (64, 32, 2, 1), (32, 16, 2, 1))
                ups = [
                    layer for a, b, stride, padding in rows for layer in
                    (nn.ConvTranspose2d(a, b, 4, stride, padding, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))
                ]
                self.generator = nn.Sequential(*ups, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())
                downs = [
                    layer for a, b in ((16, 32), (32, 64)) for layer in
                    (nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, inplace=True))
                ]
                first = nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)
                last = nn.Conv2d(64, 1, 4, 1, 0, bias=False), nn.Sigmoid()
                self.discriminator = nn.Sequential(*first, *downs, *last)

            def forward(self, real):
                noise = torch.randn(len(real), 32, 1, 1, device=real.device)
                return self.discriminator(self.generator(noise)).flatten()


        model = GAN


        def batch(size):
            return torch.rand(size, 3, 32, 32)


        def optimizer(parameters):
            return torch.optim.Adam(parameters, lr=2e-4)


        def loss(model, batch):  # The step of the generator holds the most: the other has ended when it begins.
            output = model(batch)
            return nn.functional.binary_cross_entropy(output, torch.ones_like(output))
        """,
        target=None,
        largest=512,
    ),
    "torchrun": Script(
        "torchrun --standalone --nproc-per-node 2 ddp.py --width 2048 --batch-size {micro_batch}"
        " --accum-steps {iter_size}",
        """
        import torch
        from ddp import load_train_objs

        criterion = torch.nn.CrossEntropyLoss()


        def model():
            return load_train_objs(2048)[1]


        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=1e-3)


        def batch(size):
            return torch.randn(size, 256), torch.randint(10, (size,))
        """,
        target=1024,
        largest=256,
        memory="200MiB",
        ranks=2,
    ),
    "shell": Script(
        "./train.sh --batch-size {micro_batch} --accum {iter_size}",
        """
        import torch
        from module.__main__ import Regressor as model


        def batch(size):
            return torch.randn(size, 32, 64), torch.randn(size)


        def loss(model, batch):
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        """,
        target=256,
        largest=128,
    ),
}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the scripts, with `python` and `torchrun` as this Python."""
    folder = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def plan(command: Command, folder: Path, *words: str) -> dict[str, Any]:
    """Return the plan of a command, or of a workload, which leaves no file behind."""
    before = files_in(folder)
    done = command(folder, "plan", "--json", *words)
    assert done.returncode == 0, done.stderr
    assert files_in(folder) == before
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def plan_both(command: Command, folder: Path, script: Script, *device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plan of a script, and that of its workload in the same micro-batches, as one rank trains it."""
    target = [] if script.target is None else ["--target-batch", str(script.target)]
    sizes = [*target, "--max-micro-batch", str(script.largest)]
    of_ranks = ["--world-size", str(script.ranks)]
    of_command = plan(command, folder, *device, *sizes, *of_ranks, "--", *script.command.split())
    (folder / "workload.py").write_text(dedent(script.workload))
    micro_batch, iter_size = of_command["micro_batch"], of_command["iter_size"]
    sizes = ["--max-micro-batch", str(micro_batch), "--target-batch", str(micro_batch * iter_size), "--equal"]
    return of_command, plan(command, folder, *device, *sizes, "workload.py")


@pytest.mark.parametrize("name", ["nanogpt", "torchrun"])
def test_trials_take_what_the_workload_takes(command: Command, scripts: Path, name: str) -> None:
    script = RUN[name]
    of_command, of_workload = plan_both(
        command, scripts / script.folder, script, "--device", "cpu", "--memory", script.memory
    )
    assert of_command["kind"] == "measured"
    assert of_command["micro_batch"] == of_workload["micro_batch"] == (8 if name == "nanogpt" else script.largest)
    expected = of_workload["peak_bytes"] + buckets(script, of_command)
    assert of_command["peak_bytes"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", RUN)
def test_predicts_what_the_workload_takes(command: Command, scripts: Path, name: str) -> None:
    script = RUN[name]
    of_command, of_workload = plan_both(command, scripts / script.folder, script, "--gpu", "rtx3090")
    assert of_command["kind"] == "predicted"
    assert of_command["micro_batch"] == of_workload["micro_batch"]
    assert of_command["iter_size"] == of_workload["iter_size"]
    peaks = [answer["trials"][-1]["peak_allocated_bytes"] for answer in (of_command, of_workload)]
    assert peaks[0] == pytest.approx(peaks[1] + buckets(script, of_command), rel=0.02)


def buckets(script: Script, plan: dict[str, Any]) -> int:
    """Return the bytes of DDP's copies of the gradients, which are there beside what one rank has."""
    copies: int = plan["workload"]["parameter_bytes"] if script.ranks > 1 else 0
    return copies
