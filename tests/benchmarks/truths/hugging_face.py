"""The language models of the RTX 4060 table, as xMem trained them (`../shared/truth`, its README).

There, transformers 4.51.3 built them; another release casts, masks and caches in other places, which costs or saves a
few percent. What can be asked for is: the attention that 4.51.3 took by itself. Weights and tokens do not matter, so
that a model's configuration is all that is needed: see `language_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from truths.cases import Case, Predicted, UnknownModel
from truths.language_models import Architecture, find_architecture
from truths.xmem_rows import predict_run

_LENGTH = 128
_SOME_TOKENS = 1000


def predict(case: Case) -> tuple[Predicted, ...]:
    """As `Table.predict`."""
    architecture = find_architecture(case.model)
    if architecture is None:
        raise UnknownModel(case.model)
    return predict_run(case, partial(_build, architecture), _make_batch, _forward)


def _build(architecture: Architecture) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.settings)
    kind = transformers.AutoModelForSeq2SeqLM if architecture.translates else transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(config, attn_implementation=architecture.attention)
    return model


def _make_batch(batch: int) -> Mapping[str, Tensor]:
    """Tokens padded to one length; which of them are padding, nobody reads."""
    tokens = torch.randint(0, _SOME_TOKENS, (batch, _LENGTH))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _forward(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(**batch)
    return outputs.loss, outputs
