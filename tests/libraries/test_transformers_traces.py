"""Models of transformers on a simulated card: those that read values, and those that a loader's threads put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_transformers import llama

from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, TraceParts
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from autoaccum.sources.source import FileSource

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
WAV2VEC2 = """
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

def model():
    return Wav2Vec2ForCTC(Wav2Vec2Config(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2))

def batch(n):
    return {"input_values": torch.randn(n, 800), "attention_mask": (torch.arange(800) < 500).long().repeat(n, 1),
            "labels": torch.randint(1, 20, (n, 8))}

def loss(model, batch):
    return model(**batch).loss
"""
MODELS = {"detr": DETR, "wav2vec2": WAV2VEC2}


def trace(path: Path, **options: Any) -> Trace:
    child, card = SimulatedChild(), find_card("rtx3090")
    try:
        source = FileSource(str(path)).to_record()
        child.handle(LoadOnCard(card=card, source=source, rank_samples=8, options=options))
        made = child.handle(TraceParts(parts=(2, 2)))
    finally:
        child.close()
    assert isinstance(made, Trace), made
    return made


@pytest.mark.parametrize("name", MODELS)
def test_it_is_traced_with_the_values_that_it_reads(name: str, tmp_path: Path) -> None:
    (path := tmp_path / f"{name}.py").write_text(f"import torch\n{MODELS[name]}")
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


def test_a_checkpoint_that_is_loaded_onto_the_card_takes_as_much_there(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    traced = []
    for how in ("", ', device_map={"": 0}'):
        (path := tmp_path / "model.py").write_text(LOADED.format(folder=str(tmp_path / "llama"), how=how))
        traced.append(trace(path))
    moved, loaded = traced
    of_update = [[size for size in each.sizes[-100:] if isinstance(size, int)] for each in (moved, loaded)]
    assert of_update[0] == of_update[1]
