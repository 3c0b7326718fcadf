"""What fitcheck and accelerate state of a measured run, by their released packages, without a network.

`accelerate estimate-memory` asks the hub for the model first, and fitcheck for the number of its parameters. So both
are called below that: with the configuration that is here, and the count of a model built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from truths.adapters import load_config

from autoaccum.units import MIB


def fitcheck_mib(row: Mapping[str, str]) -> tuple[float, float]:
    """Its estimate of tensors, and its total with contexts and the allocator's overhead, of a row of its own table."""
    from fitcheck import ModelConfig, TrainingConfig, estimate, get_gpu

    config = load_config(row["model_id"])
    heads = config.num_attention_heads
    model = ModelConfig(
        name=row["model_id"],
        num_params=count_parameters(row["model_id"]),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    training = TrainingConfig(
        precision=row["precision"],
        quantization=row["quantization"],
        optimizer=row["optimizer"],
        batch_size=int(row["batch_size"]),
        seq_len=int(row["seq_len"]),
        lora_rank=int(row["lora_rank"]),
        lora_targets=row["lora_targets"].split(),
        grad_checkpoint=row["grad_checkpoint"] == "True",
        flash_attn=row["kernel"] == "flash",
    )
    report = estimate(model, training, get_gpu("t4"))
    return report.total_mib - report.overhead_mib, report.total_mib


def accelerate_mib(config: Any, dtype: str) -> float:
    """`Training using Adam` of `accelerate estimate-memory MODEL --dtypes DTYPE`: of a batch of 1, all of it trained.

    `config`: of the model, as transformers has it.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    with init_empty_weights():
        empty = AutoModel.from_config(config, torch_dtype=torch.float32)  # As `create_empty_model` does.
    total_bytes, _ = calculate_maximum_sizes(empty)
    return float(max(estimate_training_usage(total_bytes, dtype).values()) / MIB)


@cache
def count_parameters(model: str) -> int:
    """The parameters of a language model on the hub, tied ones once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(load_config(model))
    return sum(parameter.numel() for parameter in built.parameters())
