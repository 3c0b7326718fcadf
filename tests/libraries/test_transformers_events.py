"""Models of transformers run the same operators on a simulated card as in a real run.

The real run is one on the CPU. What CUDA does otherwise is brought to one vocabulary: attention is one call, noted with
what it was given (`operators/test_attention.py` tests which kernel a card takes for that); models have no dropout,
which is one fused operator on CUDA; a number that is written into a tensor is copied there, and filled in on the CPU.
No model here asks for its device otherwise: `use_gqa_in_sdpa`, by which heads of keys are not repeated, holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_transformers import NO_DROPOUT, SIDES, SIZES, bert, hf, llama, t5, vit, whisper
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoaccum.simulation.cards import find_card
from autoaccum.simulation.tracing.simulation import simulate

Event = tuple[Any, ...]
Batch = Mapping[str, Tensor]


def tokens(*shape: int) -> Tensor:
    return torch.arange(2, 2 + torch.Size(shape).numel()).reshape(shape) % 30 + 2


def padded(*shape: int) -> Tensor:
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -3:] = 0
    return mask


def bart() -> Any:
    return hf.BartForConditionalGeneration(hf.BartConfig(**SIDES, max_position_embeddings=16))


def plain_bert() -> Any:
    return bert(**NO_DROPOUT)


WRITTEN = ("scalar_tensor", "view", "expand", "copy_")
IDS, CLASSES = tokens(3, 8), torch.tensor([0, 1, 0])
CASES: dict[str, tuple[Callable[[], Any], Batch]] = {
    "llama": (llama, {"input_ids": IDS, "labels": IDS}),
    "llama, padding": (llama, {"input_ids": IDS, "labels": IDS, "attention_mask": padded(3, 8)}),
    "llama, packed": (llama, {"input_ids": IDS, "labels": IDS, "position_ids": (torch.arange(8) % 5).expand(3, -1)}),
    "bert, no padding": (
        plain_bert,
        {"input_ids": IDS, "labels": CLASSES, "attention_mask": torch.ones_like(IDS)},
    ),
    "bert, padding": (
        plain_bert,
        {"input_ids": IDS, "labels": CLASSES, "attention_mask": padded(3, 8)},
    ),
    "bart, padding": (bart, {"input_ids": IDS, "labels": tokens(3, 5), "attention_mask": padded(3, 8).float()}),
    "t5, padding": (t5, {"input_ids": IDS, "labels": tokens(3, 5), "attention_mask": padded(3, 8)}),
    "whisper": (whisper, {"input_features": torch.zeros(3, 8, 20), "labels": tokens(3, 5)}),
    "vit": (vit, {"pixel_values": torch.zeros(3, 3, 16, 16), "labels": CLASSES}),
}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator with the form of what it returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.events.append((str(func), *(form(one) for one in tree_leaves(out))))
        return out


def form(out: Any) -> Any:
    return (tuple(out.shape), out.dtype) if isinstance(out, Tensor) else type(out)


class Attention(torch.autograd.Function):
    """Attention as one operator: tensors as large as those that it gives."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        ctx.given = [query, key, value, mask]
        return query.new_zeros(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        wanted = zip(ctx.given, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(one) if needed else None for one, needed in wanted)


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **how: Any
    ) -> Any:
        given = [form(one) for one in (query, key, value, attn_mask)]
        operators.events.append(("attention", *given, how.get("is_causal"), how.get("enable_gqa")))
        return Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]

    with monkeypatch.context() as patch, Operators() as operators:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        yield operators.events


def run(make: Callable[[], Any], batch: Batch, device: str, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    torch.manual_seed(0)
    model = make().to(device)
    moved = {name: tensor.to(device) for name, tensor in batch.items()}
    with noted(monkeypatch) as events:
        loss = model(**moved).loss
        torch.autograd.backward(loss)
    return events


def in_words_of_the_cpu(events: list[Event]) -> list[Event]:
    """Numbers are written by `fill_` (`copy_to` in `ATen/TensorIndexing.h`)."""
    said = list(events)
    for at in reversed(range(len(events) - 4)):
        one, selected, *others = said[at : at + 5]
        if [name for name, *_ in (one, *others)] == [f"aten.{name}.default" for name in WRITTEN]:
            said[at : at + 5] = [("aten.lift_fresh.default", *one[1:]), selected, ("aten.fill_.Tensor", *selected[1:])]
    return said


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_run_takes_the_path_of_a_real_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, batch = CASES[name]
    real = run(make, batch, "cpu", monkeypatch)
    with simulate(find_card("a100-80gb")):
        fake = run(make, batch, "cuda", monkeypatch)
    assert [event for event in real if event[0] == "attention"]
    assert in_words_of_the_cpu(fake) == real


def test_checks_of_labels_and_lengths_that_follow_from_a_mask_are_known() -> None:
    config = hf.Wav2Vec2Config(
        **SIZES, vocab_size=12, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2, layerdrop=0.0,
    )  # fmt: skip
    batch = {"input_values": torch.zeros(2, 400), "attention_mask": padded(2, 400), "labels": tokens(2, 4) % 10 + 1}
    with simulate(find_card("a100-80gb")) as mode:
        model = hf.Wav2Vec2ForCTC(config).to("cuda")
        model(**{name: tensor.to("cuda") for name, tensor in batch.items()}).loss.backward()
    assert not mode.checks
