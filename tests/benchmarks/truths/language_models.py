"""Language models by name, as xMem trained them: what their published `config.json` says, as far as memory goes.

There, transformers 4.51.3 built them; another release casts, masks and caches in other places, which costs or saves a
few percent. Weights do not matter. Only what differs from the defaults of the configuration's class is written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from truths.scores import NotBuilt

_LENGTH: Final = 128
_SOME_TOKENS: Final = 1000
_EAGER_TYPES: Final = frozenset({"t5", "gpt_neo", "bloom"})
"""Those whose attention transformers 4.51.3 writes out: `_supports_sdpa` is not set in their `modeling_*.py`."""


Architecture = tuple[str, Mapping[str, Any]]
"""The type of a model, as `AutoConfig.for_model` takes it, and settings of its configuration."""


def build_language_model(name: str) -> nn.Module:
    """Build the model of that name, with or without who published it, with the attention that 4.51.3 chose for it."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = configuration_of(name)
    kind = config.model_type
    made = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    attention = "eager" if kind in _EAGER_TYPES else "sdpa"
    model: nn.Module = made.from_config(config, attn_implementation=attention)
    return model


def configuration_of(name: str) -> Any:
    """The configuration of the model of that name."""
    import transformers

    kind, settings = _KNOWN[short_name(name)]
    return transformers.AutoConfig.for_model(kind, **settings)


def short_name(name: str) -> str:
    """The name under which a model is known here.

    >>> short_name("openai-community/gpt2")
    'gpt2'

    Raises:
        NotBuilt: It is not.
    """
    short = name.lower().rpartition("/")[2]
    if short not in _KNOWN:
        raise NotBuilt(f"no configuration of {name}")
    return short


def make_tokens(batch: int) -> Mapping[str, Tensor]:
    """Tokens padded to one length; which of them are padding, nobody reads."""
    tokens = torch.randint(0, _SOME_TOKENS, (batch, _LENGTH))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def loss_of_tokens(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """The model's own loss, and its outputs."""
    outputs = model(**batch)
    return outputs.loss, outputs


def _gpt2(layers: int, width: int, heads: int, **settings: Any) -> Architecture:
    return "gpt2", {"n_layer": layers, "n_embd": width, "n_head": heads, **settings}


def _cerebras(layers: int, width: int, heads: int) -> Architecture:
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return _gpt2(layers, width, heads, n_inner=4 * width, n_positions=2048, activation_function="gelu", **none)


def _gpt_neo(layers: int, width: int, heads: int) -> Architecture:
    kinds = [[["global", "local"], layers // 2]]
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": heads}
    return "gpt_neo", {**sizes, "attention_types": kinds, "window_size": 256}


def _opt(layers: int, width: int, heads: int, **settings: Any) -> Architecture:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "ffn_dim": 4 * width, "num_attention_heads": heads}
    return "opt", {"vocab_size": 50272, "word_embed_proj_dim": width, **sizes, **settings}


def _pythia(layers: int, width: int, heads: int) -> Architecture:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return "gpt_neox", {"vocab_size": 50304, "intermediate_size": 4 * width, **sizes}


def _t5(layers: int, width: int, inner: int, heads: int, **settings: Any) -> Architecture:
    sizes = {"num_layers": layers, "d_model": width, "d_ff": inner, "num_heads": heads, "d_kv": 64}
    return "t5", {"vocab_size": 32128, "decoder_start_token_id": 0, **sizes, **settings}


def _llama(
    layers: int, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int, kind: str = "llama", **more: Any
) -> Architecture:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return kind, {"tie_word_embeddings": True, **sizes, **more}


_GATED: Final = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

_KNOWN: Final[Mapping[str, Architecture]] = {
    "distilgpt2": _gpt2(6, 768, 12),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "cerebras-gpt-111m": _cerebras(10, 768, 12),
    "cerebras-gpt-256m": _cerebras(14, 1088, 17),
    "cerebras-gpt-590m": _cerebras(18, 1536, 12),
    "gpt-neo-125m": _gpt_neo(12, 768, 12),
    "gpt-neo-1.3b": _gpt_neo(24, 2048, 16),
    "opt-125m": _opt(12, 768, 12),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(24, 2048, 32),
    "pythia-14m": _pythia(6, 128, 4),
    "pythia-31m": _pythia(6, 256, 8),
    "pythia-70m": _pythia(6, 512, 8),
    "pythia-160m": _pythia(12, 768, 12),
    "pythia-410m": _pythia(24, 1024, 16),
    "pythia-1b": _pythia(16, 2048, 8),
    "bloom-560m": ("bloom", {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "flan-t5-small": _t5(8, 512, 1024, 6, **_GATED),
    "flan-t5-base": _t5(12, 768, 2048, 12, **_GATED),
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 49152),
    "smollm2-360m": _llama(32, 960, 2560, 15, 5, 49152),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 128256, head_dim=64),
    "tinyllama-1.1b-chat-v1.0": _llama(22, 2048, 5632, 32, 4, 32000, tie_word_embeddings=False),
    "qwen2.5-0.5b": _llama(24, 896, 4864, 14, 2, 151936, "qwen2"),
    "qwen2.5-1.5b": _llama(28, 1536, 8960, 12, 2, 151936, "qwen2"),
    "deepseek-r1-distill-qwen-1.5b": _llama(28, 1536, 8960, 12, 2, 151936, "qwen2", tie_word_embeddings=False),
    "qwen3-0.6b": _llama(28, 1024, 3072, 16, 8, 151936, "qwen3", head_dim=128),
}
