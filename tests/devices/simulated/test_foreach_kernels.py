"""What optimizers and clipping take on a card beside their state (`torch/optim`, `torch/nn/utils/clip_grad.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_up_card import on_card
from torch import Tensor, nn

from autoaccum.devices.simulated.patches import torch_release
from autoaccum.devices.simulated.recorder import Recorder

SHAPES = ((300, 40), (7,), (1000,))
BYTES = 4 * (300 * 40 + 7 + 1000)
LARGEST = 4 * 300 * 40


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda:0")) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
    return made


def extra_bytes(recorder: Recorder, run: Callable[[], Any]) -> int:
    """The most that is alive at once of what `run` allocates, scalars left out."""
    start, known = len(recorder.events), len(recorder.sizes)
    run()
    alive = peak = 0
    for event in recorder.events[start:]:
        size = recorder.sizes[event if event >= 0 else ~event]
        if isinstance(size, int) and size > 16 and (event if event >= 0 else ~event) >= known:
            alive += size if event >= 0 else -size
            peak = max(peak, alive)
    return peak


TEMPORARIES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "AdamW": (torch.optim.AdamW, BYTES),
    "AdamW-amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), BYTES),
    "AdamW-fused": (lambda p: torch.optim.AdamW(p, fused=True), 0),
    "AdamW-single": (lambda p: torch.optim.AdamW(p, foreach=False), 2 * LARGEST),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0),
    "SGD-decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), BYTES),
    "SGD-fused": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 0),
    "RMSprop": (torch.optim.RMSprop, BYTES),
    "RMSprop-decay": (lambda p: torch.optim.RMSprop(p, weight_decay=0.1), 2 * BYTES),
    "Adagrad": (torch.optim.Adagrad, 2 * BYTES),
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries_of_a_step(name: str) -> None:
    build, expected = TEMPORARIES[name]
    with on_card() as recorder:
        optimizer = build(parameters())
        optimizer.step()
        assert extra_bytes(recorder, optimizer.step) == expected


def test_state_lies_on_the_card_but_the_step_counts() -> None:
    with on_card():
        weights = parameters()
        optimizer = torch.optim.AdamW(weights)
        optimizer.step()
        state = optimizer.state[weights[0]]
        assert [state[name].device.type for name in ("step", "exp_avg", "exp_avg_sq")] == ["cpu", "cuda", "cuda"]
        fused = torch.optim.AdamW(weights, fused=True)
        fused.step()
        assert fused.state[weights[0]]["step"].device.type == "cuda"


def test_clips_the_norm_over_lists() -> None:
    with on_card() as recorder:
        weights = parameters()
        grads = [weight.grad for weight in weights]
        seen: list[Tensor] = []
        start = len(recorder.sizes)
        seen.append(nn.utils.clip_grad_norm_(weights, 1.0))
        sizes = recorder.sizes[start:]
        assert sizes[:3] == [4, 4, 4]  # a norm of each
        assert 12 in sizes  # together
        assert max(size for size in sizes if isinstance(size, int)) == 12
        assert [weight.grad for weight in weights] == grads


def test_adagrad_is_fused_where_it_can_be() -> None:
    with on_card() as recorder:
        if torch_release() < (2, 13):
            with pytest.raises(RuntimeError, match="fused"):
                torch.optim.Adagrad(parameters(), fused=True).step()
            return
        optimizer = torch.optim.Adagrad(parameters(), fused=True)
        optimizer.step()
        assert extra_bytes(recorder, optimizer.step) == 0


def test_a_grad_scaler_steps() -> None:
    with on_card():
        weights = parameters()
        for fused in (False, True):
            optimizer = torch.optim.AdamW(weights, fused=fused)
            scaler = torch.amp.GradScaler("cuda")
            for _ in range(2):
                scaler.scale(torch.empty((), device="cuda:0"))
                for weight in weights:
                    weight.grad = torch.empty_like(weight)
                scaler.step(optimizer)
                scaler.update()
