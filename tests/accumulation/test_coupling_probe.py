from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import coupled_models as small
import numpy as np
import pytest
import small_verified as verified
import torch
from torch import Tensor, nn

from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.coupling_probe import find_coupling, probe_workload
from autoaccum.sentences import WHOLE_MODEL
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.pytree import map_tensors
from autoaccum.sources.workload import Workload

Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Any], Callable[[int], Any]]

WELL: dict[str, Case] = {
    "MLP": (small.mlp, small.mean_square, small.rows),
    "GroupNorm": (verified.grouped, verified.class_loss, verified.images),
    "GPT with dropout": (verified.Gpt, verified.token_loss, verified.texts),
    "its own loss": (verified.HuggingFace, verified.huggingface_loss, verified.texts),
    "state": (small.Stateful, small.mean_square, small.sequences),
    "sorted and packed": (small.Packed, small.packed_loss, small.text),
    "time times batch": (small.TimeFirst, small.mean_square, small.sequences),
    "experts": (small.Experts, small.mean_square, small.sequences),
    "spectral norm": (small.spectral_mlp, small.mean_square, small.rows),
    "regulariser": (small.mlp, small.regularised_loss, small.rows),
    "dropout of two views": (lambda: small.normed_mlp(nn.Dropout(0.3)), small.two_views_loss, small.rows),
}

COUPLED: dict[str, tuple[Case, tuple[str, ...], bool | None]] = {
    "BatchNorm2d": ((verified.Residual, verified.class_loss, verified.images), ("norm1", "norm2"), False),
    "one of its own": ((lambda: small.normed_mlp(small.Normaliser()), small.mean_square, small.rows), ("1",), False),
    "in the model's forward": ((small.Centring, small.mean_square, small.rows), (WHOLE_MODEL,), False),
    "experts with a capacity": ((lambda: small.Experts(2), small.mean_square, small.sequences), (WHOLE_MODEL,), False),
    "similarities": ((small.Towers, small.clip_loss, small.pairs), (WHOLE_MODEL,), None),
    "in-batch negatives": (
        (lambda: small.Towers(similarities=False), small.negatives_loss, small.pairs),
        (),
        True,
    ),
    "root of the mean": ((small.mlp, small.root_loss, small.rows), (), True),
    "hardest samples": ((small.mlp, small.hardest_loss, small.classes), (), True),
    "normalised advantages": ((small.mlp, small.advantage_loss, small.advantages), (), True),
    "broadcast targets": ((small.mlp, small.spread_loss, small.rows), (), True),
}


def probe(case: Case, sizes: tuple[int, ...] = (2, 2), dtype: torch.dtype = torch.float64) -> Coupling:
    make, loss, make_batch = case
    torch.manual_seed(0)
    model, batch = make().to(dtype), make_batch(sum(sizes))
    batch = map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return find_coupling(model, resolve_objective(loss), batch, sizes)


@pytest.mark.parametrize("name", WELL)
def test_no_coupling_is_found_where_there_is_none(name: str) -> None:
    found = probe(WELL[name])
    assert (found.modules, found.loss) == ((), False), found


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_modules_and_losses_are_named(name: str) -> None:
    case, modules, loss = COUPLED[name]
    found = probe(case)
    assert (found.modules, found.loss) == (modules, loss), found


@pytest.mark.parametrize("how", [{"sizes": (2, 3)}, {"dtype": torch.float32}], ids=["unequal parts", "float32"])
@pytest.mark.parametrize("name", ["sorted and packed", "GPT with dropout", "BatchNorm2d", "in-batch negatives"])
def test_unequal_parts_and_single_precision_give_the_same(name: str, how: Any) -> None:
    case, modules, loss = COUPLED.get(name) or (WELL[name], (), False)
    found = probe(case, **how)
    assert (found.modules, found.loss) == (modules, loss), found


