"""Training scripts on a simulated card, each in its own process, as they are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulated_fixtures import make_explained, simulated
from warm_children import Copy, Nurseries
from watched_scripts import WatchedScript

from autoaccum.devices.command.settings import ProcessReport, SimulatedRun
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from autoaccum.simulation.tracing.trace_scaling import fit_affine_trace

__all__ = ["simulated"]

IMPORTS = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
"""
MODEL = """
def build():
    first = (nn.Linear(64, 4096), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*first, nn.Linear(4096, 512), nn.GELU(), nn.Linear(512, 10))
"""
SCRIPT = f"""
{IMPORTS}
from torch.utils.data import DataLoader, TensorDataset
{MODEL}
size, parts = int(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(400, 64), torch.randint(0, 10, (400,)))
best, total, right, images = 1e9, 0.0, 0, []
for number, (x, y) in enumerate(DataLoader(data, batch_size=size, shuffle=True, drop_last=True), start=1):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    out = model(x)
    loss = F.cross_entropy(out, y) / parts
    loss.backward()
    total += loss.item()
    right += (out.argmax(1) == y).sum().item()
    images.append(out.detach().cpu().numpy()[0])
    if number % parts == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss < best:
            best = loss.item()
        print(f"loss {{loss:.3f}} of {{total:.2f}}: {{right}} of {{size}}, {{right / size:.0%}}, {{out[0].tolist()}}")
"""
WORKLOAD = f"""
{MODEL}
model = build
def batch(n):
    return torch.randn(n, 64), torch.randint(0, 10, (n,))
max_grad_norm = 1.0
def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
"""

Start = Callable[..., WatchedScript]


@pytest.fixture
def start(tmp_path: Path, nurseries: Nurseries) -> Start:
    """From the lines of a script, the words of its command and settings to the script, which runs in a warm copy."""
    scripts: list[WatchedScript] = []

    def run(lines: str, *words: Any, **settings: Any) -> WatchedScript:
        settings = {"start_process": partial(Copy, nurseries[False]), **settings}
        scripts.append(WatchedScript(tmp_path / str(len(scripts)), lines, words, **settings))
        return scripts[-1]

    return run


def recorded(report: ProcessReport) -> SimulatedRun:
    assert report.failure is None, report.failure
    assert report.simulated is not None
    return report.simulated


def trace_of(run: SimulatedRun) -> Trace:
    assert run.trace is not None
    return run.trace


def peak_bytes(trace: Trace) -> int:
    return Replayer(find_card("rtx3090"), AllocatorSettings(), read_torch_release()).peak_bytes(trace)


def test_a_script_has_the_peak_of_the_same_training_as_a_workload(start: Start, simulated: Any) -> None:
    scripts = [start(SCRIPT, size, 2, parts=(size, size)) for size in (2, 8)]
    small, chosen = (recorded(script.report()) for script in scripts)
    workload = simulated(WORKLOAD)(TraceParts(parts=(8, 8)))

    assert fit_affine_trace([trace_of(small), trace_of(chosen)]).at(8) == trace_of(chosen)
    assert peak_bytes(trace_of(chosen)) == pytest.approx(peak_bytes(workload), rel=0.02)
    (note,) = chosen.notes
    assert note.code == "values_assumed"
    lines = SCRIPT.splitlines()
    read = [lines[int(place.partition(":")[2]) - 1] for place in note.facts["places"]]
    assert [line.split()[0].partition("(")[0] for line in read] == (
        ["total", "right", "images.append", "if", "best", "print"]
    )


GAN = f"""
{IMPORTS}
size = int(sys.argv[1])
class Generator(nn.Sequential):
    pass
class Critic(nn.Sequential):
    pass
generator = Generator(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 784)).cuda()
critic = Critic(nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1)).cuda()
optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(size, 1).cuda(), torch.zeros(size, 1).cuda()
while True:
    images = torch.randn(size, 784).cuda()
    made = generator(torch.randn(size, 16, device="cuda"))
    for model, optimizer, pairs in (
        (critic, optimizers[0], ((images, real), (made.detach(), fake))),
        (generator, optimizers[1], ((made, real),)),
    ):
        model.zero_grad()
        for inputs, labels in pairs:
            criterion(critic(inputs), labels).backward()
        optimizer.step()
"""


def test_the_models_of_a_gan_are_both_labelled(start: Start) -> None:
    script = start(GAN, 32, parts=(32,), purpose="label")
    labelled = recorded(script.report()).labelled
    assert labelled is not None
    explained = make_explained(labelled)

    held = explained.before("batch")
    weights = 4 * (16 * 512 + 512 + 512 * 784 + 784 + 784 * 256 + 256 + 256 + 1)
    assert held["parameters"] == pytest.approx(weights, rel=0.02)
    assert held["optimizer_state"] == pytest.approx(2 * weights, rel=0.02)
    paths = {module.path for module in labelled.modules}
    assert {"Generator.0", "Generator.2", "Critic.0", "Critic.1"} <= paths


UNUSUAL_ORDER = f"""
{IMPORTS}
{MODEL}
model = build()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.zeros(1, 64)).sum()
model.cuda()
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def test_an_optimizer_and_a_first_call_that_came_before_the_model_was_moved(start: Start) -> None:
    """As in PyTorch's tutorial on DDP, and in detectors, which find their strides by a call."""
    report = start(UNUSUAL_ORDER, parts=(8,), purpose="label").report()
    labelled = recorded(report).labelled
    assert labelled is not None
    held = make_explained(labelled).before("batch")
    assert held["optimizer_state"] == pytest.approx(2 * held["parameters"], rel=0.02)
    assert report.first_batch == ((8, 64),)


