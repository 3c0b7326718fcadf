"""A Trainer of TRL, whose loss runs kernels of Triton and logs values of the card, is planned on a simulated card."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command

from autoaccum import Plan
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.simulation.releases import holds
from autoaccum.units import KIB

IMPORTED = ("trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama")
# Of cuBLAS, as PyTorch gives it: up to 2.14, the thread of forward passes and autograd's keep their own.
WORKSPACES = 8_519_680 * (1 if holds("workspace_of_each_product", read_torch_release()) else 2)
TILE = (18 + 17 + 16 + 15) * 32_768 * 2
"""TRL's logits in bfloat16: of the four longest texts, the tokens that are predicted."""
FILE = """
from datasets import Dataset
from tiny_transformers import llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_list([{"input_ids": [2 + number % 60] * (4 + number)} for number in range(16)])
arguments = SFTConfig(output_dir="out", report_to=[], disable_tqdm=True)
trainer = SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer)
"""


def test_a_fine_tuning_by_trl_is_planned(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(FILE)
    words = ("--gpu", "rtx4090", "--target-batch", "8", "--max-micro-batch", "4", "-o", "plan.json")
    done = command(tmp_path, "plan", "train.py:trainer", *words)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.kind, plan.micro_batches) == ("predicted", (4, 4))
    # A Trainer of transformers with the same model and data has a peak that is nearly all cuBLAS's
    # workspaces. TRL adds one tile, into which each product is written, as wide for a small vocabulary as for any.
    peak = plan.trials[-1].peak_allocated_bytes
    assert peak is not None
    assert TILE < peak - WORKSPACES < TILE + 512 * KIB


PACKED = "import warnings\nwarnings.simplefilter('ignore')\n" + FILE.replace(
    "disable_tqdm=True)", "disable_tqdm=True, use_cpu=True, bf16=False, packing=True, max_length=32)"
)


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("plan", ["--gpu", "rtx4090", "--max-micro-batch", "2", "-o", "plan.json"], "Trainer(..., plan='plan.json')"),
        ("verify", ["--micro-batch", "2"], "equivalent: "),
    ],
)
def test_packed_sequences_are_collated_in_parts(
    name: str, words: list[str], says: str, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "train.py").write_text(PACKED)
    done = command(tmp_path, name, "train.py:trainer", "--target-batch", "4", *words)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
