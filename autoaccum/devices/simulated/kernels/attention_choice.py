"""Which kernel `scaled_dot_product_attention` runs on a card: a decision without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.attention_call import ORDER, AttentionCall, Backends, Kernel, Operand, Question
from autoaccum.devices.simulated.kernels.attention_rules import RULES


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel, and why those that were asked before it cannot run.

    Attributes:
        kernel: None when no kernel that is allowed can run.
        refused: By kernel, in the order they were asked.
    """

    kernel: Kernel | None
    refused: Mapping[Kernel, str]


def choose_attention(
    call: AttentionCall, card: Card, torch_version: tuple[int, int], backends: Backends
) -> AttentionChoice:
    """The kernel that CUDA would run (`select_sdp_backend` in `sdp_utils.cpp`)."""
    if torch_version >= (2, 15):
        call = _with_batch(call)
    question = Question(call, card, torch_version, backends)
    refused: dict[Kernel, str] = {}
    for kernel in backends.order or _default_order(question):
        reason = f"{kernel} attention is switched off" if kernel not in backends.enabled else None
        reason = reason or next(filter(None, (rule(question) for rule in RULES[kernel])), None)
        if reason is None:
            return AttentionChoice(kernel, refused)
        refused[kernel] = reason
    return AttentionChoice(None, refused)


def _with_batch(call: AttentionCall) -> AttentionCall:
    """Three dimensions count as a batch of one (`normalize_unbatched_input`, 2.15)."""
    if any(len(operand.shape) != 3 for operand in (call.query, call.key, call.value)):
        return call
    mask = None if call.mask is None else _unsqueezed(call.mask)
    query, key, value = (_unsqueezed(operand) for operand in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, mask=mask)


def _unsqueezed(operand: Operand) -> Operand:
    missing = max(0, 4 - len(operand.shape))
    return replace(operand, shape=(1,) * missing + operand.shape, strides=(0,) * missing + operand.strides)


def _default_order(question: Question) -> tuple[Kernel, ...]:
    """CuDNN first on sm90 and sm10x with a cuDNN after 9.15 (`check_prefer_cudnn_attention`)."""
    major, minor = question.card.capability
    known = major in (9, 10) and (minor in (0, 3) or question.torch_version >= (2, 15))
    if question.backends.prefers_cudnn and known and question.backends.cudnn_version > 91_500:
        return ("cudnn", "flash", "efficient", "math")
    return ORDER
