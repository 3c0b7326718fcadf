"""The Trainer of transformers as it was in 2022, fine-tuning BERT: what its loop asks of the allocator.

From `Trainer.train` and `Trainer.training_step` of 4.16: autocast around the forward pass alone, outputs that are gone
before the backward pass, gradients clipped, zeroed and kept (`model.zero_grad()` before PyTorch 2.0), attention written
out, checkpoints that are reentrant. The scale of the loss is left away: a few numbers. Its PyTorch was older than 1.11,
where a softmax kept its input as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from truths.loops import Loop

_LEARNING_RATE = 5e-5
_BLOCK, _LEAST_ELEMENTS = 2048, 4096
Batch = Mapping[str, Tensor]


def trainer_loop(*, batch: int, length: int, micro_batches: int, checkpoints: bool, half: bool, optimizer: str) -> Loop:
    """The loop of one setting of the table; `optimizer` as the table names it."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        amp = torch.autocast("cuda", dtype=torch.float16) if half else nullcontext()
        with amp, patch.object(nn.functional, "softmax", softmax):
            return torch.as_tensor(model(**batch).loss / micro_batches)

    def forward(model: nn.Module, batches: list[Batch]) -> tuple[Tensor, Any]:
        """All micro-batches of an update, less the last one's backward pass, which the loop makes."""
        for one in batches[:-1]:
            torch.autograd.backward(loss(model, one))
        return loss(model, batches[-1]), None

    def make_optimizer(model: nn.Module) -> Optimizer:
        known = list(model.parameters())

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(known, 1.0)

        made = next(make for word, make in _OPTIMIZERS.items() if word in optimizer)(known)
        made.register_step_pre_hook(clip)
        return made

    return Loop(
        model=partial(_build, checkpoints),
        batch=lambda: [_make_batch(batch, length) for _ in range(micro_batches)],
        forward=forward,
        optimizer=make_optimizer,
        zero_grad="after step",
        set_to_none=False,
        keeps=False,
        updates=2,
    )


def bert_large() -> Any:
    """The configuration of bert-large-uncased."""
    from transformers import BertConfig

    return BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def _build(checkpoints: bool) -> nn.Module:
    from transformers import BertForSequenceClassification

    config = bert_large()
    config._attn_implementation = "eager"
    model: Any = BertForSequenceClassification(config)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    built: nn.Module = model
    return built


def _make_batch(batch: int, length: int) -> Batch:
    """With the mask of ones that the model of that time made for itself; today's reads the tokens where it has none."""
    tokens, labels = torch.randint(100, 30_000, (batch, length)), torch.zeros(batch, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _adafactor(params: list[nn.Parameter]) -> Optimizer:
    from transformers.optimization import Adafactor

    made: Optimizer = Adafactor(params, lr=_LEARNING_RATE, scale_parameter=False, relative_step=False)
    return made


class Adam8bit(Optimizer):
    """Adam with states of 8 bits, as far as memory goes: `bitsandbytes.optim.Adam8bit` of 2022 without its kernels.

    Source: `Optimizer2State.init_state` in bitsandbytes/optim/optimizer.py: two states of one byte for each element and
    a largest value for each block of 2,048 of them; of small tensors, two fp32 states. Its update is one kernel, in
    place. The 256 numbers that the bytes stand for, one table for all tensors, are left away.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Have states for all that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    self.state[param] = _state_of(param)
        return None


def _state_of(param: nn.Parameter) -> dict[str, Any]:
    if param.numel() < _LEAST_ELEMENTS:
        return {f"state{number}": torch.zeros_like(param, dtype=torch.float32) for number in (1, 2)}
    blocks = -(-param.numel() // _BLOCK)
    state: dict[str, Any] = {}
    for number in (1, 2):
        state[f"state{number}"] = torch.zeros_like(param, dtype=torch.uint8)
        state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=param.device)
    return state


_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=_LEARNING_RATE, foreach=False),  # transformers' own took one at a time.
    "Adafactor": _adafactor,
    "Adam8bit": partial(Adam8bit, lr=_LEARNING_RATE),
}


def softmax(scores: Tensor, dim: int) -> Tensor:
    """Behave as before PyTorch 1.11, where the derivative also took the input, for its dtype.

    Source: `_softmax_backward_data(grad, result, dim, self)` in tools/autograd/derivatives.yaml of 1.10.
    """
    if torch.is_autocast_enabled("cuda"):
        scores = scores.float()
    made: Tensor = _Softmax.apply(scores, dim)  # type: ignore[no-untyped-call]
    return made


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        made = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, made)
        ctx.dim = dim
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        scores, made = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], made, ctx.dim, scores.dtype), None
