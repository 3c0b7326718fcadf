"""Configurations of language models: found by name, and as large as they were published."""

from __future__ import annotations

from typing import Any

import pytest
from truths.language_models import Architecture, find_architecture


def parameters(architecture: Architecture) -> int:
    """Of a model with embeddings that are tied, layers of four square matrices and two wide ones."""
    known: dict[str, Any] = dict(architecture.settings)
    width, layers = known.get("n_embd") or known["hidden_size"], known.get("n_layer") or known["num_hidden_layers"]
    places, words = known.get("n_positions", 2048), known.get("vocab_size", 50257)
    return int(words * width + places * width + layers * 12 * width**2)


@pytest.mark.parametrize(
    ("name", "published"),
    [("openai-community/gpt2-medium", 355e6), ("cerebras/Cerebras-GPT-111M", 111e6), ("facebook/opt-125m", 125e6)],
)
def test_models_are_as_large_as_their_names_say(name: str, published: float) -> None:
    architecture = find_architecture(name)
    assert architecture is not None
    assert parameters(architecture) == pytest.approx(published, rel=0.02)


def test_the_publisher_and_capitals_do_not_matter() -> None:
    assert find_architecture("T5-small") is find_architecture("google-t5/t5-small") is not None


def test_a_model_that_is_not_known_has_none() -> None:
    assert find_architecture("nobody/gpt-nothing") is None


@pytest.mark.parametrize(("name", "attention", "translates"), [("t5-base", "eager", True), ("gpt2", "sdpa", False)])
def test_attention_is_that_of_the_release_that_was_measured(name: str, attention: str, translates: bool) -> None:
    architecture = find_architecture(name)
    assert architecture is not None
    assert (architecture.attention, architecture.translates) == (attention, translates)
