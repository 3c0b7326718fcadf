"""A trial in place leaves live objects as they were: the same objects, every byte, proved by hash and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autoaccum.devices.in_place.saved_state import SavedState
from autoaccum.errors import NotMeasuredError, WorkloadError


class Restless(nn.Module):
    """Changes what it can in forward."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.generator, self.numpy_generator = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.calls, self.log = 0, ["made"]
        self.cache: Tensor | None = None
        self.table = np.zeros(3)
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(2))
        self.calls += 1
        self.log.append("called")
        self.table += 1
        self.meter.update(len(x))
        self.cache = x
        noise = torch.rand(1, generator=self.generator).item() + self.numpy_generator.random()
        noise += torch.rand(1).item() + random.random() + np.random.rand()
        self.net[0].weight.register_hook(lambda grad: grad)
        self.net.register_forward_hook(lambda *_: None)
        self.net[0].bias.requires_grad_(False)
        self.net[1].eval()
        outputs: Tensor = self.net(x)
        return outputs + 0.0 * noise


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0, [0]

    def update(self, count: int) -> None:
        self.total += count
        self.values.append(count)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def tied() -> Any:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


def frozen() -> Any:
    model: Any = plain()
    model[0].requires_grad_(False)
    return model


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3))


def resident_in_eval() -> nn.Module:
    model = batchnorm()
    torch.autograd.backward(model(torch.randn(4, 6)).sum())
    return model.eval()


def hooked() -> Any:
    model: Any = plain()
    model[0].weight.register_hook(lambda grad: 2 * grad)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model[0].register_forward_pre_hook(lambda module, inputs: None)
    model[2].register_full_backward_hook(lambda module, grads, outputs: None)
    model.register_state_dict_post_hook(lambda *_: None)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    one.__name__: one for one in (plain, batchnorm, tied, frozen, spectral, resident_in_eval, hooked, Restless)
}


def with_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trained(model), lr=0.1)
    for parameter in trained(model):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def trained(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "factory": lambda model: lambda params: torch.optim.SGD(params, lr=0.1),
    "without state": lambda model: torch.optim.AdamW(trained(model), lr=0.1),
    "with state": with_state,
}


