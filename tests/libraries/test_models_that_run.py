"""Models as users of each library train them, tiny and with random weights: plan --gpu and verify, and guard for some.

`models/` has a workload file for each, and examples/docs/guides/workload_file.md a row.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import ROOT, Command, environment
from warm_children import WarmPython

from autoaccum.guarding.lock import read_lock

MODELS = Path(__file__).parent / "models"
IMPORTED = (
    *("transformers.models.llama.modeling_llama", "transformers.models.clip.modeling_clip", "peft", "torchvision"),
    *("diffusers.models.unets.unet_2d_condition", "diffusers.schedulers.scheduling_ddpm", "ultralytics.nn.tasks"),
    "torch_geometric.nn",
)
CARD = ("--gpu", "rtx4090", "--target-batch", "15")  # In parts of 5, which is a size that every plan traces.


@dataclass(frozen=True)
class Expected:
    """What is said of a model: a warning of its plan, and where it is not exact, the cause and the change, by codes."""

    warning: str | None = None
    precision: str = "fp64"
    cause: str | None = None
    change: str = ""
    values: bool = False


RUN = {
    "llama_lora.py": Expected(),
    "qlora.py": Expected(precision="fp32"),
    "linear_4bit.py": Expected(precision="fp32"),
    "linear_8bit.py": Expected(precision="fp32"),
    "clip.py": Expected(),
    "clip.py:usual": Expected(warning="compares_samples", cause="coupled model", change="look_at_one_sample"),
    "dpo.py": Expected(),
    "unet.py": Expected(),
    "deeplab.py": Expected(),
    "faster_rcnn.py": Expected(values=True, cause="unknown", change="narrow_down"),
    "yolo.py": Expected(values=True, cause="unknown", change="narrow_down"),
    "gnn.py": Expected(),
    "lstm.py": Expected(),
    "gan.py:generator": Expected(),
    "gan.py:discriminator": Expected(),
    "ppo.py": Expected(),
    "ppo.py:usual": Expected(cause="coupled loss", change="compute_loss_once"),
    "adamw8bit.py": Expected(),
    "compiled.py": Expected(warning="compiled"),
}

VALUES = "a simulated card computes no values"
REFUSED = {
    "lstm.py:usual": "batch[0] has the length 3, batch[1][0] has 2: give every tensor the samples as first dimension",
    "faster_rcnn.py": VALUES,
    "yolo.py": VALUES,
}
SMALL = 256 * 10 + 1024 + 256 + 10
"""Numbers of `adamw8bit.py` in tensors of less than 4096, whose states stay in float32."""
BYTES = {
    # Packed weights; scales of a byte for 64 and of 4 for 256 of these, and their mean; code books; biases; the head.
    "linear_4bit.py": {
        "parameters": 2 * (256 * 512 // 2 + 2048 + 8 * 4 + 4 + 16 * 4) + 3 * 256 * 4 + 2 * (512 + 256) + 4 * 2570,
        "gradients": 4 * 2570,
        "optimizer_state": 8 * 2570,
    },
    # A byte for each weight, and a scale for each row; its bias; what trains.
    "linear_8bit.py": {"parameters": 256 * 512 + 4 * 512 + 4 * 512 + 4 * (257 * 256 + 513 * 10)},
    # A byte for each number of both states, and 4 for 256 of these; two code books.
    "adamw8bit.py": {"optimizer_state": 2 * (2 * 256 * 1024 + 4 * 2048) + 8 * SMALL + 2 * 256 * 4},
    # The policy and its reference, each with two tables of rotary positions of 8 numbers, and no states of the latter.
    "dpo.py": {"parameters": 2 * 4 * (90_432 + 16), "gradients": 4 * 90_432, "optimizer_state": 8 * 90_432},
    # The adapters alone: two of rank 4 in each of two layers.
    "llama_lora.py": {"gradients": 4 * 896, "optimizer_state": 8 * 896},
}
COMPARED = ("linear_4bit.py", "adamw8bit.py", "lstm.py")
"""Measured once more, by other processes, since code of bitsandbytes and cuDNN's layers keep tensors of their own."""


def copy_file(name: str, folder: Path) -> None:
    file = name.partition(":")[0]
    shutil.copy((ROOT / "examples" if file == "gan.py" else MODELS) / file, folder)


@pytest.mark.parametrize("name", RUN)
def test_a_model_is_planned_and_verified(name: str, tmp_path: Path, command: Command, warm_python: WarmPython) -> None:
    expected = RUN[name]
    copy_file(name, tmp_path)
    values = ("--values", "cpu") if expected.values else ()
    planned = command(tmp_path, "plan", name, *CARD, *values, "--max-micro-batch", "5", "--json", "-q")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["kind"], plan["micro_batches"]) == ("predicted", [5, 5, 5])
    assert [warning["code"] for warning in plan["warnings"]] == ([] if expected.warning is None else [expected.warning])

    words = f"-m autoaccum verify {name} --target-batch 6 --json -q".split()
    verified = warm_python(tmp_path, *words, environment=environment())
    assert verified.returncode == (0 if expected.cause is None else 1), verified.stderr
    found = json.loads(verified.stdout)
    assert (found["equivalent"], found["precision"]) == (expected.cause is None, expected.precision)
    assert [one["kind"] for one in found["causes"]] == ([] if expected.cause is None else [expected.cause])
    assert all(cause["change"]["code"] == expected.change for cause in found["causes"])


@pytest.mark.parametrize("name", sorted({*BYTES, *COMPARED}))
def test_a_model_is_guarded(name: str, tmp_path: Path, command: Command) -> None:
    copy_file(name, tmp_path)
    locked = command(tmp_path, "guard", name, *CARD, "--micro-batch", "5", "--update", "-q")
    assert locked.returncode == 0, locked.stdout
    if name in COMPARED:
        guarded = command(tmp_path, "guard", "-q")
        assert (guarded.returncode, guarded.stdout.partition(":")[0]) == (0, "passed")
    (measured,) = read_lock(tmp_path / "autoaccum.lock").values()
    held = Counter[str]()
    for holding in measured.holdings:
        held[holding.category] += holding.bytes
    assert {category: held[category] for category in BYTES.get(name, {})} == BYTES.get(name, {})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_a_way_out(name: str, tmp_path: Path, command: Command) -> None:
    copy_file(name, tmp_path)
    refused = command(tmp_path, "plan", name, *CARD, "-q")
    assert refused.returncode == 2
    assert REFUSED[name] in refused.stderr
    assert "Traceback" not in refused.stderr
    if REFUSED[name] == VALUES:
        assert "--values cpu" in refused.stderr
