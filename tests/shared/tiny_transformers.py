"""Models of transformers with tiny random configurations."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Transformers:
    """The library, imported where it is used, since it takes each worker of pytest seconds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("transformers"), name)


hf: Any = _Transformers()
WORDS = 64
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIDES: dict[str, Any] = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
} | {"vocab_size": WORDS, "d_model": 16, "dropout": 0.0, "use_cache": False}


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=2, use_cache=False))


def gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config)


def bert(head: str = "SequenceClassification", **settings: Any) -> Any:
    return getattr(hf, f"BertFor{head}")(hf.BertConfig(**SIZES, vocab_size=WORDS, **settings))


def t5() -> Any:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
    )
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = hf.WhisperConfig(
        **SIDES, num_mel_bins=8, max_source_positions=10, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def vit() -> Any:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, **NO_DROPOUT, image_size=16, patch_size=8))
