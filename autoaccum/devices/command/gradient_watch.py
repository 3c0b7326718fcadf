"""Makes the first update of a script repeatable, and keeps its gradients, to compare them with those of another run.

Both runs draw the same samples, and nothing else that is drawn may count: generators are seeded, dropout returns its
input, data is loaded by one process, and an evaluation gives back the generators as it found them. What changes a
gradient after it is known (clipping, a GradScaler) does nothing. Optimizers change no weight, so that those of several
models, as of a GAN, are compared from the same weights.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices, seed_generators
from autoaccum.devices.command.settings import WatchSettings
from autoaccum.units import MIB

_PARTS_BYTES: Final = 256 * MIB
"""Memory for the gradients of each micro-batch by itself, of as many parameters, the smallest first, as it has room
for."""
_ENDS: Final = 16
"""Tokens at each end of a sample by which it is known again where it is padded to another length."""
_UNEVEN: Final = 20
"""An optimizer that has made so many steps waits for the first of another no longer."""
_DROPOUTS: Final = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_WRAPPERS: Final = re.compile(r"^((_orig_mod|module|_fsdp_wrapped_module)\.)+")
_Any: Any = nn.Module
_functional: Any = functional


class GradientWatch:
    """Keeps the gradients of the first update of each optimizer.

    Args:
        settings: What is asked of the process.
        models: The outermost modules that the script has called, as they come.
    """

    def __init__(self, settings: WatchSettings, models: Mapping[int, nn.Module]) -> None:
        self._settings, self._models = settings, models
        self._parameters: dict[int, nn.Parameter] = {}
        self._gradients: dict[int, Tensor | None] = {}
        self._parts: dict[int, list[Tensor]] = {}
        self._held: list[tuple[nn.Parameter, Tensor | None]] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._steps: Counter[int] = Counter()
        self._rows: list[Tensor] = []
        self._before_call: bytes | None = None
        self._draws = self._evaluated = False
        seed_generators(0)
        torch.manual_seed(0)
        make_generator: Any = np.random.default_rng
        np.random.default_rng = lambda seed=None: make_generator(0 if seed is None else seed)
        torch.backends.cudnn.deterministic = True
        _neutralise_dropout()
        _neutralise_clipping()
        _after_init(
            torch.utils.data.DataLoader, num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0
        )
        _after_init(torch.amp.GradScaler, _init_scale=1.0)
        if settings.freezes_batchnorm:
            _freeze_batchnorm()
        _after_init(Optimizer, self._optimizers.add)
        self._keep_draws_of_training()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def is_complete(self) -> bool:
        """Whether each optimizer has made its first step."""
        steps = [self._steps[id(optimizer)] for optimizer in self._optimizers]
        return all(steps) or max(steps) > _UNEVEN

    def see_call(self, inputs: Any) -> None:
        """Keep what an outermost module is called with, for the samples of the update."""
        if not torch.is_grad_enabled():
            self._evaluated = True
            return
        with suppress(RuntimeError, TypeError):  # Of tensors of other kinds, such as sparse ones.
            self._rows += _describe_rows(inputs)
        self._before_call = RngState(initialized_cuda_devices()).digest()

    def end_call(self) -> None:
        """See whether the call drew random numbers."""
        if self._before_call is not None:
            self._draws |= self._before_call != RngState(initialized_cuda_devices()).digest()
            self._before_call = None

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """Keep what a backward pass adds to the gradients."""
        parameters = self._room_for()
        before = [0.0 if each.grad is None else _plain(each.grad).clone() for each in parameters]
        yield
        for parameter, old in zip(parameters, before, strict=True):
            added = None if parameter.grad is None else _plain(parameter.grad).float() - old
            if added is not None and bool(added.any()):
                self._parts.setdefault(id(parameter), []).append(added.cpu())

    def save(self) -> None:
        """Write the gradients, unless there are none or another rank has the same."""
        if not self._gradients or os.environ.get("RANK", "0") != "0":
            return
        names = self._names()
        record = {
            "gradients": {names[key]: each for key, each in self._gradients.items() if each is not None},
            "parts": {names[key]: parts for key, parts in self._parts.items() if key in self._gradients},
            "rows": torch.cat(self._rows) if self._rows else torch.empty(0, 3),
            "draws": self._draws,
        }
        torch.save(record, self._settings.gradients)

    def _room_for(self) -> list[nn.Parameter]:
        """Return parameters whose gradient is still to come, the smallest first, as many as there is room for."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # Ranks add theirs in the last backward pass.
            return []
        known = {id(each): each for model in self._models.values() for each in model.parameters() if each.requires_grad}
        room, chosen = _PARTS_BYTES // (len(self._settings.parts) + 2), list[nn.Parameter]()
        for parameter in sorted(known.values(), key=lambda each: each.numel()):
            room -= 4 * parameter.numel()
            if room < 0:
                break
            if id(parameter) not in self._gradients:
                chosen.append(parameter)
        return chosen

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Keep the gradients of an optimizer, after the closure if it has one."""
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._hold(optimizer)
            return args, kwargs

        def run_and_hold() -> Any:
            loss = closure()
            self._hold(optimizer)
            return loss

        return (args[0], run_and_hold, *args[2:]), kwargs

    def _hold(self, optimizer: Optimizer) -> None:
        """Keep the gradients, and take them from the optimizer, which then changes no weight."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if id(parameter) not in self._gradients:
                    self._parameters[id(parameter)] = parameter  # So that no other gets its id.
                    self._gradients[id(parameter)] = None if gradient is None else _plain(gradient).cpu().clone()
                self._held.append((parameter, gradient))
                parameter.grad = None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps[id(optimizer)] += 1
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held.clear()

    def _keep_draws_of_training(self) -> None:
        """Give the generators back to training as they were before an evaluation, which reads batches of its own."""
        train, states = _Any.train, dict[int, RngState]()
        inside = False

        def train_as_before(module: nn.Module, mode: bool = True) -> Any:
            nonlocal inside
            if inside:
                return train(module, mode)
            if module.training and not mode:
                states[id(module)], self._evaluated = RngState(initialized_cuda_devices()), False
            elif mode and not module.training and (state := states.pop(id(module), None)) and self._evaluated:
                state.restore()
            inside = True
            try:
                return train(module, mode)
            finally:
                inside = False

        _Any.train = train_as_before

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter in its outermost model; of several models, with the model's class."""
        inner = {id(module) for model in self._models.values() for module in list(model.modules())[1:]}
        models = [model for key, model in self._models.items() if key not in inner]
        names: dict[int, str] = {}
        for number, model in enumerate(models):
            prefix = f"{type(model).__name__} {number}: " if len(models) > 1 else ""
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + _WRAPPERS.sub("", name))
        return {key: names.get(key, f"parameter {number}") for number, key in enumerate(self._gradients)}


