"""Tuning: an Optuna study of learning rate and batch sizes, and the throughput of micro-batches."""
