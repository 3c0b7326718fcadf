"""`verify` of training commands around other libraries, which accumulate rightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoaccum.api import verify

SCRIPTS = Path(__file__).parent / "commands"


@pytest.mark.parametrize(
    ("script", "micro_batch", "iter_size"),
    [
        ("trainer.py --output_dir out --use_cpu", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ("accelerate_loop.py --cpu", "batch_size", "gradient_accumulation_steps"),
        ("lightning_cli.py --accelerator cpu", "batch-size", "accumulate"),
    ],
)
def test_a_framework_accumulates_rightly(
    script: str, micro_batch: str, iter_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--{micro_batch}", "{micro_batch}", f"--{iter_size}", "{iter_size}"]
    name, *options = script.split()
    found = verify([sys.executable, str(SCRIPTS / name), *options, *words], target_batch=8)
    assert found.equivalent
    assert found.comparisons[0].gradients.error < 1e-4
