"""Makes the first update of a script repeatable, and keeps its gradients, to compare them with those of another run.

Both runs draw the same samples, and nothing else that is drawn may count: generators are seeded, dropout returns its
input, data is loaded by one process, and an evaluation gives back the generators as it found them. What changes a
gradient after it is known (clipping, a GradScaler) does nothing. Optimizers change no weight, so that those of several
models, as of a GAN, are compared from the same weights.
"""

from __future__ import annotations

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
from autoaccum.checks import is_one_of_ranks
from autoaccum.devices.command.settings import WatchSettings
from autoaccum.units import MIB

_PARTS_BYTES: Final = 256 * MIB
"""Memory for the gradients of each micro-batch by itself, of as many parameters, the smallest first, as it has room
for."""
_ENDS: Final = 16
"""Tokens at each end of a sample by which it is known again where it is padded to another length."""
_UNEVEN: Final = 20
"""An optimizer that has made so many steps waits for the first of another no longer."""
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_Any: Any = nn.Module
_Tensor: Any = Tensor


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
        self._stepping: list[tuple[list[dict[str, Any]], list[tuple[nn.Parameter, Tensor | None]]]] = []
        """What is given back after each step under way, the innermost last: its groups and the gradients."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._steps: Counter[int] = Counter()
        self._rows: list[Tensor] = []
        self._before_call: bytes | None = None
        self._draws = False
        seed_generators(0)
        torch.manual_seed(0)
        make_generator: Any = np.random.default_rng
        np.random.default_rng = lambda seed=None: make_generator(0 if seed is None else seed)
        torch.backends.cudnn.deterministic = True
        self._neutralise()
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
        """Write the gradients, unless there are none."""
        if not self._gradients:
            return
        names = self._names()
        record = {
            "gradients": {names[key]: each for key, each in self._gradients.items() if each is not None},
            "parts": {names[key]: parts for key, parts in self._parts.items() if key in self._gradients},
            "rows": torch.cat(self._rows) if self._rows else torch.empty(0, 2),
            "draws": self._draws,
        }
        torch.save(record, self._settings.gradients)

    def _room_for(self) -> list[nn.Parameter]:
        """Return parameters whose gradient is still to come, the smallest first, as many as there is room for."""
        if is_one_of_ranks():  # Ranks add theirs in the last backward pass.
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
        """Keep the gradients, and take them from the optimizer, which then changes no weight.

        A closure, which computes them, is called first.
        """
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args = (args[0], lambda: loss, *args[2:])
        groups, held = optimizer.param_groups, list[tuple[nn.Parameter, Tensor | None]]()
        for group in groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if id(parameter) not in self._gradients:
                    self._parameters[id(parameter)] = parameter  # So that no other gets its id.
                    self._gradients[id(parameter)] = None if gradient is None else _plain(gradient).cpu().clone()
                held.append((parameter, gradient))
                parameter.grad = None
        self._stepping.append((groups, held))
        if not isinstance(groups, _Unreached):  # By a step that calls that of its base class.
            optimizer.param_groups = _Unreached(groups)
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps[id(optimizer)] += 1
        optimizer.param_groups, held = self._stepping.pop()
        for parameter, gradient in held:
            parameter.grad = gradient

    def _neutralise(self) -> None:
        """Leave out what is drawn at random, what changes a gradient that is known, and worker processes."""
        for name in _DROPOUTS:
            _give([functional], name, 2, "training", False)
        _give([functional], "scaled_dot_product_attention", 4, "dropout_p", 0.0)
        _after_init(nn.RNNBase, dropout=0.0)
        _Tensor.bernoulli_ = _keep_all
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            _give([nn.utils, nn.utils.clip_grad], name, 1, "max_norm", float("inf"))
        _give([nn.utils, nn.utils.clip_grad], "clip_grad_value_", 1, "clip_value", float("inf"))
        _after_init(torch.amp.GradScaler, _init_scale=1.0)
        in_process: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        _after_init(torch.utils.data.DataLoader, timeout=0, **in_process)
        if self._settings.freezes_batchnorm:
            _give([functional], "batch_norm", 5, "training", False)

    def _keep_draws_of_training(self) -> None:
        """Give the generators back to training as they were before an evaluation, which reads batches of its own."""
        train, states = _Any.train, dict[int, RngState]()

        def train_as_before(module: nn.Module, mode: bool = True) -> Any:
            if module.training and not mode:
                states[id(module)] = RngState(initialized_cuda_devices())
            elif mode and not module.training and id(module) in states:
                states.pop(id(module)).restore()
            _Any.train = train  # For the modules within.
            try:
                return train(module, mode)
            finally:
                _Any.train = train_as_before

        _Any.train = train_as_before

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter in its outermost model; of several models, with the model's class."""
        inner = {id(module) for model in self._models.values() for module in list(model.modules())[1:]}
        models = [model for key, model in self._models.items() if key not in inner]
        names: dict[int, str] = {}
        for number, model in enumerate(models):
            prefix = f"{type(model).__name__} {number}: " if len(models) > 1 else ""
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return {key: names.get(key, f"parameter {number}") for number, key in enumerate(self._gradients)}


class _Unreached(list[dict[str, Any]]):
    """Groups of parameters that a loop of an optimizer does not reach: some expect a gradient of each parameter.

    LBFGS reads its only group by index, and has it.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(())


def _describe_rows(inputs: Any) -> list[Tensor]:
    """Return two numbers for each sample that a module is called with, which tell samples apart.

    A sample has a row in each tensor that needs no gradient. Of tokens, the numbers are of the ends alone, since
    padding may move one of them; the labels -100, which do not count, are left out.
    """
    leaves = tree_leaves(inputs)
    leaves += [value for leaf in leaves if isinstance(leaf, Mapping) for value in leaf.values()]  # As BatchEncoding.
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and not leaf.requires_grad]
    count = len(leaves[0]) if leaves else 0
    found = torch.zeros(count, 2, dtype=torch.float64)
    for number, leaf in enumerate((leaf for leaf in leaves if len(leaf) == count), start=1):
        rows = leaf.detach().reshape(count, -1).cpu().double()
        ends = [rows, rows]
        if not leaf.is_floating_point():
            rows = rows.masked_fill(rows == -100, 0)
            ends = [rows[:, :_ENDS], rows[:, -_ENDS:].flip(1)]
        found += number * torch.stack([end @ torch.arange(end.shape[1]).double().cos() for end in ends], 1)
    return [found] if count else []


def _plain(gradient: Any) -> Tensor:
    """Return a gradient as an ordinary tensor: of a sharded one this rank's part."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    dense: Tensor = local.to_dense() if local.layout is not torch.strided else local
    return dense.detach()


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


def _give(owners: list[Any], name: str, place: int, argument: str, value: Any) -> None:
    """Let a function get this value for an argument, by position or name, whatever it is called with."""
    run = getattr(owners[0], name)

    def run_with(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            return run(*args[:place], value, *args[place + 1 :], **kwargs)
        return run(*args, **{**kwargs, argument: value})

    for owner in owners:
        setattr(owner, name, run_with)


_draw = Tensor.bernoulli_


def _keep_all(tensor: Tensor, p: Any = 0.5, **kwargs: Any) -> Tensor:
    """Keep all layers where some are skipped at random (stochastic depth)."""
    return _draw(tensor, p, **kwargs) if isinstance(p, Tensor) else tensor.fill_(1)
