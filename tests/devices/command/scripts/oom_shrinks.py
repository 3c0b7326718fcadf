"""Halves the batch until it fits, as accelerate's find_executable_batch_size does."""
import argparse
import functools
import gc

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()


def should_reduce_batch_size(exception):
    statements = ("CUDA out of memory.", "DefaultCPUAllocator: can't allocate memory", "out of memory")
    return isinstance(exception, (RuntimeError, MemoryError)) and any(text in str(exception) for text in statements)


def find_executable_batch_size(function, starting_batch_size):
    @functools.wraps(function)
    def decorated(*args, **kwargs):
        batch_size = starting_batch_size
        while True:
            if batch_size == 0:
                raise RuntimeError("No executable batch size found, reached zero.")
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as e:
                if not should_reduce_batch_size(e):
                    raise
                print(f"out of memory with batch size {batch_size}")
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                batch_size //= 2

    return decorated


def inner_training_loop(batch_size):
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(args.width, args.width), nn.GELU())]
    model = nn.Sequential(*layers).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        for _ in range(args.accum):
            x = torch.randn(batch_size, 64, args.width, device=args.device)
            (model(x).square().mean() / args.accum).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} with batch size {batch_size}")


find_executable_batch_size(inner_training_loop, starting_batch_size=args.batch_size)()
