"""An update of a model that FSDP2 shards equals that of one process with the whole batch: real processes over gloo."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_errors import OutOfMemoryAt
from on_ranks import Died, on_ranks
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.accumulation.argument_checks import current_facts
from autoaccum.accumulation.state_hash import state_digest
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.accumulation.update import StorageRecorder
from autoaccum.errors import AutoaccumError, RankFailedError, RankLostError, UpdateInterrupted, UsageError
from autoaccum.options import Reduce
from autoaccum.workload.objective import resolve_objective


class Net(nn.Module):
    """Two sharded modules within a third, of sizes that ranks share unevenly; a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5))
        self.frozen, self.unused = nn.Linear(7, 7).requires_grad_(False), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(6, affine=False).eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.frozen(self.first(self.norm(x)).tanh()))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.first = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.first(self.embed(tokens)))
        return out


def pairs(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 5, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randint(0, 11, (samples, 7))
    targets = rows.clone()
    for row in range(samples):
        targets[row, row % 7 :] = -100  # Row 0 has no token at all.
    return rows, targets


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    counted = batch[1] != -100
    chosen = model(batch[0]).log_softmax(-1).gather(-1, batch[1].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss: Tensor = -(chosen * counted).sum() / counted.sum()  # Of no token, loss and gradient are NaN.
    return loss


def token_count(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def terms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    outputs = model(batch[0])
    return {"class": nn.functional.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "mean": (Net, pairs, {"loss": nn.CrossEntropyLoss()}),
    "clipped": (Net, pairs, {"loss": nn.CrossEntropyLoss(), "clip_norm": 0.1}),
    "sum": (Net, pairs, {"loss": nn.CrossEntropyLoss(reduction="sum"), "clip_norm": 0.1}),
    "class weights": (Net, pairs, {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0, 4, 5]).double())}),
    "terms": (Net, pairs, {"loss": terms, "clip_norm": 0.1}),
    "tokens, tied": (Tied, tokens, {"loss": token_loss, "weight": token_count, "clip_norm": 0.1}),
}


def shard(model: nn.Module, mesh: tuple[int, ...] | None = None, **options: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = mesh or (dist.get_world_size(),)
    made = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in ("first", "second"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), mesh=made, **options)
    fully_shard(model, mesh=made, **options)
    return model


def shard_first(model: Any) -> Any:
    shard(model.first)
    return model


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.clone()


def updates(case: str, batches: list[Any], share: Callable[[Any], list[Any]], wrap: Any = None, **more: Any) -> Any:
    """Return the state and the results after an update from each of `batches`."""
    make, _, options = CASES[case]
    model = make().double()
    model = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    accumulator = Accumulator(model, optimizer, micro_batch=2, scheduler=scheduler, **(copy.deepcopy(options) | more))
    results = [accumulator.step_parts(share(batch)) for batch in batches]
    assert all(parameter.grad is None for parameter in model.parameters())
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return state, [(one.loss, one.grad_norm, one.samples, dict(one.terms)) for one in results]


def dealt(shares: list[int]) -> Callable[[Any], list[Any]]:
    """Return a function that gives each rank its share of a batch, none if it has no samples."""

    def share(batch: Any) -> list[Any]:
        start = sum(shares[: dist.get_rank()])
        mine = tuple(one[start : start + shares[dist.get_rank()]] for one in batch)
        return [mine] if len(mine[0]) else []

    return share


def all_cases(shares: list[int], mesh: tuple[int, ...] | None, reduce: str) -> Any:
    def wrap(model: Any) -> Any:
        model = shard(model, mesh)
        model.set_reshard_after_backward(reduce == "each")
        return model

    found = {}
    for case, (_, batch, _) in CASES.items():
        found[case] = updates(case, [batch(7), batch(7), batch(7)], dealt(shares), wrap, reduce=reduce)
    found["partly"] = updates("clipped", [pairs(7)] * 3, dealt(shares), shard_first, reduce=reduce)
    return found


@pytest.mark.parametrize(
    ("shares", "mesh", "reduce"),
    [
        ([4, 3], None, "each"),
        ([1, 6], None, "last"),  # In "tokens", rank 0 has a sample without a token.
        ([3, 0, 2, 2], None, "each"),
        ([1, 3, 2, 1], (2, 2), "each"),
        ([0, 4, 3, 0], (2, 2), "last"),
    ],
    ids=str,
)
def test_an_update_of_a_sharded_model_is_that_of_one_process(
    shares: list[int], mesh: tuple[int, ...] | None, reduce: str
) -> None:
    together = on_ranks(len(shares), all_cases, shares, mesh, reduce)
    for case in together[0]:
        of = {"partly": "clipped"}.get(case, case)
        alone = updates(of, [CASES[of][1](7)] * 3, lambda batch: [batch])
        for found in together:
            state, results = found[case]
            for name, value in alone[0].items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)
            for (loss, norm, samples, named), (loss_here, norm_here, samples_here, named_here) in zip(
                alone[1], results, strict=True
            ):
                assert loss_here == pytest.approx(loss, rel=1e-12)
                assert norm_here == (None if norm is None else pytest.approx(norm, rel=1e-12))
                assert samples_here == samples
                assert named_here == pytest.approx(named, rel=1e-12)
            assert results[0][1] == together[0][case][1][0][1]


