from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import planted_causes as planted
import pytest
import small_verified as small
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import spectral_norm

from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.coupling_probe import find_coupling, probe_workload
from autoaccum.sentences import WHOLE_MODEL
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.pytree import map_tensors
from autoaccum.sources.workload import Workload

Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Any], Callable[[int], Any]]


def packed_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"])  # As long as the longest text of the batch.
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, : logits.shape[1]].flatten())


def two_views_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(torch.cat([batch[0], batch[0] + 1]))
    return functional.cross_entropy(outputs, batch[1].repeat(2))


WELL: dict[str, Case] = {
    "MLP": (lambda: small.between(nn.ReLU(inplace=True)), small.class_loss, small.pairs),
    "GroupNorm": (small.grouped, small.class_loss, small.images),
    "GPT with dropout": (small.Gpt, small.token_loss, small.texts),
    "its own loss": (small.HuggingFace, small.huggingface_loss, small.texts),
    "state": (small.Stateful, small.class_loss, small.sequences),
    "sorted and packed": (small.Packed, packed_loss, small.texts),
    "time times batch": (small.TimeFirst, small.class_loss, small.sequences),
    "experts": (small.Experts, small.class_loss, small.sequences),
    "spectral norm": (lambda: spectral_norm(nn.Linear(small.FEATURES, small.CLASSES)), small.class_loss, small.pairs),
    "regulariser": (small.Mlp, small.penalised_loss, small.pairs),
    "dropout of two views": (small.dropped, two_views_loss, small.pairs),
}

COUPLED: dict[str, tuple[Case, tuple[str, ...], bool | None]] = {
    "BatchNorm2d": ((small.Residual, small.class_loss, small.images), ("norm1", "norm2"), False),
    "one of its own": (
        (lambda: small.between(planted.Standardise()), small.class_loss, small.pairs),
        ("1",),
        False,
    ),
    "in the model's forward": ((planted.Standardising, small.class_loss, small.pairs), (WHOLE_MODEL,), False),
    "experts with a capacity": ((lambda: small.Experts(2), small.class_loss, small.sequences), (WHOLE_MODEL,), False),
    "similarities": ((planted.Similarities, planted.similarity_loss, small.captions), (WHOLE_MODEL,), None),
    "in-batch negatives": ((small.Clip, planted.contrastive_loss, small.captions), (), True),
    "root of the mean": ((small.Mlp, planted.root_loss, small.pairs), (), True),
    "hardest samples": ((small.Mlp, planted.hardest_loss, small.pairs), (), True),
    "normalised advantages": ((small.Mlp, planted.advantage_loss, small.pairs), (), True),
    "broadcast targets": ((small.Mlp, planted.broadcast_loss, small.pairs), (), True),
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
    model = small.between(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    state, batch = copy.deepcopy(model.state_dict()), small.pairs(4)
    copies = tuple(tensor.clone() for tensor in batch)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert find_coupling(model, resolve_objective(small.class_loss), batch, (2, 2)).modules == ("1.0",)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(one, other) for one, other in zip(batch, copies, strict=True))
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_of_the_model_is_the_reason() -> None:
    def raising(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no such thing\nat all")

    found = probe((small.Mlp, raising, small.pairs))
    assert found == Coupling(reason="ValueError: no such thing")
    assert not found.found


def test_random_mixing_of_samples_is_no_finding() -> None:
    found = probe((planted.Mixing, small.class_loss, small.pairs))
    assert (found.modules, found.loss) == ((), None)
    assert found.reason is not None
    assert "draws indices whose range grows with the batch" in found.reason


@pytest.mark.parametrize("joint", [False, True])
def test_a_mixup_is_to_be_made_before_the_step(joint: bool) -> None:
    def opposite(model: nn.Module, batch: Any) -> Tensor:
        return small.class_loss(model, (0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1]))

    found = probe((small.Mlp, opposite, small.pairs))
    assert (found.modules, found.loss, found.inputs) == ((), True, True)
    (message,) = found.warnings(is_joint=joint)
    assert message.code == "loss_mixes_inputs"
    assert not probe((small.Mlp, planted.root_loss, small.pairs)).inputs


def test_a_python_generator_used_for_each_sample_is_no_finding() -> None:
    def jittered(model: nn.Module, batch: Any) -> Tensor:
        factors = torch.tensor([random.random() for _ in batch[0]], dtype=batch[0].dtype)
        return small.class_loss(model, (batch[0] * factors[:, None], batch[1]))

    found = probe((small.Mlp, jittered, small.pairs))
    assert found.reason == "forward draws from Python's or NumPy's generator once for each sample"


def test_the_warning_fits_a_summed_loss_with_weight_decay() -> None:
    (message,) = probe((small.Mlp, planted.penalised_sum, small.pairs)).warnings()
    assert message.code == "loss_mixes_samples"
    assert probe((small.Mlp, small.penalised_loss, small.pairs)).loss is False  # As of a mean.


def test_a_loss_that_is_never_the_same_gives_no_finding() -> None:
    count = iter(range(1000))

    def counting(model: nn.Module, batch: Any) -> Tensor:
        return small.class_loss(model, batch) * (1 + next(count))

    assert probe((small.Mlp, counting, small.pairs)).reason == "the loss differs from run to run"


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.FEATURES, small.CLASSES)
        self.lock = threading.Lock()


class NeverDouble(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.FEATURES, small.CLASSES)

    def double(self) -> Any:
        raise ValueError("no double")


class Leaving(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.FEATURES, small.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        raise SystemExit("no such batch")


FAILING: dict[str, tuple[Callable[[], nn.Module], nn.Module, str]] = {
    "a model class holds a lock": (Locked, nn.CrossEntropyLoss(), "TypeError: cannot pickle '_thread.lock' object"),
    "the user's code leaves": (Leaving, nn.CrossEntropyLoss(), "SystemExit: no such batch"),
}


def check(model: Callable[[], nn.Module], criterion: nn.Module, **options: Any) -> Coupling:
    return probe_workload(Workload(model=model, batch=small.pairs, criterion=criterion, **options), small.Mlp())


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
        return functional.cross_entropy(self.norm(outputs), targets)


def test_a_criterion_s_batchnorm_mixes_rows_unless_it_is_frozen() -> None:
    criterion = NormalisedLoss()
    assert check(small.Mlp, criterion).found
    assert not check(small.Mlp, criterion, batchnorm="frozen").found
    assert criterion.norm.training


def test_a_model_that_fails_in_float64_runs_as_it_is() -> None:
    assert check(NeverDouble, nn.CrossEntropyLoss()) == Coupling(loss=False)


def test_a_model_of_much_work_is_found_by_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoaccum.accumulation.coupling_probe._MOST_WORK", 10)
    assert check(small.Mlp, nn.CrossEntropyLoss()).reason == "the model is too large for an experiment beside it"
