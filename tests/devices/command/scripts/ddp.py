"""torchrun --standalone --nproc-per-node 2 ddp.py --batch-size 8 --accum-steps 2"""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_train_objs(width):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(2048, 256, generator=generator)
    train_set = TensorDataset(data, torch.randint(10, (2048,), generator=generator))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.GELU(),
        torch.nn.Linear(width, width), torch.nn.GELU(),
        torch.nn.Linear(width, 10),
    )
    return train_set, model, torch.optim.SGD(model.parameters(), lr=1e-3)


class Trainer:
    def __init__(self, model, train_data, optimizer, args):
        self.rank = int(os.environ["RANK"])
        local_rank = int(os.environ["LOCAL_RANK"])
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{local_rank}" if cuda else "cpu")
        self.model = DDP(model.to(self.device), device_ids=[local_rank] if cuda else None)
        self.train_data = train_data
        self.optimizer = optimizer
        self.args = args

    def _run_epoch(self, epoch):
        steps = self.args.accum_steps
        self.train_data.sampler.set_epoch(epoch)
        for i, (source, targets) in enumerate(self.train_data):
            source, targets = source.to(self.device), targets.to(self.device)
            last = (i + 1) % steps == 0
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = F.cross_entropy(self.model(source), targets) / steps
                loss.backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        print(f"[rank {self.rank}] Epoch {epoch} | Batchsize: {len(source)} | Steps: {len(self.train_data)} | loss {loss.item():.3f}")

    def train(self):
        for epoch in range(self.args.total_epochs):
            self._run_epoch(epoch)


def main(args):
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    dataset, model, optimizer = load_train_objs(args.width)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, pin_memory=torch.cuda.is_available(), sampler=sampler, drop_last=True)
    Trainer(model, loader, optimizer, args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=8, type=int, help="on each device")
    parser.add_argument("--accum-steps", default=1, type=int)
    parser.add_argument("--width", default=512, type=int)
    main(parser.parse_args())
