"""Gradient accumulation: run one effective batch as micro-batches and make one optimizer step of it."""
