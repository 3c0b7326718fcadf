"""Writes a tiny dataset for ultralytics' command line:

python make_yolo_files.py files
YOLO_CONFIG_DIR=files yolo detect train model=yolo11n.yaml data=files/data.yaml imgsz=64 device=cpu pretrained=False \
    amp=False plots=False val=False warmup_epochs=0 epochs=8 optimizer=SGD nbs=16 batch={micro_batch}

There is no flag for the micro-batches per update: it is round(nbs / batch), where nbs is the effective batch, and grows
to that from 1 while it warms up, for at least 100 batches. On a GPU, amp=True would download a model to check AMP with.
An out-of-memory error in the first epoch is caught: the batch is halved up to three times.
"""
import sys
from pathlib import Path

import numpy as np
from PIL import Image

folder = Path(sys.argv[1]).absolute()
rng = np.random.default_rng(0)
for split, count in (("train", 128), ("val", 8)):
    (folder / "images" / split).mkdir(parents=True, exist_ok=True)
    (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / split / f"{i}.png")
        x, y, w, h = rng.uniform(0.3, 0.7, 4)
        (folder / "labels" / split / f"{i}.txt").write_text(f"{i % 2} {x:.3f} {y:.3f} {w / 2:.3f} {h / 2:.3f}\n")
(folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n")
