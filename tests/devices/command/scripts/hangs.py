"""Trains, and then waits for ever for something that does not come, as does a server that it started."""
import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--pids", default="", help="file for the process ids of the script and its server")
args = parser.parse_args()

cache = tempfile.mkdtemp(prefix="cache-of-script-")
server = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(10**6)"])
if args.pids:
    with open(args.pids, "w") as file:
        file.write(f"{os.getpid()} {server.pid}\n")

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    for _ in range(args.accum):
        loss = model(torch.randn(args.batch_size, 64, device=device)).square().mean() / args.accum
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}", flush=True)
print("waiting for the other ranks", flush=True)
while True:
    time.sleep(3600)
