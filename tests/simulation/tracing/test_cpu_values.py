"""With `--values cpu`, a simulated step reads what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import LabelParts, TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.errors import UsageError
from autoaccum.simulation.trace_records import Trace
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode

MODEL = "del criterion\nmodel = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))\n"
MASK = f"""{MODEL}
def loss(model, batch):
    outputs = model(batch[0])
    far = outputs.abs().sum(1) > {{limit}}
    return F.cross_entropy(outputs, batch[1]) + outputs[far].square().sum()
"""
LOST = f"""{MODEL}
@torch.library.custom_op("test::only_cuda", mutates_args=(), device_types="cuda")
def only_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
only_cuda.register_fake(torch.empty_like)
def loss(model, batch):
    outputs = only_cuda(model(batch[0]).detach())
    return model(batch[0]).mean() * outputs.sum().item()
"""


@pytest.fixture
def computing(mode: FakeCudaMode) -> FakeCudaMode:
    mode.values.computed = True
    return mode


def test_each_read_has_the_value_of_the_cpu(computing: FakeCudaMode) -> None:
    host = torch.tensor([[3.0, -1.0], [0.5, 3.0]])
    there = host.cuda()
    assert (there.max().item(), bool((there > 9).any()), int(there[0, 0])) == (3.0, False, 3)
    assert there[there > 0].tolist() == [3.0, 0.5, 3.0]
    assert there.nonzero().shape == (4, 2)
    assert torch.unique(there).tolist() == [-1.0, 0.5, 3.0]
    assert there.cpu().numpy().sum() == 5.5
    assert torch.repeat_interleave(there, torch.tensor([2, 0]).cuda(), 0).shape == (2, 2)
    assert torch.equal(there, host.cuda())
    assert computing.recorder.reads == 11


def test_moments_that_the_cpu_leaves_out_do_not_matter(computing: FakeCudaMode) -> None:
    host = torch.arange(6.0).reshape(2, 3)
    norm = torch.nn.BatchNorm1d(3).eval()
    with torch.autocast("cuda", torch.bfloat16):  # The kernel of PyTorch, not that of cuDNN.
        there = torch.func.functional_call(norm, {n: p.cuda() for n, p in norm.state_dict().items()}, host.cuda())
    assert there.tolist() == norm(host).tolist()
    assert computing.recorder.reads == 1


def test_values_follow_writes_views_and_gradients(computing: FakeCudaMode) -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    torch.autograd.backward((weight * torch.arange(4.0).cuda()).sum())
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=True)
    optimizer.step()
    assert weight.tolist() == [1.0, 0.0, -1.0, -2.0]
    with torch.no_grad():
        weight.view(2, 2)[0].zero_()
        weight[weight < -1] = 7.0
    assert weight.tolist() == [0.0, 0.0, -1.0, 7.0]
    assert not computing.values.lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_operators_that_only_cuda_has(computing: FakeCudaMode, dtype: torch.dtype) -> None:
    """Efficient attention with a mask; in fp16 flash attention, with fewer heads of keys; and batch norm."""
    torch.manual_seed(0)
    half = dtype == torch.float16
    made = torch.randn(2, 4, 16, 8), *torch.randn(2, 2, 2 if half else 4, 16, 8), torch.randn(4, 4, 3, 3)
    mask = None if half else torch.randn(16, 16)
    found = []
    for device, of in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = [one.to(device, of).requires_grad_() for one in made]
        bias = None if mask is None else mask.to(device)
        norm = torch.nn.BatchNorm2d(4).to(device)
        query, key, value, images = leaves
        attended = F.scaled_dot_product_attention(query, key, value, bias, is_causal=half, enable_gqa=half)
        out = norm(images.float()).relu()
        gradients = torch.autograd.grad(attended.square().sum() + out.square().sum(), leaves)
        found.append([one.float().cpu() for one in (attended, out, norm.get_buffer("running_var"), *gradients)])
    for real, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, real, atol=2e-2 if half else 1e-4, rtol=1e-3)
    assert not computing.values.lost


def traced(ask: Any, *parts: int) -> Trace:
    trace = ask(TraceParts(parts=parts))
    assert isinstance(trace, Trace), trace
    return trace


def test_a_mask_takes_what_it_lets_through(simulated: Callable[..., Any]) -> None:
    sizes = {}
    for limit in (-1, 1e9):
        ask = simulated(MASK.format(limit=limit), values="cpu")
        trace = traced(ask, 40, 30)
        assert (trace.batch, trace.reads) == (40, 4), "a mask in each forward and backward"
        assert trace == ask(LabelParts(parts=(40, 30))).trace
        sizes[limit] = [trace.sizes.count(rows * 4 * 4) for rows in (40, 30)]
    assert sizes[-1] > sizes[1e9]


def test_a_value_that_the_cpu_cannot_compute_ends_the_step_at_the_line_that_reads_it(
    simulated: Callable[..., Any],
) -> None:
    failure = simulated(LOST, values="cpu")(Inspect())
    assert isinstance(failure, Failure)
    for words in ("sum().item()`", "the CPU cannot run test.only_cuda.default (", "plan where it can run"):
        assert words in failure.message


def test_ranks_that_shard_a_model_are_refused(simulated: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="^ranks shard the model, and the CPU computes values of a whole one"):
        simulated(MODEL, values="cpu", world_size=2, parallel="fsdp2")
