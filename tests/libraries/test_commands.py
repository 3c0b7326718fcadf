"""The training commands of other libraries: planned as they are and as workload files that train the same; verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from command_line import Command

from autoaccum.api import verify

IMPORTED = ("lightning", "accelerate", "transformers.trainer")
COMMANDS = Path(__file__).parent / "commands"
SIZES = "--target-batch", "10", "--max-micro-batch", "5"  # One of those that show how memory grows.
ACCUMULATES = "--gradient_accumulation_steps {iter_size}"


@dataclass(frozen=True)
class Script:
    """A command of a library, and the same training as a workload file.

    Attributes:
        command: The command.
        workload: The file.
        files: The script that writes the files it reads.
        name: The name of the workload in its file, if it needs one.
    """

    command: str
    workload: str
    files: str = ""
    name: str = ""


RUN = {
    "lightning": Script(
        "python lightning_cli.py --batch-size {micro_batch} --accumulate {iter_size} --accelerator gpu",
        """
        import torch
        from lightning_cli import LitAutoEncoder as model


        def batch(size):
            return torch.rand(size, 1, 28, 28)


        def loss(model, batch):
            return torch.nn.functional.mse_loss(model.decoder(model.encoder(batch)), batch.flatten(1))
        """,
    ),
    "accelerate": Script(
        f"accelerate launch --num_processes 1 accelerate_loop.py --batch_size {{micro_batch}} {ACCUMULATES}",
        """
        import torch
        from accelerate_loop import TextClassifier as model


        def batch(size):
            return torch.randint(1000, (size, 64)), torch.randint(2, (size,))


        def loss(model, batch):
            return model(*batch)[0]
        """,
    ),
    "trl": Script(
        "trl sft --model_name_or_path files/model --dataset_name files/data --output_dir out --report_to none"
        " --max_length 128 --packing --packing_strategy wrapped"
        f" --per_device_train_batch_size {{micro_batch}} {ACCUMULATES}",
        """
        from datasets import load_dataset
        from trl import SFTConfig, SFTTrainer

        how = {"max_length": 128, "packing": True, "packing_strategy": "wrapped"}
        arguments = SFTConfig(output_dir="out", report_to=[], disable_tqdm=True, **how)
        trainer = SFTTrainer("files/model", arguments, train_dataset=load_dataset("files/data")["train"])
        """,
        files="make_trl_files.py",
        name="trainer",
    ),
}
YOLO = (
    "env -u PYTEST_CURRENT_TEST yolo "  # By that, ultralytics would write its runs into site-packages.
    "detect train model=yolo11n.yaml data=files/data.yaml imgsz=64 pretrained=False amp=False plots=False"
    " val=False warmup_epochs=0 epochs=8 optimizer=SGD workers=1 nbs=1 batch={micro_batch}"
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the scripts, with the programs beside this Python."""
    folder = tmp_path / "commands"
    shutil.copytree(COMMANDS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(folder / "files"))
    return folder


def plan(command: Command, folder: Path, *words: str) -> dict[str, Any]:
    done = command(folder, "plan", "--json", *words)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def write_files(folder: Path, script: str) -> None:
    if script:
        subprocess.run([sys.executable, script, "files"], cwd=folder, check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("name", RUN)
def test_predicts_what_the_workload_takes(command: Command, commands: Path, name: str) -> None:
    script = RUN[name]
    write_files(commands, script.files)
    of_command = plan(command, commands, "--gpu", "rtx3090", *SIZES, "--", *script.command.split())
    (commands / "workload.py").write_text(dedent(script.workload))
    workload = ":".join(filter(None, ("workload.py", script.name)))
    of_workload = plan(command, commands, "--gpu", "rtx3090", *SIZES, "--equal", workload)
    assert of_command["kind"] == "predicted"
    assert of_command["micro_batches"] == of_workload["micro_batches"] == [5, 5]
    peaks = [answer["trials"][-1]["peak_allocated_bytes"] for answer in (of_command, of_workload)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_yolo_has_batches_without_accumulation(command: Command, commands: Path) -> None:
    """Its first call finds out by zeros how far it scales images down; the values it reads decide shapes."""
    write_files(commands, "make_yolo_files.py")
    where = ["--gpu", "rtx3090", "--values", "cpu", "--max-micro-batch", "8"]
    of_command = plan(command, commands, *where, "--", *YOLO.split(), "device=0")
    assert of_command["micro_batches"] == [8]
    assert of_command["workload"]["model"] == "DetectionModel"


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("script", "micro_batch", "iter_size"),
    [
        ("trainer.py --output_dir out --use_cpu", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ("accelerate_loop.py --cpu", "batch_size", "gradient_accumulation_steps"),
        ("lightning_cli.py --accelerator cpu", "batch-size", "accumulate"),
    ],
)
def test_a_framework_accumulates_rightly(
    script: str, micro_batch: str, iter_size: str, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(commands)
    words = [f"--{micro_batch}", "{micro_batch}", f"--{iter_size}", "{iter_size}"]
    found = verify([sys.executable, *script.split(), *words], target_batch=8)
    assert found.equivalent
    assert found.comparisons[0].gradients.error < 1e-4
