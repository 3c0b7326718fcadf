"""Devices: run or predict a training step within a memory limit, on a CPU, a GPU or a simulated card."""