class Witness:
    """A copy of the state, made by hand and not by the code under test."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.before = self.look()

    def look(self) -> list[Any]:
        numpy_state: Any = np.random.get_state()
        seen: list[Any] = [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist()]
        for name, module in self.model.named_modules():
            seen.append((name, id(module), module.training, list(module._buffers), list(module._parameters)))
            kept: Any = sorted(vars(module).items())
            seen.append([len(hooks) for key, hooks in kept if key.endswith("_hooks")])
        tensors: list[tuple[str, Any]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, tensor in tensors:
            gradient = tensor.grad
            seen.append((name, id(tensor), tensor.requires_grad, str(tensor.dtype), tensor.data_ptr(), str(tensor)))
            seen.append((tensor.double().tolist(), id(gradient), None if gradient is None else gradient.tolist()))
            seen.append(len(tensor._backward_hooks or ()))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            seen.append((str(self.optimizer.state_dict()), sorted(vars(self.optimizer))))
            seen.append([(id(key), list(value)) for key, value in self.optimizer.state.items()])
            groups: list[Any] = self.optimizer.param_groups
            seen.append([[id(p) for p in group["params"]] for group in groups])
        return seen

    def check(self) -> None:
        assert self.look() == self.before


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "with state") for name in MODELS), *(("plain", one) for one in OPTIMIZERS if one != "with state")],
)
@pytest.mark.filterwarnings("ignore::autoaccum.accumulation.step_result.AccumulationWarning")
def test_trials_leave_everything_as_it_was(name: str, optimizer: str, live_device: Any, pairs: Any) -> None:
    torch.manual_seed(4)
    model = MODELS[name]()
    made = OPTIMIZERS[optimizer](model)
    live = made if isinstance(made, torch.optim.Optimizer) else torch.optim.SGD(model.parameters())
    device = live_device(model, pairs, optimizer=made)
    witness, digest = Witness(model, made), state_digest(model, live)
    device.inspect()
    assert state_digest(model, live) == digest
    trial = device.trial((3, 2))
    assert trial.outcome == "ok", trial.message
    assert state_digest(model, live) == digest
    witness.check()


@pytest.mark.parametrize("name", ["batchnorm", "spectral", "Restless"])
@pytest.mark.filterwarnings("ignore::autoaccum.accumulation.step_result.AccumulationWarning")
def test_the_loop_around_the_step_leaves_everything_as_it_was(name: str, live_device: Any, pairs: Any) -> None:
    torch.manual_seed(4)
    model = MODELS[name]()
    optimizer = with_state(model)
    device = live_device(model, pairs, optimizer=optimizer, keeps=("outputs", "ema"), evaluation_batch=3)
    witness = Witness(model, optimizer)
    inspection = device.inspect()
    assert (inspection.keeps, inspection.evaluation_batch) == (("outputs", "ema"), 3)
    trial = device.trial((2, 2))
    if name == "Restless":
        assert "cannot follow the model" in str(trial.message)
    else:
        assert trial.outcome == "ok", trial.message
    witness.check()


def test_an_evaluation_that_fails_is_undone(live_device: Any, pairs: Any) -> None:
    def fail(model: nn.Module, batch: Any) -> None:
        raise KeyError("metric")

    model = MODELS["batchnorm"]()
    optimizer = with_state(model)
    device = live_device(model, pairs, optimizer=optimizer, evaluation_batch=3, evaluate=fail)
    witness = Witness(model, optimizer)
    trial = device.trial((2, 2))
    assert (trial.outcome, trial.phase, trial.blames) == ("error", "evaluation", "user")
    assert trial.traceback is not None
    assert "in fail" in trial.traceback
    witness.check()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions_and_half_parameters(precision: Any, live_device: Any) -> None:
    model = plain() if precision == "fp16" else plain().bfloat16()
    dtype = next(model.parameters()).dtype
    optimizer = with_state(model)
    device = live_device(
        model,
        lambda size: (torch.randn(size, 6, dtype=dtype), torch.randint(0, 3, (size,))),
        optimizer=optimizer,
        precision=precision,
    )
    witness = Witness(model, optimizer)
    device.inspect()
    assert device.trial((2, 2)).outcome == "ok"
    witness.check()


def test_plain_attributes_of_a_model_are_restored_and_warned_of(live_device: Any, pairs: Any) -> None:
    model = Restless()
    log = model.log
    device = live_device(model, pairs)
    inspection = device.inspect()
    assert device.trial((2, 2)).outcome == "ok"
    assert (model.calls, model.cache) == (0, None)
    assert model.log is log
    assert log == ["made"]
    assert model.generator.initial_seed() == 1
    assert torch.rand(1, generator=model.generator) == torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert model.numpy_generator.random() == np.random.default_rng(1).random()
    assert any("keeps in Python (calls, log and cache), which" in warning for warning in inspection.cautions)


def test_a_criterion_and_a_teacher_are_restored(live_device: Any, pairs: Any) -> None:
    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.seen += 1
            return nn.functional.cross_entropy(outputs, targets)

    criterion, teacher = Counting(), batchnorm()
    live_device(plain(), pairs, criterion).trial((2, 2))
    assert criterion.seen == 0

    def distil(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), teacher(batch[0]).detach())

    model = plain()
    witness = Witness(teacher, None)
    assert live_device(model, pairs, distil).trial((2, 2)).outcome == "ok"
    witness.check()


@pytest.mark.parametrize("held", ["forward hook", "tensor hook", "optimizer hook", "list", "patched forward"])
def test_modules_that_only_hooks_and_attributes_reach_are_restored(held: str, live_device: Any, pairs: Any) -> None:
    model: Any = plain()
    average: Any = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = model.forward

    def follow(*_: Any) -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data + 1.0, 0.5)

    def patched(inputs: Tensor) -> Any:
        follow()
        return forward(inputs)

    def listed(model: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), model.teachers[0](batch[0]))

    if held == "forward hook":
        model.register_forward_hook(follow)
    elif held == "tensor hook":
        next(model.parameters()).register_post_accumulate_grad_hook(follow)
    elif held == "optimizer hook":
        optimizer.register_step_post_hook(follow)
    elif held == "patched forward":
        model.forward = patched
    else:
        model.teachers = [average]
    witness = Witness(average, None)
    device = live_device(model, pairs, listed if held == "list" else None, optimizer=optimizer)
    assert device.trial((2, 2)).outcome == "ok"
    witness.check()


def test_what_cannot_be_restored_is_named(live_device: Any, pairs: Any) -> None:
    model = plain()

    class Changing(nn.Module):
        """Becomes another class in forward."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            self.__class__ = Other
            outputs: Tensor = self.net(x)
            return outputs

    class Other(Changing):
        pass

    device = live_device(Changing(), pairs)
    with pytest.raises(NotMeasuredError, match="a trial in place has changed the class of the model"):
        device.trial((2, 2))


def test_an_error_of_the_users_comes_with_everything_restored(live_device: Any, pairs: Any) -> None:
    model = Restless()
    optimizer = with_state(model)

    def fail(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if len(batch[0]) == 3:
            raise ValueError("three is one too many")
        return loss

    device = live_device(model, pairs, fail, optimizer=optimizer)
    witness = Witness(model, optimizer)
    trial = device.trial((3, 1))
    assert (trial.outcome, trial.blames, trial.phase) == ("error", "user", "forward")
    assert trial.message == "micro-batch 3, forward raised ValueError: three is one too many"
    assert trial.traceback is not None
    assert "in fail" in trial.traceback
    witness.check()

    def exit_now(model: nn.Module, batch: Any) -> Tensor:
        raise SystemExit(3)

    assert "sys.exit(3)" in str(live_device(model, pairs, exit_now, optimizer=optimizer).trial((2, 2)).message)

    def fail_at_once(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("at once")

    with pytest.raises(WorkloadError, match="a small batch of net raised ValueError: at once") as caught:
        live_device(model, pairs, fail_at_once, optimizer=optimizer).inspect()
    assert "in fail_at_once" in str(caught.value.user_traceback)
    witness.check()


def build_trained() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *_: None)
    model[0].weight.register_hook(lambda grad: grad)
    groups: list[Any] = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].weight]}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model[2].bias.grad = None
    return model, optimizer


