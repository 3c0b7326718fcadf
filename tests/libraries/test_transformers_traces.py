"""Models of transformers on a simulated card: those that read values, and those that a loader's threads put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_transformers import llama
from watched_scripts import WatchedScript

from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, TraceParts
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from autoaccum.sources.source import FileSource, Source, find_source

DETR = """
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

def model():
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    layers = {f"{part}_{name}": value for part in ("encoder", "decoder")
              for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}
    return DetrForObjectDetection(DetrConfig(
        backbone_config=backbone, backbone=None, use_timm_backbone=False, use_pretrained_backbone=False, d_model=16,
        num_queries=6, num_labels=4, **layers))

def batch(n):
    return torch.randn(n, 3, 32, 32), torch.rand(n, 3, 4) * 0.4 + 0.2, torch.randint(0, 4, (n, 3))

def loss(model, batch):
    images, boxes, labels = batch
    return model(images, labels=[{"class_labels": label, "boxes": box} for label, box in zip(labels, boxes)]).loss
"""


def trace(workload: Path | Source, **options: Any) -> Trace:
    child, card = SimulatedChild(), find_card("rtx3090")
    try:
        source = (FileSource(str(workload)) if isinstance(workload, Path) else workload).to_record()
        child.handle(LoadOnCard(card=card, source=source, rank_samples=8, options=options))
        made = child.handle(TraceParts(parts=(2, 2)))
    finally:
        child.close()
    assert isinstance(made, Trace), made
    return made


def test_it_is_traced_with_the_values_that_it_reads(tmp_path: Path) -> None:
    (path := tmp_path / "detr.py").write_text(f"import torch\n{DETR}")
    traced = trace(path, values="cpu")
    assert traced.reads > 0
    assert traced.batch == 2


LOADED = """
import torch
from transformers import LlamaForCausalLM

def model():
    return LlamaForCausalLM.from_pretrained({folder!r}{how})

def batch(n):
    ids = torch.randint(0, 30, (n, 8))
    return {{"input_ids": ids, "labels": ids}}

def loss(model, batch):
    return model(**batch).loss
"""


QUANTIZED = """
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

def model():
    how = {{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float16}}
    made = transformers.AutoModelForCausalLM.from_pretrained(
        {folder!r}, device_map={{"": 0}}, dtype=torch.float16,
        quantization_config=transformers.BitsAndBytesConfig(**how))
    made = prepare_model_for_kbit_training(made, gradient_checkpointing_kwargs={{"use_reentrant": False}})
    return get_peft_model(made, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

def batch(n):
    ids = torch.randint(0, 30, (n, 8))
    return {{"input_ids": ids, "labels": ids}}

def loss(model, batch):
    return model(**batch).loss
"""
SCRIPT = """
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained({folder!r}, device_map={{"": 0}})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 30, (2, 8), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def blocks_of(trace: Trace, *phases: str) -> list[Any]:
    """What is allocated in these phases."""
    ends = [begin for begin, _ in trace.phases[1:]] + [len(trace.events)]
    ranges = [range(begin, end) for (begin, phase), end in zip(trace.phases, ends, strict=True) if phase in phases]
    events = [trace.events[event] for each in ranges for event in each]
    return [trace.sizes[event] for event in events if event >= 0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    llama().save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    return str(tmp_path / "llama")


def test_a_checkpoint_that_is_loaded_onto_the_card_takes_as_much_there(checkpoint: str, tmp_path: Path) -> None:
    traced = []
    for how, options in (("", {}), (', device_map={"": 0}', {}), (', device_map={"": 0}', {"values": "cpu"})):
        (path := tmp_path / "model.py").write_text(LOADED.format(folder=checkpoint, how=how))
        traced.append(trace(path, **options))
    moved, loaded, computed = traced
    steps = "forward", "backward", "update"
    assert blocks_of(moved, *steps) == blocks_of(loaded, *steps)
    assert blocks_of(loaded, "model") == blocks_of(computed, "model")
    weights = sum(4 * weight.numel() for weight in llama().parameters())
    assert blocks_of(loaded, "model")[0] == weights  # transformers warms up the allocator.


def test_a_quantized_model_by_name_is_loaded_like_a_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(QUANTIZED.format(folder=checkpoint))
    sizes: dict[str, Any] = {"load_in_4bit": True, "lora": 4, "lora_targets": "q_proj,v_proj", "length": 8}
    named = trace(find_source(f"hf:{checkpoint}", sizes | {"dtype": "float16", "task": "CausalLM"}))
    assert blocks_of(named, "model") == blocks_of(trace(path), "model")


def test_a_script_loads_a_checkpoint_onto_the_card(checkpoint: str, tmp_path: Path) -> None:
    report = WatchedScript(tmp_path / "script", SCRIPT.format(folder=checkpoint), parts=(2,)).report()
    assert report.failure is None, report.failure
    assert report.simulated is not None
    traced = report.simulated.trace
    assert traced is not None
    assert [phase for _, phase in traced.phases].count("update") == 3
    assert blocks_of(traced, "model")[0] == sum(4 * weight.numel() for weight in llama().parameters())
