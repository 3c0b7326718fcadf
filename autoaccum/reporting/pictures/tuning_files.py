"""The names of a study's pictures."""

from __future__ import annotations

THROUGHPUT, RATES, TRIALS, BATCHES = "throughput.svg", "learning_rate.svg", "trials.svg", "effective_batch.svg"
FILES = (THROUGHPUT, RATES, TRIALS, BATCHES)
"""In the folder of `--plot`."""
