"""`Accumulator` in a training script with DistributedDataParallel, for a loss that is a mean over tokens.

torchrun --nproc-per-node 2 examples/ddp_loop.py

Each rank steps with its share of the effective batch. Words differ in length, so ranks have different numbers of
tokens: an average of their means would be wrong. Here tokens are counted over all ranks, and gradients summed once,
so that any number of ranks prints the same losses.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoaccum import Accumulator

WORDS = sorted(sys.stdlib_module_names)
EFFECTIVE_BATCH, EPOCHS, UNCOUNTED = 128, 4, -100


class NextLetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 64), nn.Linear(128, 128)
        self.memory = nn.GRU(64, 128, batch_first=True)

    def forward(self, letters):
        return self.head(self.memory(self.embedding(letters))[0]).transpose(1, 2)


def make_batch(words):
    letters = [torch.tensor([0, *map(ord, word), 0]) for word in words]
    inputs = nn.utils.rnn.pad_sequence([word[:-1] for word in letters], batch_first=True)
    return inputs, nn.utils.rnn.pad_sequence([word[1:] for word in letters], True, UNCOUNTED)


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(NextLetter().to(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(ignore_index=UNCOUNTED), micro_batch=16)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), EFFECTIVE_BATCH):
            mine = order[start : start + EFFECTIVE_BATCH][rank::ranks]
            result = accumulator.step(make_batch([WORDS[index] for index in mine]))
        if rank == 0:
            print(f"epoch {epoch}: {result.samples} words in the last update, loss {result.loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