def _describe_rows(inputs: Any) -> list[Tensor]:
    """Return three numbers for each sample that a module is called with, which tell samples apart.

    A sample has a row in each tensor that needs no gradient. Of tokens, the second and third number are of the ends
    alone, for padding changes the first; the labels -100, which do not count, are left out.
    """
    leaves = tree_leaves(inputs)
    leaves += [value for leaf in leaves if isinstance(leaf, Mapping) for value in leaf.values()]  # As BatchEncoding.
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and not leaf.requires_grad]
    count = len(leaves[0]) if leaves else 0
    found = torch.zeros(count, 3, dtype=torch.float64)
    for number, leaf in enumerate((leaf for leaf in leaves if len(leaf) == count), start=1):
        rows = leaf.detach().reshape(count, -1).cpu().double()
        ends = [rows] * 3
        if not leaf.is_floating_point():
            rows = rows.masked_fill(rows == -100, 0)
            ends = [rows, rows[:, :_ENDS], rows[:, -_ENDS:].flip(1)]
        found += number * torch.stack([end @ torch.arange(end.shape[1]).double().cos() for end in ends], 1)
    return [found] if count else []


def _plain(gradient: Any) -> Tensor:
    """Return a gradient as an ordinary tensor: of a sharded one this rank's part."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    dense: Tensor = local.to_dense() if local.layout is not torch.strided else local
    return dense.detach()


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _after_init(kind: Any, see: Callable[[Any], Any] | None = None, **attributes: Any) -> None:
    """Set attributes of all objects of a class once they are made, or do something else with them."""
    make = kind.__init__

    def make_and_set(made: Any, *args: Any, **kwargs: Any) -> None:
        make(made, *args, **kwargs)
        vars(made).update(attributes)
        if see is not None:
            see(made)

    make_and_set.__wrapped__ = make  # type: ignore[attr-defined]  # For frameworks that read the signature.
    kind.__init__ = make_and_set


def _neutralise_dropout() -> None:
    for name in _DROPOUTS:
        _set(functional, name, lambda input, *args, **kwargs: input)
    attend = _functional.scaled_dot_product_attention

    def attend_to_all(*args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name != "dropout_p"}  # Else it is the fifth.
        return attend(*args[:4], *(0.0 for _ in args[4:5]), *args[5:], **kept)

    _functional.scaled_dot_product_attention = attend_to_all
    _after_init(nn.RNNBase, dropout=0.0)
    draw = Tensor.bernoulli_

    def keep_all(tensor: Tensor, p: Any = 0.5, **kwargs: Any) -> Tensor:
        """Keep all layers where some are skipped at random (stochastic depth)."""
        return draw(tensor, p, **kwargs) if isinstance(p, Tensor) else tensor.fill_(1)

    _set(Tensor, "bernoulli_", keep_all)


def _neutralise_clipping() -> None:
    """Let the functions that clip a gradient return its norm only: their limit is infinite."""
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        clip = getattr(nn.utils, name)

        def clip_nothing(parameters: Any, *args: Any, _clip: Any = clip, **kwargs: Any) -> Any:
            for limit in ("max_norm", "clip_value"):
                kwargs.pop(limit, None)
            return _clip(parameters, float("inf"), *args[1:], **kwargs)

        for owner in (nn.utils, nn.utils.clip_grad):
            _set(owner, name, clip_nothing)


def _freeze_batchnorm() -> None:
    """Let BatchNorm normalise by its running statistics, where it has them."""
    normalise = _functional.batch_norm
    signature = inspect.signature(normalise)

    def normalise_by_running(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["training"] = given.arguments["running_mean"] is None
        return normalise(*given.args, **given.kwargs)

    _functional.batch_norm = normalise_by_running