def other_buffers(model: Any) -> None:
    del model[1].running_var
    model[1].register_buffer("late", torch.ones(2))
    model[1].register_buffer("hidden", None, persistent=False)


def new_hooks(model: Any) -> None:
    model[0]._forward_hooks.clear()
    model[2].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model[2].register_full_backward_hook(lambda *_: None)
    model.register_state_dict_post_hook(lambda *_: None)
    model.register_load_state_dict_pre_hook(lambda *_: None)


def tensor_hooks(model: Any) -> None:
    model[0].weight._backward_hooks.clear()
    model[0].bias.register_hook(lambda grad: grad)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def gradients(model: Any) -> None:
    model[0].weight.grad.mul_(2)
    model[0].bias.grad = None
    model[2].bias.grad = torch.ones(2)


def submodules(model: Any) -> None:
    model.add_module("3", nn.ReLU())
    model[0] = nn.Linear(3, 4)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "values": lambda model: setattr(model[0].weight, "data", model[0].weight.detach().double()),
    "a buffer": lambda model: setattr(model[1], "running_mean", model[1].running_mean.clone()),
    "other buffers": other_buffers,
    "new hooks": new_hooks,
    "tensor hooks": tensor_hooks,
    "gradients": gradients,
    "a mode": lambda model: model[0].eval(),
    "what is trained": lambda model: model[0].weight.requires_grad_(False),
    "submodules": submodules,
    "torch's generator": lambda _: torch.rand(3),
    "Python's generator": lambda _: random.random(),
    "NumPy's generator": lambda _: np.random.rand(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_trial_changes_in_a_model_is_restored(change: Callable[[Any], Any]) -> None:
    model, optimizer = build_trained()
    linear, norm, last = model
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    kept = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    hooks = (dict(linear._forward_hooks), dict(linear.weight._backward_hooks))
    state = SavedState({"": model}, optimizer)
    change(model)
    assert state.differences()
    state.restore()
    assert state.differences() == []
    assert list(model) == [linear, norm, last]
    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    assert all(map(torch.equal, now, values))
    assert all(p.grad is grad and p.requires_grad is wanted for p, grad, wanted in kept)
    assert (dict(linear._forward_hooks), dict(linear.weight._backward_hooks)) == hooks
    assert all(module.training for module in model.modules())


def regroup(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[0]["note"] = 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def attach(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.note = 1
    optimizer.step = None


OF_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "a step": lambda optimizer: optimizer.step(),
    "no state": lambda optimizer: optimizer.state.clear(),
    "groups": regroup,
    "attributes": attach,
}


@pytest.mark.parametrize("change", OF_OPTIMIZERS.values(), ids=OF_OPTIMIZERS)
def test_what_a_trial_changes_in_an_optimizer_is_restored(change: Callable[[Any], Any]) -> None:
    model, optimizer = build_trained()
    keys, names = list(optimizer.state), list(vars(optimizer))
    rates = [group["lr"] for group in optimizer.param_groups]
    state = SavedState({"": model}, optimizer)
    change(optimizer)
    assert state.differences()
    state.restore()
    assert state.differences() == []
    assert all(a is b for a, b in zip(optimizer.state, keys, strict=True))
    assert list(vars(optimizer)) == names
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert not optimizer._optimizer_step_pre_hooks


def test_tied_sparse_and_odd_tensors_are_restored() -> None:
    model: Any = nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=True), "b": nn.Linear(2, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"](torch.tensor([1, 2])).sum().backward()
    model.register_buffer("wide", torch.ones(1).expand(5))
    model.register_buffer("small", torch.ones(4).to(torch.float8_e4m3fn))
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    gradient, dense = model["a"].weight.grad, model["a"].weight.grad.to_dense()
    state = SavedState({"": model}, None)
    with torch.no_grad():
        model["a"].weight.zero_()
    model._buffers["turned"].zero_()
    gradient.zero_()
    state.restore()
    assert state.differences() == []
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.grad is gradient
    assert torch.equal(gradient.to_dense(), dense)
    assert torch.equal(model._buffers["turned"], torch.arange(6.0).reshape(2, 3).t())


def test_a_dead_context_is_reported_as_a_trial_that_could_not_be_undone(
    live_device: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    device = live_device(plain(), pairs)
    assert device.limit_bytes
    monkeypatch.setattr("autoaccum.devices.in_place.saved_state.release_memory", fail)
    with pytest.raises(NotMeasuredError, match=r"could not be undone \(RuntimeError: CUDA error: device-side assert"):
        device.trial((2, 2))
