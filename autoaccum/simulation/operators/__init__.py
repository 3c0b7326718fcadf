"""Operators of the simulated card by family: the kernel that CUDA would choose, and the memory it takes."""