def test_leaves_model_batch_and_generators_as_they_are() -> None:
    model = small.normed_mlp(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    state, batch = copy.deepcopy(model.state_dict()), small.rows(4)
    copies = tuple(tensor.clone() for tensor in batch)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert find_coupling(model, resolve_objective(small.mean_square), batch, (2, 2)).modules == ("1.0",)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(one, other) for one, other in zip(batch, copies, strict=True))
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_of_the_model_is_the_reason() -> None:
    def raising(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no such thing\nat all")

    found = probe((small.mlp, raising, small.rows))
    assert found == Coupling(reason="ValueError: no such thing")
    assert not found.found


def test_random_mixing_of_samples_is_no_finding() -> None:
    found = probe((small.mlp, small.mixup_loss, small.rows))
    assert (found.modules, found.loss) == ((), None)
    assert found.reason is not None
    assert "draws indices whose range grows with the batch" in found.reason


@pytest.mark.parametrize("joint", [False, True])
def test_a_mixup_is_to_be_made_before_the_step(joint: bool) -> None:
    def opposite(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = (0.7 * tensor + 0.3 * tensor.flip(0) for tensor in batch)
        return nn.functional.mse_loss(model(inputs), targets)

    found = probe((small.mlp, opposite, small.rows))
    assert (found.modules, found.loss, found.inputs) == ((), True, True)
    (message,) = found.warnings(is_joint=joint)
    assert message.code == "loss_mixes_inputs"
    assert not probe((small.mlp, small.root_loss, small.rows)).inputs


def test_a_python_generator_used_for_each_sample_is_no_finding() -> None:
    def jittered(model: nn.Module, batch: Any) -> Tensor:
        factors = torch.tensor([random.random() for _ in batch[0]], dtype=batch[0].dtype)
        return small.mean_square(model, (batch[0] * factors[:, None], batch[1]))

    found = probe((small.mlp, jittered, small.rows))
    assert found.reason == "forward draws from Python's or NumPy's generator once for each sample"


def test_the_warning_fits_a_summed_loss_with_weight_decay() -> None:
    def summed(model: nn.Module, batch: Any) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in model.parameters())
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum") + decay

    (message,) = probe((small.mlp, summed, small.rows)).warnings()
    assert message.code == "loss_mixes_samples"
    assert probe((small.mlp, small.regularised_loss, small.rows)).loss is False  # As of a mean.


def test_a_loss_that_is_never_the_same_gives_no_finding() -> None:
    count = iter(range(1000))

    def counting(model: nn.Module, batch: Any) -> Tensor:
        return small.mean_square(model, batch) * (1 + next(count))

    assert probe((small.mlp, counting, small.rows)).reason == "the loss differs from run to run"


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)
        self.lock = threading.Lock()


class NeverDouble(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)

    def double(self) -> Any:
        raise ValueError("no double")


class Leaving(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        raise SystemExit("no such batch")


FAILING: dict[str, tuple[Callable[[], nn.Module], nn.Module, str]] = {
    "a model class holds a lock": (Locked, nn.MSELoss(), "TypeError: cannot pickle '_thread.lock' object"),
    "the user's code leaves": (Leaving, nn.MSELoss(), "SystemExit: no such batch"),
}


def check(model: Callable[[], nn.Module], criterion: nn.Module, **options: Any) -> Coupling:
    return probe_workload(Workload(model=model, batch=small.rows, criterion=criterion, **options), small.mlp())


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_within_is_the_reason(name: str) -> None:
    model, criterion, reason = FAILING[name]
    found = check(model, criterion)
    assert not found.found
    assert found.reason is not None
    assert found.reason.startswith(reason)


class NormalisedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.as_tensor((self.norm(outputs) - targets).square().mean())


def test_a_criterion_s_batchnorm_mixes_rows_unless_it_is_frozen() -> None:
    criterion = NormalisedLoss()
    assert check(small.mlp, criterion).found
    assert not check(small.mlp, criterion, batchnorm="frozen").found
    assert criterion.norm.training


def test_a_model_that_fails_in_float64_runs_as_it_is() -> None:
    assert check(NeverDouble, nn.MSELoss()) == Coupling(loss=False)


def test_a_model_of_much_work_is_found_by_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoaccum.accumulation.coupling_probe._MOST_WORK", 10)
    assert check(small.mlp, nn.MSELoss()).reason == "the model is too large for an experiment beside it"