TOOLS = f"""
{IMPORTS}
import copy, json, threading
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return torch.randn(64), at % 10

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
    def forward(self, x):
        return self.last(checkpoint(self.second, F.relu(self.first(x)), use_reentrant=False))

def main():
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    assert torch.cuda.device_count() == 1 and "3090" in torch.cuda.get_device_name()
    torch.save(Net().state_dict(), "pretrained.pt")
    model = nn.DataParallel(torch.compile(Net()).cuda())
    model.module.load_state_dict(torch.load("pretrained.pt", map_location="cuda"))
    average = AveragedModel(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler, writer = torch.cuda.amp.GradScaler(), SummaryWriter("logs")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for way in ("fork", "spawn"):
        loader = DataLoader(Data(), 4, num_workers=1, pin_memory=True, multiprocessing_context=way)
        for number, (x, y) in enumerate(loader):
            start.record()
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model.module)

            def closure():
                other.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                print(loss.item())
                return loss

            other.step(closure)
            end.record()
            torch.cuda.synchronize()
            plateau.step(loss)
            writer.add_scalar("seconds", start.elapsed_time(end))
            writer.add_scalar("loss", loss)
            with torch.inference_mode():
                assert model(torch.randn(4, 64).to("cuda", non_blocking=True)).is_cuda
            right = (model(x).argmax(1) == y).sum().item()
            print(json.dumps({{"right": right}}), f"{{right:4d}}", "%d" % right, right + 1 == 2)
            state = {{"model": model.state_dict(), "scaler": scaler.state_dict(), "average": average.state_dict()}}
            torch.save({{**state, "optimizer": optimizer.state_dict(), "right": right}}, "last.pt")
            assert torch.load("last.pt")["model"]["module.first.weight"].shape == (256, 64)
            copy.deepcopy(model)
            if number == 1:
                break

if __name__ == "__main__":
    main()
"""


def test_what_training_scripts_use_works(start: Start) -> None:
    script = start(TOOLS, parts=(4,), start_process=subprocess.Popen)
    report = script.report()

    assert "compiled" in {notice.code for notice in recorded(report).notices}
    assert report.updates == 3, script.output


REFUSED = f"""
{IMPORTS}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        x = self.layer(x)
        return x[: 1 + (x.sum() > 0).item()]
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    out = model(torch.randn(4, 8).cuda())
    out.sum().backward()
    optimizer.step()
"""


def test_a_value_that_a_model_reads_is_refused_unless_it_is_computed(start: Start) -> None:
    refused, computed = start(REFUSED, parts=(4,)), start(REFUSED, parts=(4,), values="cpu")
    failure = refused.report().failure

    assert failure is not None
    assert "a value is read from a tensor" in failure.message
    assert "train.py:13" in failure.message
    trace = trace_of(recorded(computed.report()))
    assert (trace.batch, trace.reads > 0) == (4, True)


RANKS = f"""
{IMPORTS}
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

size, way = int(sys.argv[1]), sys.argv[2]
rank, local, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
torch.cuda.set_device(local)
dist.init_process_group("nccl", init_method="env://")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 4, "nccl")
norm = nn.SyncBatchNorm(4096, affine=False, track_running_stats=False) if way == "copies" else nn.Identity()
net = nn.Sequential(nn.Linear(64, 4096, bias=False), norm, nn.ReLU(), nn.Linear(4096, 12, bias=False))
if way == "sharded":
    model = fully_shard(net)
else:
    model = DDP(net.cuda(), device_ids=[local], gradient_as_bucket_view=way == "views")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(data)
assert len(sampler) == 1024
names = [None] * ranks
dist.all_gather_object(names, "rank")
assert names == ["rank"] * ranks
for number, (x, y) in enumerate(DataLoader(data, size, sampler=sampler), start=1):
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    if way != "sharded" and number % 2:
        with model.no_sync():
            loss.backward()
        continue
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    every = [torch.zeros_like(mean) for _ in range(ranks)]
    dist.all_gather(every, mean)
    dist.barrier()
    print(mean.item(), torch.stack(every).mean().item())
"""


def test_the_first_of_several_ranks_holds_buckets_or_shards(start: Start) -> None:
    scripts = [
        start(RANKS, 8, way, parts=(8, 8), world_size=4, purpose="label") for way in ("copies", "views", "sharded")
    ]
    held = []
    for script in scripts:
        labelled = recorded(script.report()).labelled
        assert labelled is not None
        assert script.report().world_size == 4
        held.append(make_explained(labelled).before("batch"))
    copies, views, sharded = held
    weights = 4 * (64 * 4096 + 4096 * 12)

    # After the first of two parts, whose gradients are not summed yet.
    assert (copies["parameters"], copies["gradients"], copies["communication"]) == (weights, weights, weights)
    assert (views["parameters"], views["gradients"], views["communication"]) == (weights, 2 * weights, 0)
    assert sharded["parameters"] == weights // 4


def test_ranks_that_a_script_starts_itself_are_refused(start: Start) -> None:
    failure = start(f"{IMPORTS}\ntorch.multiprocessing.spawn(print, nprocs=2)\n", parts=(4,)).report().failure

    assert failure is not None
    assert "starts 2 ranks itself" in failure.message
    assert "--world-size 2" in failure.message