def settings(model: Any) -> list[Any]:
    names = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads")
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [{name: getattr(group, name) for name in names} for state in states for group in state._fsdp_param_groups]


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
    inputs, targets = torch.randn(48, 64, dtype=dtype), torch.randint(0, 8, (48,))
    mine = slice(None) if not dist.is_initialized() else slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
    result = accumulator.step((inputs[mine], targets[mine]))
    after = [whole(parameter).double() for parameter in model.parameters()]
    scale = None if accumulator._scaler is None else accumulator._scaler.get_scale()
    return [old - new for old, new in zip(before, after, strict=True)], result.grad_norm, result.updated, scale


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("policy", "options", "tolerance"),
    [
        (BF16, {"reduce": "each"}, 0.01),
        (BF16, {"reduce": "last"}, 0.01),
        ({}, {"precision": "bf16", "reduce": "last"}, 0.01),
        ({}, {"precision": "fp16"}, 0.003),
        ({}, {"dtype": torch.bfloat16, "lr": 64.0}, 0.01),
    ],
    ids=["policy, each", "policy, last", "autocast", "scaler", "bf16 parameters"],
)
def test_lower_precision_is_that_of_one_process_to_rounding(
    policy: dict[str, Any], options: dict[str, Any], tolerance: float
) -> None:
    exact, norm, _, _ = lower_precision({}, {"lr": options.get("lr", 1.0)})
    for found, norm_here, updated, scale in on_ranks(2, lower_precision, policy, options):
        assert updated
        assert scale in (None, 65536.0)
        assert norm_here == pytest.approx(norm, rel=tolerance)
        largest = max(float(one.abs().max()) for one in exact)
        for one, two in zip(exact, found, strict=True):
            assert float((one - two).abs().max()) < tolerance * largest


