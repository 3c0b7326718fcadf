"""A training script as it is, without a word of autoaccum: GPT-2 on random tokens, accumulated by hand.

autoaccum plan --target-batch 256 --gpu rtx4090 -- python examples/train.py --batch {micro_batch} --accum {iter_size}
python examples/train.py --layers 1 --batch 2 --accum 2 --length 32 --updates 3
"""

import argparse

import torch
from gpt2 import GPT2, VOCABULARY
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accum", type=int, default=32)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--updates", type=int, default=1000)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = GPT2(args.layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)

for update in range(1, args.updates + 1):
    total = 0.0
    for _ in range(args.accum):
        ids = torch.randint(VOCABULARY, (args.batch, args.length + 1)).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / args.accum).backward()
        total += loss.item() / args.accum
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: loss {total:.2f}")
