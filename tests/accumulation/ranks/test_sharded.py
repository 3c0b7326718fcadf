"""An update of a model that FSDP2 shards equals that of one process with the whole batch: real processes over gloo."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_updates import Net, check_updates, dealt, pairs, shard, shard_first, shard_on_host, whole
from torch import nn

from autoaccum import Accumulator
from autoaccum.accumulation.argument_checks import current_facts
from autoaccum.accumulation.update import StorageRecorder
from autoaccum.errors import UsageError
from autoaccum.options import GradSync
from autoaccum.sharded_tensors import fsdp2_modules, param_groups
from autoaccum.sources.objective import resolve_objective
from autoaccum.spec import TrainingSpec


@pytest.mark.parametrize(
    ("rank_samples", "mesh", "grad_sync"),
    [
        ([1, 6], None, "each"),  # In "tokens", rank 0 has a sample without a token.
        ([0, 4, 3, 0], (2, 2), "last"),
    ],
    ids=str,
)
def test_an_update_of_a_sharded_model_is_that_of_one_process(
    rank_samples: list[int], mesh: tuple[int, ...] | None, grad_sync: str
) -> None:
    wrap = partial(shard, mesh=mesh, reshard=grad_sync == "each")
    cases = ("clipped", "class weights", "tokens, tied") if mesh is None else ("sum", "terms")
    other = shard_first if mesh is None else shard_on_host
    check_updates(rank_samples, [*((case, wrap) for case in cases), ("clipped", other)], grad_sync=grad_sync)


def settings(model: Any) -> list[Any]:
    names = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads")
    groups = [group for module in fsdp2_modules(model) for group in param_groups(module)]
    return [{name: getattr(group, name) for name in names} for group in groups]


def lower_precision(policy: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return gradients after an update by SGD with a rate of 1, once as the difference of the weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    model.to(options.pop("dtype", torch.float32))
    before = [parameter.detach().double().clone() for parameter in model.parameters()]
    if dist.is_initialized():
        model = shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 1.0))
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=1, clip_norm=torch.inf, **options)
    torch.manual_seed(8)
    dtype = torch.float32 if dist.is_initialized() and policy else next(model.parameters()).dtype
    # In float32 first: torch 2.11 draws other values in bf16.
    inputs, targets = torch.randn(48, 64).to(dtype), torch.randint(0, 8, (48,))
    mine = slice(None) if not dist.is_initialized() else slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
    result = accumulator.step((inputs[mine], targets[mine]))
    after = [whole(parameter).double() for parameter in model.parameters()]
    scale = None if accumulator._updater.scaler is None else accumulator._updater.scaler.get_scale()
    return [old - new for old, new in zip(before, after, strict=True)], result.grad_norm, result.updated, scale


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


LOWER: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "policy": (BF16, {"grad_sync": "last"}, 0.01),
    "autocast": ({}, {"precision": "bf16", "grad_sync": "last"}, 0.01),
    "scaler": ({}, {"precision": "fp16"}, 0.003),
    "bf16 parameters": ({}, {"dtype": torch.bfloat16, "lr": 64.0}, 0.01),
}


def all_lower_precisions() -> dict[str, Any]:
    return {name: lower_precision(policy, {**options}) for name, (policy, options, _) in LOWER.items()}


def test_lower_precision_is_that_of_one_process_to_rounding() -> None:
    ranks = on_ranks(2, all_lower_precisions)
    for name, (_, options, tolerance) in LOWER.items():
        exact, norm, _, _ = lower_precision({}, {"lr": options.get("lr", 1.0)})
        largest = max(float(one.abs().max()) for one in exact)
        for found, norm_here, updated, scale in (rank[name] for rank in ranks):
            assert updated, name
            assert scale in (None, 65536.0)
            assert norm_here == pytest.approx(norm, rel=tolerance), name
            for one, two in zip(exact, found, strict=True):
                assert float((one - two).abs().max()) < tolerance * largest, name


def overflow() -> Any:
    model = shard(nn.Sequential(nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model(torch.ones(2, 4))  # Leaves the parameters gathered, and the model without those of the optimizer.
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=1, precision="fp16")
    before = whole(model[0].weight)
    inputs = torch.full((2, 4), torch.inf if dist.get_rank() == 1 else 1.0)
    updated = accumulator.step((inputs, torch.zeros(2, 3))).updated
    assert accumulator._updater.scaler is not None
    return updated, torch.equal(before, whole(model[0].weight)), accumulator._updater.scaler.get_scale()


def recorded_bytes() -> int:
    weight = shard(nn.Linear(8, 8, bias=False)).weight.detach()
    with StorageRecorder() as recorder:
        made = weight * 2
    assert made.shape == (8, 8)
    found: int = recorder.alive_bytes
    return found


def test_the_memory_of_an_update_is_that_of_a_ranks_own_part() -> None:
    assert on_ranks(2, recorded_bytes) == [8 * 8 * 4 // 2] * 2


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    assert on_ranks(2, overflow) == [(False, True, 32768.0)] * 2


def batchnorm_and_settings(grad_sync: GradSync) -> Any:
    model = shard(Net().double())
    model.norm.train()
    model.set_requires_gradient_sync(False)
    before = settings(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, grad_sync=grad_sync)
    tracked = [int(model.norm.num_batches_tracked)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.step(pairs(6 if dist.get_rank() else 2))
    facts = current_facts(model, optimizer, resolve_objective(nn.CrossEntropyLoss()), TrainingSpec())
    assert (facts["model"], facts["parameters"]) == ("Net", sum(one.numel() for one in Net().parameters()))
    tracked.append(int(model.norm.num_batches_tracked))
    return tracked, before == settings(model), len(before)


def batchnorm_and_settings_of_each() -> list[Any]:
    return [batchnorm_and_settings("each"), batchnorm_and_settings("last")]


def test_what_does_not_count_leaves_buffers_and_settings_as_they_are() -> None:
    first, second = on_ranks(2, batchnorm_and_settings_of_each)
    assert first == [([0, 1], True, 3)] * 2
    assert second == [([0, 3], True, 3)] * 2


def running_statistics(rank_samples: list[int] | None = None) -> Any:
    model: Any = Net().double()
    model.norm.train()
    model = model if rank_samples is None else shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=3, batchnorm="running")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.step_parts(dealt(pairs(7), rank_samples))
    return [*model.norm.buffers()]


def running_statistics_of_shares() -> list[Any]:
    return [running_statistics(rank_samples) for rank_samples in ([2, 5], [0, 7])]


def test_running_statistics_are_those_of_one_process() -> None:
    alone = running_statistics()
    for found in on_ranks(2, running_statistics_of_shares):
        torch.testing.assert_close(found, [alone, alone], rtol=1e-12, atol=1e-12)


def refusals() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    parallel = shard(Net())
    parallel.norm.weight = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)]))
    half = nn.Linear(4, 4)
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    one = nn.Linear(4, 4)
    fully_shard(one, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    found = []
    for model, options in (
        (parallel, {}),
        (half, {"grad_sync": "last"}),
        (one, {}),
        (shard_first(Net()), {"precision": "fp16"}),
        (shard(Net()), {"batchnorm": "exact"}),
        (shard(Net()), {"coupled": True}),
        (shard(Net()), {"grad_sync": "first"}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, **options)
        except UsageError as error:
            found.append(str(error))
    return found


def test_what_the_sums_over_ranks_cannot_be_made_with_is_refused() -> None:
    needs = (
        "parts of the batch need each other, and fully_shard runs a model's parts one after the other: leave the model"
        " unsharded, as in DistributedDataParallel"
    )
    for found in on_ranks(2, refusals):
        assert found == [
            "norm.weight is a DTensor that fully_shard does not shard, as in tensor parallelism: shard the model by"
            " fully_shard alone",
            'with grad_sync="last", FSDP2 adds up parts\' gradients in bfloat16: give fully_shard'
            " mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
            "the model is sharded over 1 of 2 ranks: call fully_shard with a mesh of all ranks",
            "a GradScaler is used, and only some parameters are sharded: call fully_shard on the whole model",
            needs,
            needs,
            "there is no grad_sync 'first': choose each or last",
        ]
