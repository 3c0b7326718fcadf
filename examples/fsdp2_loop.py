"""`Accumulator` with FSDP2: the user's own `fully_shard`, and an update that is that of one process.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py

Each rank steps with its share of the effective batch. Gradients are summed with each micro-batch, in float32, and
clipped by their norm over all ranks. If memory runs out on a rank, all end: start again with the size it names.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autoaccum import Accumulator
from autoaccum.errors import AutoaccumError


def sharded_model(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    model = sharded_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=100, clip_norm=1.0, grad_sync="each")
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    for start in range(0, 1536, 512):
        mine = slice(start + dist.get_rank(), start + 512, dist.get_world_size())
        result = accumulator.step((pixels[mine], labels[mine]))
        if dist.get_rank() == 0:
            print(f"{result.samples} samples, loss {result.loss:.3f}, norm {result.grad_norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except AutoaccumError as error:
        print(error)
        raise SystemExit(error.exit_code) from None
