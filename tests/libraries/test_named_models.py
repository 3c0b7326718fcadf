"""Models of transformers by name, from configurations that are here: verified when small, of real sizes as arithmetic.

`configs/` has what matters of the published files: the fields that a size hangs on.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from in_process_tracer import InProcessTracer
from rank_truth import live, start_of

import autoaccum
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.breakdown import classify_blocks
from autoaccum.devices.simulated.simulation_requests import LabelParts
from autoaccum.errors import WorkloadError
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import find_source

pytestmark = [pytest.mark.usefixtures("warm_children"), pytest.mark.filterwarnings("ignore::FutureWarning")]
CONFIGS = Path(__file__).parent / "configs"
_KINDS = ("qwen2", "llama", "mistral", "qwen3_moe", "gpt2", "bert", "t5", "vit", "whisper", "wav2vec2", "qwen2_5_vl")
IMPORTED = (
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS),
    *("peft", "bitsandbytes", "transformers.integrations.sdpa_attention", "transformers.quantizers.base"),
)

ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**ENCODER, **WORDS, "num_key_value_heads": 2}
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
PAIR = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
SPEECH = {
    f"{side}_{what}": number
    for side in ("encoder", "decoder")
    for what, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
} | {"d_model": 32, "num_mel_bins": 16, "max_source_positions": 20, "pad_token_id": 0, "decoder_start_token_id": 1}
WAVES = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
SIGHT = {
    "vision_config": {"depth": 2, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "num_heads": 4}
    | {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32},
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "image_token_id": 127,
}
SMALL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Qwen2.5-7B", DECODER, {"lora": 4, "load_in_4bit": True, "double_quant": True}),
    ("Llama-3.1-8B", DECODER, {"padding": True, "gradient_checkpointing": True}),
    ("Mistral-7B-v0.3", DECODER, {"lora": 4, "load_in_8bit": True, "lora_targets": "all-linear"}),
    ("Qwen3-30B-A3B", DECODER | EXPERTS, {"repeat_kv": True}),
    ("gpt2", WORDS | {"n_embd": 64, "n_layer": 2, "n_head": 4}, {"lora": 4, "lora_dropout": 0.1}),
    ("bert-base-uncased", ENCODER | WORDS, {"padding": True}),
    ("bert-base-uncased", ENCODER | WORDS, {"task": "TokenClassification", "optimizer": "AdamW8bit"}),
    ("Qwen2.5-1.5B-Instruct", DECODER, {"task": "SequenceClassification", "padding": True}),
    ("t5-base", PAIR | {"vocab_size": 128}, {"padding": True}),
    ("vit-base-patch16-224-in21k", ENCODER | {"patch_size": 8}, {"image_size": 32}),
    ("whisper-small", SPEECH | WORDS, {}),
    ("wav2vec2-base", ENCODER | WAVES, {"seconds": 0.05}),
    ("wav2vec2-base", ENCODER | WAVES, {"seconds": 0.05, "task": "AudioClassification"}),
    ("Qwen2.5-VL-3B-Instruct", DECODER | SIGHT, {"image_size": 32}),
]


@pytest.mark.parametrize(("name", "sizes", "parameters"), SMALL)
def test_an_update_of_a_small_one_is_the_full_batch(
    name: str, sizes: dict[str, Any], parameters: dict[str, Any], tmp_path: Path
) -> None:
    published = json.loads((CONFIGS / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | sizes))
    parameters = {"length": 24, "target_length": 12, "dtype": "float32", **parameters}
    result = autoaccum.verify(f"hf:{tmp_path}", target_batch=4, micro_batch=2, overrides=parameters)

    assert result.equivalent
    in_float32 = "load_in_4bit" in parameters or "load_in_8bit" in parameters or "moe" in published["model_type"]
    assert result.precision == ("fp32" if in_float32 else "fp64")


@dataclass(frozen=True)
class Real:
    """A model as it is published, on a card, and what it holds there.

    Attributes:
        card: The card.
        held: Bytes of parameters and buffers.
        trained: Numbers that are trained.
        itemsize: Bytes of each of them; as many has its gradient, and twice as many its state.
        parameters: Those of the model by name.
    """

    card: str
    held: int
    trained: int
    itemsize: int = 4
    parameters: dict[str, Any] = field(default_factory=dict)


ROTARY = 2 * 64 * 4
"""Bytes of two tables of frequencies, for heads of 128."""
QWEN = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944)
MISTRAL = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
"""Weights of the linear layers, all but the head."""
QWEN_LORA, MISTRAL_LORA = 28 * 16 * (3 * 3584 + 512), 32 * 8 * (3 * 4096 + 1024)
"""Adapters of q_proj and v_proj."""
REAL = {
    # Packed weights; a scale for 64 of these; code books; biases, which become half; the rest in float32.
    "Qwen2.5-7B": Real(
        card="t4",
        held=QWEN // 2
        + 4 * QWEN // 64
        + 28 * (7 * 64 + 2 * (3584 + 2 * 512))
        + 4 * ((2 * 28 + 1) * 3584 + 2 * 152_064 * 3584 + QWEN_LORA)
        + ROTARY,
        trained=QWEN_LORA,
        parameters={"lora": 16, "load_in_4bit": True},
    ),
    # A byte for each weight, and a scale for each row.
    "Mistral-7B-v0.3": Real(
        card="rtx4090",
        held=MISTRAL
        + 4 * 32 * (3 * 4096 + 2 * 1024 + 2 * 14336)
        + 4 * ((2 * 32 + 1) * 4096 + 2 * 32_768 * 4096 + MISTRAL_LORA)
        + ROTARY,
        trained=MISTRAL_LORA,
        parameters={"lora": 8, "load_in_8bit": True},
    ),
    "Llama-3.1-8B": Real(
        card="a100-40gb",
        held=2 * 8_030_261_248 + 4 * MISTRAL_LORA + ROTARY,
        trained=MISTRAL_LORA,
        parameters={"lora": 8},
    ),
    "Qwen3-30B-A3B": Real(
        card="h200",
        held=2 * 30_532_122_624 + 4 * 48 * 8 * (2048 + 4096 + 2048 + 512) + ROTARY,
        trained=48 * 8 * (2048 + 4096 + 2048 + 512),
        parameters={"lora": 8, "lora_targets": "q_proj v_proj"},
    ),
    "Qwen2.5-VL-3B-Instruct": Real(
        card="h100",
        held=2 * 3_754_622_976 + ROTARY + 2 * 20 * 4,
        trained=3_754_622_976,
        itemsize=2,
        parameters={"image_size": 112},
    ),
    "gpt2": Real("rtx4090", held=4 * 124_439_808, trained=124_439_808),
    "bert-base-uncased": Real("rtx4090", held=4 * 109_514_298 + 2 * 512 * 8, trained=109_514_298),
    "t5-base": Real("rtx4090", held=4 * 222_903_552, trained=222_903_552),
    "vit-base-patch16-224-in21k": Real("rtx4090", held=4 * 85_806_346, trained=85_806_346),
    # The positions of its encoder are not trained.
    "whisper-small": Real("rtx4090", held=4 * 241_734_912, trained=241_734_912 - 1500 * 768),
    # Without the vector that stands for masked frames.
    "wav2vec2-base": Real(
        "rtx4090", held=4 * (94_396_320 - 768), trained=94_396_320 - 768, parameters={"seconds": 5.0}
    ),
}
"""Numbers of parameters are those of the published checkpoints."""


@pytest.mark.parametrize("name", REAL)
def test_one_of_real_size_takes_what_arithmetic_says(name: str) -> None:
    real = REAL[name]
    source = find_source(f"hf:{CONFIGS / name}", {"length": 512, "target_length": 64, **real.parameters})
    tracer = InProcessTracer(TrialSettings(source=source, rank_samples=2), find_card(real.card))
    try:
        traced = tracer.call(LabelParts(parts=(2,)))
    finally:
        tracer.close()

    uses, held = classify_blocks(traced), Counter[str]()
    for block, size in live(traced.trace, start_of(traced, "update")).items():
        held[uses[block].category] += size
    assert held["parameters"] == real.held
    assert held["gradients"] == real.itemsize * real.trained
    assert held["optimizer_state"] == 2 * real.itemsize * real.trained


@pytest.mark.parametrize(
    ("config", "parameters", "text"),
    [
        ("gpt2", {"length": 2048}, "length is 2048, and .* has positions for 1024 tokens"),
        ("gpt2", {"task": "MaskedLM"}, "no model for task MaskedLM of a gpt2: the tasks are auto"),
        ("gpt2", {"task": "text-generation"}, "no model for task text-generation of a gpt2: the tasks are auto"),
        ("gpt2", {"dtype": "bf16"}, "set it to auto, float32, bfloat16 or float16"),
        ("gpt2", {"optimizer": "Adam9"}, "neither torch.optim nor bitsandbytes.optim has"),
        ("Qwen2.5-7B", {"load_in_4bit": True}, "quantized weights are not trained: set lora"),
        ("Qwen2.5-VL-3B-Instruct", {"image_size": 448}, "an image of 448 pixels takes 256 tokens"),
        ({"model_type": "sam"}, {}, "no model for task auto of a sam: the tasks are auto, ImageTextToText"),
        ({"model_type": "llava_next"}, {}, "is a llava_next, and this file makes images for qwen2_vl"),
        ({"model_type": "speech_to_text"}, {}, "does not know the sound that it takes"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, {}, "is quantized by gptq"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(
    config: str | dict[str, Any], parameters: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = tmp_path if isinstance(config, dict) else CONFIGS / config
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkloadError, match=text):
        find_source(f"hf:{folder}", {"length": 200} | parameters).load()


def test_without_network_and_cache_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WorkloadError, match="no configuration of 'nobody/nothing'.*give a folder with a config.json"):
        find_source("hf:nobody/nothing").load()
