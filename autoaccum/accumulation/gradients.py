"""Sum gradients of half-precision parameters in float32, scale them for fp16, measure and clip them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from autoaccum.errors import UsageError
from autoaccum.messages import Message, message
from autoaccum.sharded_tensors import is_sharded, local_part

HALF_DTYPES = (torch.float16, torch.bfloat16)


def choose_scaler(
    precision: str, scaler: GradScaler | None, device: torch.device, parameters: Iterable[Tensor]
) -> GradScaler | None:
    """Return the scaler of a step: the one given, or a new one for fp16, or None.

    Raises:
        UsageError: There is a scaler, and a parameter whose gradient it would unscale is of half precision, or only
            some are sharded.
    """
    parameters = list(parameters)
    if scaler is None and precision == "fp16":
        scaler = GradScaler(device.type)
    if scaler is None or not scaler.is_enabled():
        return None
    half = next((parameter.dtype for parameter in parameters if parameter.dtype in HALF_DTYPES), None)
    if half is not None:
        raise UsageError(
            f"a GradScaler is used, and parameters are of {str(half).removeprefix('torch.')}",
            hint="keep the parameters in float32 and let autocast lower the precision, or omit scaler and fp16",
        )
    if len(set(map(is_sharded, parameters))) > 1:
        raise UsageError(
            "a GradScaler is used, and only some parameters are sharded", hint="call fully_shard on the whole model"
        )
    return scaler


def restore_scaler(scaler: GradScaler, state: dict[str, Any]) -> None:
    """Restore `scaler` to `state`, its `state_dict` from before the step.

    `load_state_dict` alone would leave it "already unscaled"; `update` with a new scale starts a new iteration.
    """
    try:
        scaler.update(new_scale=float(state["scale"]))
    except AssertionError:
        # It was never used, or memory ran out between the two tensors that it creates on first use. Its pickling
        # protocol makes both lazy again.
        scaler.__setstate__(scaler.__getstate__())
    scaler.load_state_dict(state)


class GradientBuffers:
    """Sums of the micro-batches' gradients, in float32 where parameters are of half precision.

    Summed in bf16, many small gradients are rounded away: the sum of 1,024 is 3 % off. While the buffers are entered,
    each gradient moves from `.grad` to its sum as soon as autograd has computed it. Where parameters are of half
    precision, it is multiplied by `factor` in the precision of the sum, so that the factor is not rounded.

    If `in_fp32` is False, sums have the dtype of their parameters and need no memory beyond the gradients'. With
    `on_host`, they are in host memory, where each gradient goes as soon as it is there.

    Attributes:
        factor: What the next gradients are multiplied by.
        takes_factor: Whether it is to be other than 1, since parameters are of half precision.
        rounds: Whether it sums in half precision.
        sums: The sums so far.
    """

    def __init__(self, parameters: Sequence[Tensor], *, in_fp32: bool = True, on_host: bool = False) -> None:
        self.factor = 1.0
        self._in_fp32, self._on_host = in_fp32, on_host
        self._parameters: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
        self.takes_factor = needs_buffers(self._parameters)
        self.rounds = self.takes_factor and not in_fp32
        self.sums: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> GradientBuffers:
        self._handles = [parameter.register_post_accumulate_grad_hook(self._collect) for parameter in self._parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def values(self) -> list[Tensor]:
        """Return the sums so far as dense tensors that may be changed in place."""
        for parameter, total in self.sums.items():
            if total.is_sparse:
                self.sums[parameter] = total.coalesce()
        # Not in the order of backward, which differs between ranks, and with it the last bit of their norm.
        return [_values(self.sums[parameter]) for parameter in self._parameters if parameter in self.sums]

    def add_zeros(self, parameter: Tensor) -> Tensor:
        """Add and return a sum of zeros for a parameter that has none."""
        device = "cpu" if self._on_host else None
        self.sums[parameter] = torch.zeros_like(parameter, dtype=self._sum_dtype(parameter), device=device)
        return self.sums[parameter]

    def write_gradients(self) -> None:
        """Round each sum once into its parameter's `.grad`, and free it before the next is rounded."""
        for parameter in list(self.sums):
            device = parameter.device if self._on_host else None  # Else it is there, and DTensor would search for it.
            parameter.grad = self.sums.pop(parameter).to(device, parameter.dtype)

    def _collect(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self._on_host:
            gradient = gradient.cpu()
        total = self.sums.get(parameter)
        if total is None:
            self.sums[parameter] = gradient.to(self._sum_dtype(gradient)).mul_(self.factor)
        elif gradient.is_sparse:
            self.sums[parameter] = total + gradient.to(total.dtype).mul_(self.factor)
        else:
            total.add_(gradient, alpha=self.factor)

    def _sum_dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.float32 if self._in_fp32 and tensor.dtype in HALF_DTYPES else tensor.dtype


def needs_buffers(parameters: Iterable[Tensor]) -> bool:
    """Return whether one of `parameters` is trainable and of half precision."""
    return any(parameter.requires_grad and parameter.dtype in HALF_DTYPES for parameter in parameters)


def rounding_warning(parameters: Iterable[Tensor]) -> Message:
    """Return a warning about the rounding of sums in half precision."""
    half = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters if parameter.dtype in HALF_DTYPES}
    return message("sums_rounded", dtypes=sorted(half))


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of `parameters`, or the values of sparse ones, as tensors that may be changed in place."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            gradients.append(_values(parameter.grad))
    return gradients


def _values(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_sparse else tensor


def clip_gradients(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Scale `gradients` in place so that their total 2-norm is at most `clip_norm`; infinity measures only.

    The norm of half-precision gradients is computed in float32, that of sharded ones over all ranks.

    Returns:
        The norm before clipping, a scalar on the first gradient's device.
    """
    if any(map(is_sharded, gradients)):
        norm, gradients = _norm_over_ranks(gradients), [local_part(gradient) for gradient in gradients]
    else:
        norm = _norm(gradients)
    if clip_norm != float("inf"):
        holders = [gradient.detach() for gradient in gradients]  # PyTorch's clipping takes tensors with a `.grad`.
        for holder, gradient in zip(holders, gradients, strict=True):
            holder.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(holders, clip_norm, norm)
    return norm


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    half = [gradient for gradient in gradients if gradient.dtype in HALF_DTYPES]
    others = [gradient for gradient in gradients if gradient.dtype not in HALF_DTYPES]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in half]
    if others:
        norms.append(torch.nn.utils.get_total_norm(others))
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def _norm_over_ranks(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients of which some are sharded; all ranks call this with the same ones."""
    import torch.distributed as dist

    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        sharding = (cast(Any, gradient).device_mesh, cast(Any, gradient).placements) if is_sharded(gradient) else None
        kinds.setdefault(sharding, []).append(local_part(gradient))
    squares = []
    for sharding, parts in kinds.items():
        norm = _norm(parts)
        square = norm.double().square()  # The square of a norm in float32 could overflow.
        if sharding is not None:
            mesh, placements = sharding
            square = square.to(mesh.device_type)  # Where gradients are offloaded, they are on the host.
            for dimension, placement in enumerate(placements):
                if placement.is_shard():
                    dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square.to(norm.device))
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().to(norm.dtype)