def overflow() -> Any:
    model = shard(nn.Sequential(nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model(torch.ones(2, 4))  # Leaves the parameters gathered, and the model without those of the optimizer.
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=1, precision="fp16")
    before = whole(model[0].weight)
    inputs = torch.full((2, 4), torch.inf if dist.get_rank() == 1 else 1.0)
    updated = accumulator.step((inputs, torch.zeros(2, 3))).updated
    assert accumulator._scaler is not None
    return updated, torch.equal(before, whole(model[0].weight)), accumulator._scaler.get_scale()


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


def batchnorm_and_settings(reduce: Reduce) -> Any:
    model = shard(Net().double())
    model.norm.train()
    model.set_requires_gradient_sync(False)
    before = settings(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, reduce=reduce)
    tracked = [int(model.norm.num_batches_tracked)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.step(pairs(6 if dist.get_rank() else 2))
    facts = current_facts(model, optimizer, resolve_objective(nn.CrossEntropyLoss()), "fp32")
    assert (facts["model"], facts["parameters"]) == ("Net", sum(one.numel() for one in Net().parameters()))
    tracked.append(int(model.norm.num_batches_tracked))
    return tracked, before == settings(model), len(before)


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_what_does_not_count_leaves_buffers_and_settings_as_they_are(reduce: Reduce) -> None:
    assert on_ranks(2, batchnorm_and_settings, reduce) == [([0, 1], True, 3), ([0, 3], True, 3)]


def running_statistics(share: Callable[[Any], list[Any]]) -> Any:
    model: Any = Net().double()
    model.norm.train()
    model = shard(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=3, batchnorm="running")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.step_parts(share(pairs(7)))
    return [*model.norm.buffers()]


@pytest.mark.parametrize("shares", [[2, 5], [0, 7]], ids=str)
def test_running_statistics_are_those_of_one_process(shares: list[int]) -> None:
    alone = running_statistics(lambda batch: [batch])
    for found in on_ranks(2, running_statistics, dealt(shares)):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


class SeenGradients(StepObserver):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters, self.seen = list(parameters), list[bool]()

    def phase(self, phase: StepPhase) -> None:
        if phase == "forward":
            self.seen.append(any(parameter.grad is not None for parameter in self._parameters))


def seen_gradients(mesh: tuple[int, ...], reduce: Reduce) -> Any:
    model = shard(Net().double(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = SeenGradients(model.parameters())
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, reduce=reduce, observer=observer)
    accumulator.step(pairs(6 if dist.get_rank() else 3))
    return observer.seen


@pytest.mark.parametrize(
    ("mesh", "reduce", "seen"),
    [((2,), "each", [False, True, True]), ((2,), "last", [False] * 3), ((2, 1), "each", [False] * 3)],
    ids=["each", "last", "replicated too"],
)
def test_gradients_are_summed_when_they_are_asked_to(mesh: tuple[int, ...], reduce: Reduce, seen: list[bool]) -> None:
    assert on_ranks(2, seen_gradients, mesh, reduce) == [seen, seen]


def update_that_fails() -> Any:
    model = shard(Net().double())

    class FailingAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if dist.get_rank() == 1:
                raise ValueError("within the update")

    optimizer = FailingAdamW(model.parameters(), lr=0.01, foreach=False)
    batch = pairs(6)
    model(batch[0]).sum().backward()  # FSDP2 registers hooks when it runs first.
    optimizer.zero_grad()
    before = state_digest(model, optimizer)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2)
    names = []
    for _ in range(2):
        try:
            accumulator.step(batch)
        except (RankFailedError, ValueError) as error:
            names.append(type(error).__name__)
    return names, before == state_digest(model, optimizer)


def test_an_update_that_fails_on_one_rank_is_undone_on_all() -> None:
    assert on_ranks(2, update_that_fails) == [(["RankFailedError"] * 2, True), (["ValueError"] * 2, True)]


def fails(phase: str, number: int, how: str) -> Any:
    accumulator, batch = None, pairs(8)
    model = shard(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if how == "error" and dist.get_rank() == 1:
            raise ValueError("of the user's")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accumulator = Accumulator(model, optimizer, loss, micro_batch=4, clip_norm=0.1)
    active = how == "memory" and dist.get_rank() == 1
    injected = OutOfMemoryAt(number, lambda: active and accumulator.phase == phase)
    started, again = time.monotonic(), False
    try:
        with injected:
            accumulator.step(batch)
    except (AutoaccumError, ValueError) as error:
        ended = error
    try:
        accumulator.step(batch)
    except UpdateInterrupted:
        again = True
    seconds = time.monotonic() - started
    code, size = getattr(ended, "exit_code", None), getattr(ended, "next_micro_batch", None)
    return injected.fired, type(ended).__name__, code, size, str(ended), again, seconds < 15


@pytest.mark.parametrize(
    ("phase", "number"), [("forward", 0), ("forward", 9), ("backward", 0), ("backward", 12), ("clip", 8), ("update", 3)]
)
def test_memory_that_runs_out_on_one_rank_ends_all_ranks(phase: str, number: int) -> None:
    first, second = on_ranks(2, fails, phase, number, "memory")
    assert (first[0], second[0]) == (False, True)
    text = (
        f"memory ran out on rank 1 ({phase}) with micro-batches of 4, and ranks that share a sharded model cannot"
        " repeat an update: load a checkpoint in new processes and go on with micro_batch=3"
    )
    for found in (first, second):
        # What fails after the gradients are summed is undone, and modules are not half-way.
        assert found[1:] == ("UpdateInterrupted", 3, 3, text, phase != "update", True)


def test_an_error_on_one_rank_ends_all_ranks() -> None:
    first, second = on_ranks(2, fails, "none", 0, "error")
    assert first[1:4] == ("RankFailedError", 3, None)
    assert first[4].startswith("rank 1 failed: ValueError: of the user's")
    assert second[1:] == ("ValueError", None, None, "of the user's", True, True)


def killed(number: int) -> Any:
    model = shard(Net().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal number
        number -= 1
        if number == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accumulator = Accumulator(model, optimizer, loss, micro_batch=4)
    try:
        while True:
            accumulator.step(pairs(8))
    except RankLostError as error:
        return error.exit_code, str(error).startswith("rank 1 of 2 ended or no longer answers")


@pytest.mark.parametrize("number", [1, 4])
def test_a_rank_that_is_killed_is_named(number: int) -> None:
    assert on_ranks(2, killed, number) == [(3, True), Died()]


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
        (half, {"reduce": "last"}),
        (one, {}),
        (shard_first(Net()), {"precision": "fp16"}),
        (shard(Net()), {"batchnorm": "exact"}),
        (shard(Net()), {"coupled": True}),
        (shard(Net()), {"reduce": "first"}),
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
            'with reduce="last", FSDP2 adds up parts\' gradients in bfloat16: give fully_shard'
            " mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
            "the model is sharded over 1 of 2 ranks: call fully_shard with a mesh of all ranks",
            "a GradScaler is used, and only some parameters are sharded: call fully_shard on the whole model",
            needs,
            needs,
            'reduce is \'first\': take "each" or "last"',
        ]


def without_effect() -> str:
    model = shard(Net().double())
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync = lambda *_, **__: None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2, reduce="last")
    try:
        accumulator.step(pairs(8))
    except UsageError as error:
        return str(error)
    return ""


def test_a_setting_without_effect_is_seen() -> None:
    for found in on_ranks(2, without_effect):
        assert found.startswith("set_requires_gradient_sync(False) had no effect: gradients were summed before the")
